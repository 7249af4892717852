"""The rules for names of models: on the hub, and on this machine."""

import re
from typing import TYPE_CHECKING

from kvq.errors import ModelError, argument

if TYPE_CHECKING:
    from kvq_apps.names.pull_request import PullRequest

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# One GGUF file of the hub by its type, as other programs also write it.
HUB_FILE = re.compile(
    rf"(?:https://)?(?:hf\.co|huggingface\.co)/(?P<id>{HUB_ID.pattern})(?::(?P<type>\w+))?",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)?(:[A-Za-z0-9][\w.-]*)?", re.ASCII)


# The hub allows so many; names of folders also contain a version.
_MOST_LETTERS = 96


def is_hub_id(name: str) -> bool:
    """Says whether `name` can be a hub id, OWNER/REPOSITORY."""
    return len(name) <= _MOST_LETTERS and HUB_ID.fullmatch(name) is not None


def is_name(name: str) -> bool:
    """Says whether a local model can have this name: a word or owner/word, and maybe a tag.

    The name becomes the name of a folder.
    """
    return len(name) <= 2 * _MOST_LETTERS and _NAME.fullmatch(name) is not None


def local_name(name: str) -> str:
    """Returns the local name of a model: the name without the hub's address."""
    match = HUB_FILE.fullmatch(name)
    if match is None:
        return name
    return match["id"] + (f":{match['type']}" if match["type"] else "")


class NotPulledError(ModelError):
    """Says that a model can be pulled and that nobody agreed to it; `question` asks a person."""

    def __init__(self, request: "PullRequest") -> None:
        super().__init__(
            f"{request.name} is not here yet; pull it with `kvq pull {request.name}`, or give "
            f"{argument('--yes')} and it is pulled when it is needed"
        )
        self.model = request
        license = request.license or "unknown"
        self.question = (
            f"{request.name} is not here yet. Pull it from {request.sources[0]}, licence {license}?"
        )
