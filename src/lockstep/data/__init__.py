"""Data sets as three splits, and the one DataModule that turns them into loaders."""

from lockstep.data.module import DataModule, Splits

__all__ = ["DataModule", "Splits"]
