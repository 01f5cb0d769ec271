"""Where the processes of a run listen for connections."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class Listening(Callback):
    """Write the listening addresses of the run's whole family, seen from inside a step."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        family = [psutil.Process(), *psutil.Process().parents()]
        ours = list(takewhile(lambda process: "python" in process.name(), family))
        addresses = {
            connection.laddr.ip
            for process in ours
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        (self.directory / f"listening-{trainer.global_rank}.txt").write_text(
            "\n".join(sorted(addresses))
        )
