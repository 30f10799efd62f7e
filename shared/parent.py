"""A process that must not outlive the one which started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # opened here: between fork and exec nothing may be loaded


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send this process `signum` when the thread that started it ends; elsewhere do nothing.

    For a child, at its beginning or between fork and exec. A parent that has died before is not noticed: compare
    `os.getppid()` afterwards. OSError if the system refuses."""
    if sys.platform == "linux" and _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
