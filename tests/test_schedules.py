"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import Launch
from left import checkpoint

from lockstep.errors import UsageError
from lockstep.schedules import warmup

RUN = ["data=indexed", "model=mlp", "model.network.width=8", "optimizer=sgd", "optimizer.lr=1e-3"]


def optimizer_at_2() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)


def rates(steps: int, **settings: Any) -> list[float]:
    """The learning rate that each step takes, of an optimizer at 2."""
    optimizer = optimizer_at_2()
    scheduler = warmup(optimizer, **settings)
    taken = []
    for _ in range(steps):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return taken


def test_the_rate_is_warmed_up_then_falls_to_zero_by_steps() -> None:
    falling = [1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4), 0.0]
    expected = [0.5, 1.0, 1.5, 2.0, *falling]
    assert rates(8, warmup_steps=3, total_steps=7) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("decay", "left"), [("linear", [1.0, 0.75, 0.5, 0.25]), ("none", [1.0, 1.0, 1.0, 1.0])]
)
def test_the_rate_decays_as_it_is_named_down_to_its_final_share(
    decay: str, left: list[float]
) -> None:
    taken = rates(5, warmup_steps=1, total_steps=5, decay=decay, final=0.5)
    assert taken == pytest.approx([1.0, *[2 * (0.5 + 0.5 * share) for share in left]])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 7, "total_steps": 7}, r"got 7 of 7\. Use 0"),
        ({"decay": "cubic"}, "must be one of cosine, linear, none; got 'cubic'"),
        ({"final": 2}, "from 0 to 1; got 2"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        warmup(optimizer_at_2(), **{"warmup_steps": 1, "total_steps": 5, **settings})


def test_a_schedule_of_torch_that_takes_total_steps_is_told_and_stepped(launch: Launch) -> None:
    own = ["scheduler=warmup", "~scheduler.warmup_steps", "~scheduler.decay", "~scheduler.final"]
    own += ["scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "+scheduler.max_lr=0.001"]
    result = launch(*RUN, *own, "trainer.max_epochs=2")
    (scheduler,) = checkpoint(result["directory"])["lr_schedulers"]
    assert (scheduler["total_steps"], scheduler["last_epoch"]) == (16, 16)
    with pytest.raises(UsageError, match=r"must know the last one; got trainer\.max_epochs=-1"):
        launch(*RUN, "scheduler=warmup", "trainer.max_epochs=-1")
