"""Data sets as three splits, and the one DataModule that turns them into loaders."""

from lockstep.data.module import DataModule, Splits, train_split

__all__ = ["DataModule", "Splits", "train_split"]
