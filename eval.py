"""Test a trained model again: its metrics, on any strategy and device count.

    python eval.py checkpoint=outputs/<date>/<run>
    python eval.py checkpoint=<run>/checkpoints/last.ckpt trainer.strategy=ddp trainer.devices=2

The run's own config is the base; key=value changes it, and --cfg=job beside the rest shows it.
docs/use.md says more.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep.cli import answer_help, readable_errors
from lockstep.use.command import offer_base, use
from lockstep.use.tasks import evaluation


@hydra.main(version_base="1.3", config_path="conf", config_name="trained")
def eval(config: DictConfig) -> None:
    use(config, evaluation)


if __name__ == "__main__":
    answer_help(__doc__)
    with readable_errors():
        offer_base("eval", Path(__file__).parent / "conf")
        eval()
