"""MLflow: one run per run directory, whose history has each step once, also after a resume."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment  # type: ignore[attr-defined]
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DIRECTORY = "lockstep.directory"
"""The tag by which a resumed run finds its run in the store."""
SQLITE = "sqlite:///"
ENDED = {"success": "FINISHED", "finished": "FINISHED"}
LONGEST = 500
"""Characters of a parameter's value that every store takes."""
AT_ONCE = 100
"""Parameters in one request that every store takes."""


class MlflowLogger(Logger):
    """The run's metrics as MLflow metrics, its config as parameters, in ``tracking_uri``: a file
    ``sqlite:///<path>``, or the address of a server.

    The run is named after its directory and found again by it. Only rank zero opens the store, and
    only one process at a time makes it: Lightning's logger opens it on every rank, and two that
    make its tables break each other. That logger also begins a new run when one is resumed, and
    fails there where a parameter has another value, such as a larger ``trainer.max_epochs``.

    Raises `UsageError` where MLflow is not installed.
    """

    def __init__(
        self,
        directory: str,
        tracking_uri: str,
        experiment_name: str = "lockstep",
        artifact_location: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        for package in ("mlflow", "sqlalchemy") if tracking_uri.startswith(SQLITE) else ("mlflow",):
            if find_spec(package) is None:
                install = "pip install 'lockstep[mlflow]'"
                raise UsageError(f"logger=mlflow needs {package}: {install}")
        self._directory = Path(directory).resolve()
        self._uri, self._experiment_name = tracking_uri, experiment_name
        self._artifacts, self._tags = artifact_location, dict(tags or {})
        self._client: MlflowClient | None = None
        self._run_id: str | None = None
        self._known: set[tuple[str, int]] = set()
        self._row: tuple[int, set[str]] = (-1, set())  # the newest step, and its names

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's client, with this run begun; on other ranks one that does nothing."""
        if self._client is None:
            self._client = self._open()
            self._begin(self._client)
        return self._client

    @property
    def run_id(self) -> str:
        _ = self.experiment
        assert self._run_id is not None
        return self._run_id

    @property
    @override
    def name(self) -> str:
        return "mlflow"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """A value that differs from that of the run before it was resumed becomes a tag."""
        from mlflow.entities import Param

        flat = _flatten_dict(_convert_params(params))
        values = {key: str(value)[:LONGEST] for key, value in flat.items()}
        held = self.experiment.get_run(self.run_id).data.params
        new = [Param(key, value) for key, value in values.items() if key not in held]
        for first in range(0, len(new), AT_ONCE):
            self.experiment.log_batch(self.run_id, params=new[first : first + AT_ONCE])
        for key, value in values.items():
            if held.get(key, value) != value:
                self.experiment.set_tag(self.run_id, f"resumed.{key}", value)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        now, place = int(time.time() * 1000), step or 0
        if self._row[0] != place:
            self._row = (place, set())
        new = [
            Metric(name, float(value), now, place)
            for name, value in metrics.items()
            if (name, place) not in self._known and name not in self._row[1]
        ]
        self._row[1].update(metrics)
        if new:
            self.experiment.log_batch(self.run_id, metrics=new)

    @rank_zero_only
    def log_picture(self, path: Path) -> None:
        self.experiment.log_artifact(self.run_id, str(path), "pictures")

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Take up the history of an interrupted run that goes on from ``step``. What it holds is
        not logged again when it is computed again: MLflow forgets nothing that it was given."""
        for name in self.experiment.get_run(self.run_id).data.metrics:
            points = self.experiment.get_metric_history(self.run_id, name)
            self._known |= {(name, point.step) for point in points}

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self.run_id, ENDED.get(status, "FAILED"))

    def _open(self) -> MlflowClient:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A server that is away costs seconds, not the minutes of MLflow's seven attempts.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        # MLflow 3.17 on SQLAlchemy 2.1; nothing a user can do.
        warnings.filterwarnings("ignore", "The ``noload`` loader strategy", DeprecationWarning)
        from mlflow.tracking import MlflowClient

        is_file = self._uri.startswith(SQLITE)
        # Jobs of a sweep start at once, and would make the tables of a new file at once.
        with FileLock(self._uri.removeprefix(SQLITE) + ".lock") if is_file else nullcontext():
            client = MlflowClient(self._uri)
            if client.get_experiment_by_name(self._experiment_name) is None:
                client.create_experiment(self._experiment_name, self._artifacts)
        return client

    def _begin(self, client: MlflowClient) -> None:
        """Find the run of this directory, or make it."""
        experiment = client.get_experiment_by_name(self._experiment_name)
        assert experiment is not None
        wanted = f"tags.`{DIRECTORY}` = '{self._directory}'"
        for run in client.search_runs([experiment.experiment_id], wanted, max_results=1):
            self._run_id = run.info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        made = client.create_run(
            experiment.experiment_id,
            tags={**self._tags, DIRECTORY: str(self._directory)},
            run_name="/".join(self._directory.parts[-2:]),
        )
        self._run_id = made.info.run_id
