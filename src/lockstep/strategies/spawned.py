"""``ddp_spawn``: Lightning's own launcher, over a fork server where there is one."""

from __future__ import annotations

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override


class SpawnedEnvironment(LightningEnvironment):
    """The port of the launching process's store, which travels with the pickled strategy.

    Lightning hands the port over in an environment variable. A fork server's children do not see
    variables set after it started, and a ``MASTER_PORT`` left in the shell would be shared by runs.
    """

    port = 0

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return self.port
