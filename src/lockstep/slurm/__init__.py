"""SLURM: its processes, its time limits, its queue."""
