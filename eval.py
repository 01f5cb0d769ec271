"""Test a trained model: ``python eval.py checkpoint=<run or file> [key=value ...]``.

docs/use.md says what can be chosen.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep.cli import readable_errors
from lockstep.use.command import offer_base, use
from lockstep.use.tasks import evaluation


@hydra.main(version_base="1.3", config_path="conf", config_name="trained")
def eval(config: DictConfig) -> None:
    use(config, evaluation)


if __name__ == "__main__":
    with readable_errors():
        offer_base("eval", Path(__file__).parent / "conf")
        eval()
