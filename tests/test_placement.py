"""The table of decisions: config and environment -> where a run is computed."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import Config, TrainerConfig
from lockstep.errors import UsageError
from lockstep.placement import place


@pytest.fixture(autouse=True)
def _four_gpus_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.devices.driver_gpus", lambda: 4)


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FOUR_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "CUDA_VISIBLE_DEVICES": "",
}
TORCHRUN_4_ON_2 = TORCHRUN | {"WORLD_SIZE": "4", "RANK": "3"}
TORCHRUN_1 = TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "CUDA_VISIBLE_DEVICES": ""}
SRUN_1 = SLURM_JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
SRUN_2_NODES = SRUN_1 | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
SRUN = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": ""}


def config(**trainer: Any) -> Config:
    return Config(trainer=TrainerConfig(**{"accelerator": "cpu"} | trainer))


@pytest.mark.parametrize(
    ("trainer", "sweep", "environ", "kind", "strategy", "world_size", "rank"),
    [
        ({"devices": 1}, False, NO_GPU, "here", "auto", 1, 0),
        ({"devices": 1}, True, NO_GPU, "worker", "auto", 1, 0),
        ({"devices": "auto"}, False, NO_GPU, "here", "auto", 1, 0),
        ({"devices": 2}, False, NO_GPU, "ranks", "ddp", 2, 0),
        ({"strategy": "dp", "devices": 3}, False, NO_GPU, "here", "dp", 1, 0),
        ({"strategy": "dp", "devices": 3}, True, NO_GPU, "worker", "dp", 1, 0),
        ({"strategy": "ddp", "devices": 1}, False, NO_GPU, "ranks", "ddp", 1, 0),
        ({"strategy": "ddp", "devices": "2"}, True, NO_GPU, "ranks", "ddp", 2, 0),
        ({"strategy": "ddp_spawn", "devices": 2}, False, NO_GPU, "here", "ddp_spawn", 2, 0),
        ({"strategy": "ddp_spawn", "devices": 2}, True, NO_GPU, "worker", "ddp_spawn", 2, 0),
        (
            {"strategy": "dp", "accelerator": "auto", "devices": [1, 0]},
            False,
            FOUR_GPUS,
            "here",
            "dp",
            1,
            0,
        ),
        (
            {"strategy": "ddp", "accelerator": "auto", "devices": [1, 3]},
            False,
            FOUR_GPUS,
            "ranks",
            "ddp",
            2,
            0,
        ),
        ({"accelerator": "auto", "devices": "auto"}, False, FOUR_GPUS, "ranks", "ddp", 4, 0),
        ({"accelerator": "auto", "devices": -1}, False, FOUR_GPUS, "ranks", "ddp", 4, 0),
        ({"accelerator": "cuda", "devices": 1}, False, FOUR_GPUS, "here", "auto", 1, 0),
        ({"strategy": "dp", "devices": [1, 0]}, False, NO_GPU, "here", "dp", 1, 0),
        ({"strategy": "ddp", "devices": 2}, False, TORCHRUN, "launched", "ddp", 2, 1),
        ({"strategy": "auto", "devices": 2}, False, TORCHRUN, "launched", "ddp", 2, 1),
        (
            {"strategy": "ddp", "devices": 2, "num_nodes": 2},
            False,
            TORCHRUN_4_ON_2,
            "launched",
            "ddp",
            4,
            3,
        ),
        ({"strategy": "dp", "devices": 2}, False, TORCHRUN_1, "here", "dp", 1, 0),
        ({"strategy": "ddp", "devices": 2}, False, SRUN, "launched", "ddp", 2, 1),
        (
            {"strategy": "ddp", "devices": 1, "num_nodes": 2},
            False,
            SRUN_2_NODES,
            "launched",
            "ddp",
            2,
            0,
        ),
        ({"strategy": "ddp", "devices": 1}, False, SLURM_JOB, "ranks", "ddp", 1, 0),
        ({"devices": 1}, False, SLURM_JOB, "here", "auto", 1, 0),
        ({"strategy": "dp", "devices": 2}, False, SRUN_1, "here", "dp", 1, 0),
        ({"strategy": "ddp", "devices": 2}, True, SRUN_1, "ranks", "ddp", 2, 0),
        ({"strategy": "ddp", "devices": 2}, True, SLURM_JOB, "ranks", "ddp", 2, 0),
        (
            {"strategy": "ddp", "devices": 2},
            False,
            {**NO_GPU, "MASTER_PORT": "29500"},
            "ranks",
            "ddp",
            2,
            0,
        ),
        (
            {"strategy": "ddp", "devices": 2},
            False,
            {**NO_GPU, "SLURM_NTASKS": "1"},
            "ranks",
            "ddp",
            2,
            0,
        ),
    ],
)
def test_the_decision(
    trainer: dict[str, Any],
    sweep: bool,
    environ: dict[str, str],
    kind: str,
    strategy: str,
    world_size: int,
    rank: int,
) -> None:
    placement = place(config(**trainer), sweep, environ)
    decided = (placement.kind, placement.strategy, placement.world_size, placement.rank)
    assert decided == (kind, strategy, world_size, rank)


def test_a_sweep_under_a_launcher_is_refused() -> None:
    for environ in (TORCHRUN, SRUN):
        with pytest.raises(UsageError, match=r"python train\.py -m"):
            place(config(strategy="ddp", devices=2), True, environ)


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ddp", 1), ("dp", 2), ("auto", 2)])
def test_auto_is_the_cpu_on_a_mac_when_several_devices_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, strategy: str, devices: int
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    asked = config(accelerator="auto", strategy=strategy, devices=devices)
    assert place(asked, False, NO_GPU).accelerator == "cpu"
    assert place(config(accelerator="auto", devices=1), False, NO_GPU).accelerator == "mps"


def test_visible_devices_that_do_not_exist_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(config(accelerator="auto", devices="auto"), False, FOUR_GPUS).world_size == 4
    monkeypatch.setattr("lockstep.devices.driver_gpus", lambda: 0)
    assert place(config(accelerator="auto", devices=1), False, FOUR_GPUS).accelerator == "cpu"


@pytest.mark.parametrize(
    ("trainer", "environ", "words"),
    [
        ({"devices": 1}, {**NO_GPU, "TORCHELASTIC_RUN_ID": "x"}, ["unset TORCHELASTIC_RUN_ID"]),
        ({"strategy": "dp", "devices": 2}, SRUN, ["srun started 2", "--ntasks=1"]),
        ({"devices": 1}, {**NO_GPU, "OMPI_COMM_WORLD_SIZE": "2"}, ["mpirun started 2"]),
        ({"strategy": "dpp"}, NO_GPU, ["got 'dpp'", "Did you mean dp?"]),
        ({"accelerator": "gppu"}, NO_GPU, ["trainer.accelerator", "auto, cpu, gpu"]),
        ({"devices": 0}, NO_GPU, ["got 0", "CPU cores"]),
        ({"devices": -3}, NO_GPU, ["got -3"]),
        ({"devices": "two"}, NO_GPU, ["got 'two'"]),
        ({"devices": 1.5}, NO_GPU, ["got 1.5"]),
        ({"devices": True}, NO_GPU, ["got True"]),
        ({"devices": []}, NO_GPU, ["got []"]),
        ({"devices": [0, 0]}, NO_GPU, ["different device ids"]),
        ({"devices": 5, "accelerator": "gpu"}, FOUR_GPUS, ["got 5", "has 4"]),
        ({"devices": [4], "accelerator": "gpu"}, FOUR_GPUS, ["device 4", "ids 0 to 3"]),
        ({"num_nodes": 0}, NO_GPU, ["trainer.num_nodes", "got 0"]),
        ({"strategy": "dp", "num_nodes": 2}, NO_GPU, ["one machine", "trainer.strategy=ddp"]),
        ({"strategy": "ddp_spawn", "num_nodes": 2}, NO_GPU, ["one machine"]),
        ({"strategy": "ddp", "num_nodes": 2}, NO_GPU, ["torchrun --nnodes=2 --nproc-per-node=1"]),
        (
            {"strategy": "ddp_spawn", "devices": 2},
            TORCHRUN,
            ["starts its own", "TORCHELASTIC_RUN_ID"],
        ),
        ({"strategy": "dp", "devices": 2}, TORCHRUN, ["torchrun started 2", "WORLD_SIZE"]),
        ({"devices": 1}, TORCHRUN, ["torchrun started 2"]),
        ({"strategy": "ddp", "devices": 1}, TORCHRUN, ["trainer.devices=2 trainer.num_nodes=1"]),
        (
            {"strategy": "ddp", "devices": 4},
            TORCHRUN_4_ON_2,
            ["trainer.devices=2 trainer.num_nodes=2"],
        ),
        ({"devices": 1}, {**NO_GPU, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "unset LOCAL_RANK"]),
        ({"devices": 1}, {**NO_GPU, "RANK": "0", "WORLD_SIZE": "2"}, ["unset RANK WORLD_SIZE"]),
        (
            {"strategy": "ddp", "devices": 2},
            {**NO_GPU, "SLURM_NTASKS": "2"},
            ["srun python train.py"],
        ),
        ({"strategy": "ddp", "devices": 4}, SRUN, ["srun started 2", "--ntasks-per-node"]),
        ({"strategy": "ddp", "devices": 2}, SLURM_JOB, ["SLURM_STEP_ID", "srun python train.py"]),
        ({"strategy": "ddp", "devices": 2}, SRUN_1, ["srun started 1", "--ntasks-per-node=2"]),
        ({"strategy": "ddp", "devices": 2}, SRUN_2_NODES, ["1(x2) per node", "--nodes=1"]),
        ({"strategy": "ddp", "accelerator": "mps"}, NO_GPU, ["single device"]),
    ],
)
def test_a_contradiction_is_refused_with_value_and_repair(
    trainer: dict[str, Any], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UsageError) as refusal:
        place(config(**trainer), False, environ)
    for word in words:
        assert word in str(refusal.value)
