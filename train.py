"""Train and test one config: ``python train.py trainer.strategy=ddp trainer.devices=2``.

``python train.py --help`` shows what can be chosen; add ``-m`` and comma-separated values to sweep.
"""

import hydra
from omegaconf import DictConfig

from lockstep.cli import answer_help, readable_errors, run
from lockstep.config import register

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def train(config: DictConfig) -> float | list[float] | None:
    """One run; returns its objective, for sweepers that search."""
    return run(config)


if __name__ == "__main__":
    answer_help()
    with readable_errors():
        train()
