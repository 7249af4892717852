"""A text in the user's own editor, which has the terminal meanwhile."""

import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from textual.app import App, SuspendNotSupported

from kvq.settings import editor_command
from kvq_apps.flags import told


def written_in_editor(app: App[None], text: str) -> tuple[str, str]:
    """What `text` became, and what went wrong, if anything."""
    command = editor_command()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "message.md"
            path.write_text(text, encoding="utf-8")
            words = [*shlex.split(command), str(path)]
            with app.suspend():
                # An error that left this block would leave the screen suspended.
                trouble = _run_in_terminal(words)
            text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError, SuspendNotSupported) as error:
        trouble = told(error)
    return text, f"{command}: {trouble}; set EDITOR to one that works" if trouble else ""


def _run_in_terminal(words: Sequence[str]) -> str:
    """Runs a program that has the terminal meanwhile; what went wrong, or nothing.

    Its Ctrl+C is not ours.
    """
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        status = subprocess.run(words, check=False).returncode  # noqa: S603
    except OSError as error:
        return told(error)
    finally:
        signal.signal(signal.SIGINT, before)
    return f"it ended with status {status}" if status else ""
