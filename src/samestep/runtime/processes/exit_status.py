"""The status with which a script ends whose loop was ended by a signal: 130 after Ctrl-C, 143 after SIGTERM.

The loop ends behind a step, so that the script can save what it has, and then goes on to its end; whoever started it must not
take that for the end of the training. Python has no way to change the status of a script that is through. So the C library is
told, behind all that Python does at its exit, to end the process by `_exit` with another status. An uncaught exception keeps its own.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys

_stopped_by = 0


def end_as_stopped(number: int) -> None:
    """Let this process end with the status of a signal once its script is through, and say so.

    A notebook or an interactive session, whose user has ended one call of many, keeps its own status.
    """
    if hasattr(sys, "ps1"):
        return
    global _stopped_by
    if not _stopped_by:
        atexit.register(_set_status)
    _stopped_by = number
    print(
        f"samestep: {signal.Signals(number).name} asked the run to stop; this script ends with status {128 + number}",
        file=sys.stderr,
        flush=True,
    )


def _set_status() -> None:
    """Register, with the C library, the end of this process, unless an uncaught exception has ended the script."""
    if getattr(sys, "last_value", None) is not None:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "__cxa_atexit"):
        address = ctypes.cast(library._exit, ctypes.c_void_p)
        library.__cxa_atexit(address, ctypes.c_void_p(128 + _stopped_by), None)
