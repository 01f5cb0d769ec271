"""A package in the wheel, where Hydra finds the files of this folder by its name only."""
