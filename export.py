"""Write a trained network for use elsewhere, as one file that needs neither this project nor Hydra.

    python export.py checkpoint=outputs/<date>/<run> output=network.onnx

The suffix of output says the format: .pt2 or .onnx. The run's own config is the base; key=value
changes it, and --cfg=job beside the rest shows it. docs/use.md says more.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep.cli import answer_help, readable_errors
from lockstep.use.command import ON_ONE_CPU, offer_base, use
from lockstep.use.tasks import exporting


@hydra.main(version_base="1.3", config_path="conf", config_name="trained")
def export(config: DictConfig) -> None:
    use(config, exporting)


if __name__ == "__main__":
    answer_help(__doc__)
    with readable_errors():
        offer_base("export", Path(__file__).parent / "conf", ON_ONE_CPU)
        export()
