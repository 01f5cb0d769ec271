"""Lockstep: the strategy and the device count say where a run is computed, never what.

Read the package in the order in which data travels: ``config``, ``data``, ``models``, ``module``,
``strategies``, ``build``, ``run``, ``launch``, ``report``.
"""

__version__ = "0.1.0"
