"""Starts the process `kvq`: handles Ctrl-C before anything slow is imported.

An interrupt inside an import could become an ImportError or a traceback.
"""

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from kvq_apps.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if ours:
            # Only the interpreter's own end is left.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
