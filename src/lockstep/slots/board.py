"""What a person sees of jobs that run at once: a live table; in a file, a line per event."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lockstep.results import read_result

log = logging.getLogger(__name__)


@dataclass
class _Running:
    words: str
    slots: list[str]
    started: float


class Board:
    def __init__(self, total: int) -> None:
        self.total = total
        self.slots = 1
        self.running: dict[int, _Running] = {}
        self.seconds: list[float] = []
        """Slot-seconds of each job that has finished."""
        self.failed = 0
        self.refused = 0
        console = Console(file=sys.stdout)
        # No thread, and no other streams: processes are forked while it is shown.
        live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self.live = live if console.is_terminal else None

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.tick()
            self.live.stop()

    def started(self, number: int, words: str, slots: list[str]) -> None:
        self.running[number] = _Running(words, slots, time.monotonic())
        self._say(f"#{number} started on {_slots(slots)}: {words}")

    def ended(self, number: int, words: str, error: str | None, directory: Path) -> None:
        run = self.running.pop(number, None)
        if run is None:
            self.refused += 1
            self._say(f"#{number} refused: {words}")
            return
        seconds = time.monotonic() - run.started
        if error is None:
            self.seconds.append(seconds * len(run.slots))
            status = read_result(directory / "result.json").get("status", "finished")
        else:
            self.failed += 1
            status = f"failed ({error.partition(chr(10))[0]})"
        self._say(f"#{number} {status} after {seconds:.1f} s; {self.counts()}")

    def counts(self) -> str:
        left = self.left_s()
        return (
            f"{len(self.running)} running, {self.waiting} waiting, {len(self.seconds)} finished, "
            f"{self.failed + self.refused} failed" + (f", about {_span(left)} left" if left else "")
        )

    @property
    def waiting(self) -> int:
        done = len(self.running) + len(self.seconds) + self.failed + self.refused
        return max(0, self.total - done)

    def left_s(self) -> float | None:
        """Seconds until the last job ends, if all cost what the finished ones did."""
        if not self.seconds:
            return None
        each, now = mean(self.seconds), time.monotonic()
        begun = sum(
            max(0.0, each - (now - run.started) * len(run.slots)) for run in self.running.values()
        )
        return (each * self.waiting + begun) / self.slots

    def tick(self) -> None:
        if self.live:
            self.live.update(self.table(), refresh=True)

    def table(self) -> Table:
        drawn = Table(title=self.counts(), title_justify="left", box=None, pad_edge=False)
        for heading in ("job", "slots", "seconds", "overrides"):
            drawn.add_column(heading, no_wrap=True)
        for number, run in self.running.items():
            seconds = f"{time.monotonic() - run.started:.0f}"
            drawn.add_row(f"#{number}", ",".join(run.slots), seconds, escape(run.words))
        return drawn

    def _say(self, line: str) -> None:
        if self.live:
            self.live.console.print(line, markup=False, highlight=False)
            self.tick()
        else:
            log.info(line)


def _slots(slots: list[str]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {','.join(slots)}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
