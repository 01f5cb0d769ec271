"""What all sweeps have in common: a job's config, and the closing lines that say how each ended."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError
from typing_extensions import override

from lockstep.errors import UsageError, one_line
from lockstep.plan import not_started
from lockstep.processes import context
from lockstep.results import DONE, Result, read_result

IN_TURN = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's launcher that runs the jobs from this process, one after the other."""


class RememberSweep(Callback):
    """Hydra tells callbacks of a sweep's end only when every job was good, so the lines are written
    by `close`, at the end of the command; this notes that there is a sweep, and where."""

    directory: Path | None = None
    overrides: ClassVar[list[str]] = []
    best: str = ""
    """What a search has found, for the end."""

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            type(self).directory = Path(config.hydra.sweep.dir)
        except InterpolationResolutionError:
            return  # Hydra resolves it next, and its error is told; one from here is a warning
        given = OmegaConf.to_container(config.hydra.overrides.task)  # one may hold a ${...}
        assert isinstance(given, list)
        type(self).overrides = given
        if config.hydra.launcher._target_ == IN_TURN:
            context()  # the fork server imports while Hydra checks the config of every job

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        # Hydra keeps what every job returned until the sweep ends; the configs are in files.
        job_return.cfg = job_return.hydra_cfg = None


def compose_job(
    context: HydraContext, sweep: DictConfig, overrides: list[str], number: int
) -> tuple[DictConfig, str]:
    """A job's config, and the name that it has for its directory, which may depend on the job."""
    config = context.config_loader.load_sweep_config(sweep, overrides)
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        place = str(OmegaConf.select(config, "hydra.sweep.subdir"))
    finally:
        HydraConfig.instance().cfg = before
    return config, place


def check_not_empty() -> None:
    """Raise `UsageError` for a sweep that went well because it had no job."""
    directory = RememberSweep.directory
    if directory is not None and not any(directory.glob("*/result.json")):
        given = " ".join(RememberSweep.overrides)
        raise UsageError(
            f"a sweep must have at least one job; got none from {given}. range(a,b) ends before b."
        )


def close() -> None:
    """Print the closing lines of this command's sweep, if it was one."""
    directory, RememberSweep.directory = RememberSweep.directory, None
    if directory is not None and directory.is_dir():
        if any(directory.glob("*/result.json")):
            print_report(directory)
        print("\n".join(filter(None, [closing_lines(directory), RememberSweep.best])), flush=True)
        RememberSweep.best = ""


def print_report(directory: Path) -> None:
    """The table of a sweep, whose files are written beside its jobs."""
    if find_spec("lockstep.report") is None:
        return  # a project may do without
    try:
        from lockstep.report.files import write_report

        print(write_report([directory], directory))
    except Exception as error:  # the jobs' results are there: their lines must still be printed
        print(f"the report could not be written: {one_line(error)}")


def closing_lines(directory: Path) -> str:
    """One line per job, by the ``result.json`` that it left, in the order of the jobs; then those
    of the sweep's plan that were not started."""
    paths = sorted(directory.glob("*/result.json"), key=lambda path: _by_number(path.parent.name))
    results = {path.parent.name: read_result(path) for path in paths}
    counts: dict[str, int] = {}
    for result in results.values():
        counts[result["status"]] = counts.get(result["status"], 0) + 1
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines = [_line(name, result) for name, result in results.items()]
    found = [result.get("overrides", []) for result in results.values()]
    lines += [
        f"  #{number}  not started  {' '.join(overrides)}"
        for number, overrides in not_started(directory / "multirun.yaml", found)
    ]
    return "\n".join([f"sweep {directory}: {total or 'no job was started'}", *lines])


def _by_number(name: str) -> tuple[int, str]:
    return (int(name) if name.isdigit() else sys.maxsize, name)


def _line(name: str, result: Result) -> str:
    overrides = " ".join(result.get("overrides", []))
    if result["status"] in DONE:
        metrics, objective = result["metrics"], result.get("objective")
        first = objective[0] if isinstance(objective, list) else objective
        wanted = (first, "test/loss", "val/loss", *metrics)
        key = next((key for key in wanted if key in metrics), None)
        end = f"{key} {metrics[key]:.6g}" if key else ""
        end = f"{end}  {result['wall_time_s']:.1f} s"
    else:
        end = (result.get("error") or "").partition("\n")[0]
    return f"  #{name}  {result['status']:<11} {overrides}  {end}"
