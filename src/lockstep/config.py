"""The schema: every key that a run understands, with its type, its default and its unit.

Nothing here imports torch, so a typo in a key, a wrong type or a wrong name is answered at once.
Hydra merges the files in ``conf/`` into these classes; `as_config` turns the result into plain
dataclasses, which pickle into other processes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lockstep.rundir import job_directory, run_directory, sweep_directory

Target = dict[str, Any]
"""A mapping with ``_target_``: the dotted name of what to call, and its keyword arguments."""


@dataclass
class DataConfig:
    datasets: Target = field(default_factory=dict)
    """Yields `lockstep.data.Splits`, or a LightningDataModule of your own."""
    global_batch_size: int = 32
    """Samples per optimizer micro-step, over all processes and devices together."""
    eval_batch_size: int | None = None
    """The same for validation and test; None: as in training."""
    shuffle: bool = True
    """Draw a new order of the training samples each epoch, from (seed, epoch)."""
    drop_last: bool = False
    """Leave out the last global batch of an epoch when it is not full."""
    num_workers: int = 0
    """Loader processes for each training process; 0: load in the training process."""


@dataclass
class TrainerConfig:
    """The arguments of `lightning.pytorch.Trainer`, by the same names.

    Two are decided before the launch, ``strategy`` and ``devices`` (`lockstep.placement`).
    """

    accelerator: str = "auto"
    strategy: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    fast_dev_run: Any = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    overfit_batches: Any = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    """None: a bar when a person watches (a terminal), none in a log file."""
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: Any = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    """A name that Lightning knows (simple, advanced), or a mapping with ``_target_``."""
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Any = None
    """A list of mappings with ``_target_``."""
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str | None = None
    """None: the run's own directory."""
    enable_autolog_hparams: bool = False
    """False: the whole resolved config is logged instead, once."""
    model_registry: str | None = None


@dataclass
class StrategyConfig:
    name: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the strategy's class, such as ``static_graph`` for ddp."""
    timeout_s: float = 1800.0
    """Seconds after which a collective whose peers do not answer is an error."""


@dataclass
class LaunchConfig:
    grace_s: float = 10.0
    """Seconds that the other ranks get to leave in order after one has failed or was stopped."""
    threads: int | None = None
    """CPU threads per process; None: all cores, shared out over the processes of this machine."""
    max_restarts: int = 0
    """How often a run whose processes have died is started again from its newest checkpoint."""


@dataclass
class SweepConfig:
    resume: str | None = None
    """Go on with the sweep in this directory, or ``latest``: finished jobs are skipped, half-done
    ones go on, the others run."""


@dataclass
class Config:
    seed: int | None = 0
    """Weights, data order and augmentation follow from it; None: drawn, shown and stored."""
    objective: Any = "test/loss"
    """The metric that a sweep gets back from a run, or a list of them; None: nothing is returned.
    Where nothing is tested, ``val/loss`` stands in for ``test/loss``."""
    test: bool = True
    """Test after training, with the best checkpoint when one is monitored."""
    predict: bool = False
    """After that, write the predictions of the test data, in its order, as ``predictions.pt``."""
    plots: bool = False
    """Draw learning curves, confusion matrix and sample predictions beside ``metrics.csv``."""
    compare: bool = False
    """After training, measure what the exchange of gradients costs; for the report of a sweep."""
    compile: Any = False
    """true, or a mapping of `torch.compile`'s arguments: compile the module's ``network``."""
    resume: str | None = None
    """Go on with the run in this directory, or ``latest``: from its newest checkpoint, with its
    config, in its directory; see docs/checkpoints.md."""
    find: dict[str, Any] | None = None
    """Find what to train with instead of training, by a file in ``conf/find/``: ``find=lr``."""
    init_from: str | None = None
    """A checkpoint whose weights a new run starts from."""
    data: DataConfig = field(default_factory=DataConfig)
    model: Target = field(default_factory=dict)
    optimizer: Target = field(default_factory=dict)
    scheduler: Target | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Name -> mapping with ``_target_``; a null entry is left out."""
    logger: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """What you want to find again in ``result.json``; nothing reads it."""


def register() -> None:
    """Make known to Hydra: ``schema``, for a defaults list, and what ``conf/hydra`` resolves."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("times", lambda one, other: one * other, replace=True)
    OmegaConf.register_new_resolver("run_directory", run_directory, replace=True, use_cache=True)
    # Cached: "latest" is another one as soon as a run elsewhere has written something.
    OmegaConf.register_new_resolver(
        "sweep_directory", sweep_directory, replace=True, use_cache=True
    )
    OmegaConf.register_new_resolver("job_directory", job_directory, replace=True)


def as_config(composed: DictConfig) -> Config:
    """Resolve every interpolation and return plain dataclasses.

    Raises `omegaconf.errors.OmegaConfBaseException` when a value does not fit its type or an
    interpolation cannot be resolved.
    """
    resolved = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), resolved))
    assert isinstance(config, Config)
    return config


__all__ = [
    "Config",
    "DataConfig",
    "LaunchConfig",
    "StrategyConfig",
    "SweepConfig",
    "Target",
    "TrainerConfig",
    "as_config",
    "register",
]
