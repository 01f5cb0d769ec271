"""Write a trained network for use elsewhere: ``python export.py checkpoint=<run> output=net.onnx``.

docs/use.md says what can be chosen.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep.cli import readable_errors
from lockstep.use.command import ON_ONE_CPU, offer_base, use
from lockstep.use.tasks import exporting


@hydra.main(version_base="1.3", config_path="conf", config_name="trained")
def export(config: DictConfig) -> None:
    use(config, exporting)


if __name__ == "__main__":
    with readable_errors():
        offer_base("export", Path(__file__).parent / "conf", ON_ONE_CPU)
        export()
