"""Imported by the fork server, before it forks."""

from lockstep.preload import FOR_FORKS, preload

preload(FOR_FORKS)
