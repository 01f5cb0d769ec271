"""What a run asks of SLURM follows from its config."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from lockstep.errors import UsageError
from lockstep.slurm_sweep.shape import Shape, check_options, shape_of
from lockstep.slurm_sweep.submit import parameters

DEFAULTS: dict[str, Any] = {
    "partition": None,
    "account": None,
    "qos": None,
    "timeout_min": 240,
    "signal_delay_s": 90,
    "cpus_per_task": None,
    "gpus_per_node": None,
    "mem_gb": None,
    "array_parallelism": 256,
    "setup": None,
    "options": {},
}


def composed(**trainer: Any) -> Any:
    defaults = {"strategy": "auto", "devices": 1, "num_nodes": 1, "accelerator": "cpu"}
    return OmegaConf.create({"trainer": defaults | trainer})


@pytest.mark.parametrize(
    ("trainer", "launcher", "expected"),
    [
        ({}, {}, Shape(1, 1, 0)),
        ({"strategy": "dp", "devices": 2}, {}, Shape(1, 1, 0)),
        ({"strategy": "ddp_spawn", "devices": 2}, {}, Shape(1, 1, 0)),
        ({"strategy": "ddp", "devices": "2"}, {}, Shape(1, 2, 0)),
        ({"devices": 2}, {}, Shape(1, 2, 0)),
        ({"devices": 4, "num_nodes": 2, "accelerator": "gpu"}, {}, Shape(2, 4, 4)),
        ({"strategy": "dp", "devices": 2, "accelerator": "cuda"}, {}, Shape(1, 1, 2)),
        ({"devices": 2, "accelerator": "auto"}, {"gpus_per_node": 2}, Shape(1, 2, 2)),
        ({"devices": 2, "accelerator": "gpu"}, {"options": {"gres": "gpu:2"}}, Shape(1, 2, 0)),
    ],
)
def test_nodes_tasks_and_gpus_follow_from_the_config(
    trainer: dict[str, Any], launcher: dict[str, Any], expected: Shape
) -> None:
    assert shape_of(composed(**trainer), DEFAULTS | launcher) == expected


@pytest.mark.parametrize(
    ("trainer", "launcher", "words"),
    [
        ({"devices": "auto"}, {}, ["must be their number; got auto", "trainer.devices=2"]),
        ({"devices": [0, 1]}, {}, ["got [0, 1]"]),
        ({"strategy": "dpp"}, {}, ["got 'dpp'. Did you mean dp?"]),
        ({"strategy": "dp", "num_nodes": 2}, {}, ["works on one machine", "num_nodes=2"]),
        (
            {"devices": 4, "accelerator": "gpu"},
            {"gpus_per_node": 2},
            ["gpus_per_node must be at least trainer.devices; got 2 and 4"],
        ),
    ],
)
def test_a_run_that_no_allocation_fits_is_refused_before_it_is_submitted(
    trainer: dict[str, Any], launcher: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of(composed(**trainer), DEFAULTS | launcher)
    for word in words:
        assert word in str(refused.value)


def test_options_cannot_contradict_what_follows_from_the_config() -> None:
    check_options({"constraint": "a100"})
    with pytest.raises(UsageError, match=r"must leave ntasks-per-node out.*trainer\.devices"):
        check_options({"ntasks-per-node": 3})


def test_sbatch_is_told_the_shape_the_notice_and_further_options() -> None:
    from submitit.slurm.slurm import _make_sbatch_string

    launcher = DEFAULTS | {"mem_gb": 8, "cpus_per_task": 3, "options": {"constraint": "a100"}}
    given = parameters(Shape(2, 4, 4), launcher)
    assert given["srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=3"]
    assert (given["time"], given["mem"]) == (240, "8192M")
    script = _make_sbatch_string("run", "logs", **given)
    wanted = ["nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "signal=SIGUSR1@90", "requeue"]
    for option in [*wanted, "constraint=a100"]:
        assert f"#SBATCH --{option}" in script.splitlines()
