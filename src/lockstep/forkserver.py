"""Loaded first into the fork server, which must outlive a signal that is meant for its children.

A scheduler or a terminal signals all processes of a run; were the fork server to die of it, its
children would look dead to the launching process while they save. They set handlers of their own.
"""

from __future__ import annotations

import signal
import sys

from lockstep.signals import STOPPING

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
