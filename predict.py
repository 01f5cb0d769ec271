"""Write predictions: ``python predict.py checkpoint=<run or file> output=<file>.csv``.

docs/use.md says what can be chosen.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep.cli import readable_errors
from lockstep.use.command import offer_base, use
from lockstep.use.tasks import prediction


@hydra.main(version_base="1.3", config_path="conf", config_name="trained")
def predict(config: DictConfig) -> None:
    use(config, prediction)


if __name__ == "__main__":
    with readable_errors():
        offer_base("predict", Path(__file__).parent / "conf")
        predict()
