"""Callbacks, one idea a file. The guards and the clock are in every run; the rest is config."""
