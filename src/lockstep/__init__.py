"""Lockstep: the strategy and the device count say where a run is computed, never what.

README.md says in which order to read the package.
"""

__version__ = "0.1.0"
