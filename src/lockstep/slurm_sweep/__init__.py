"""Each job of a sweep as a SLURM job of its own: ``hydra/launcher=slurm``."""
