"""Write what a trained model predicts: a row per sample, in the data set's order.

    python predict.py checkpoint=outputs/<date>/<run> output=predictions.csv

The suffix of output says the format: .csv, .parquet or .pt. The run's own config is the base;
key=value changes it, and --cfg=job beside the rest shows it. docs/use.md says more: new rows, too.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lockstep.cli import answer_help, readable_errors
from lockstep.use.command import offer_base, use
from lockstep.use.tasks import prediction


@hydra.main(version_base="1.3", config_path="conf", config_name="trained")
def predict(config: DictConfig) -> None:
    use(config, prediction)


if __name__ == "__main__":
    answer_help(__doc__)
    with readable_errors():
        offer_base("predict", Path(__file__).parent / "conf")
        predict()
