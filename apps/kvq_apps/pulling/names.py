"""How a model is called where it comes from, and what it may be called here. Reads nothing."""

import re

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# One GGUF file of the hub by its type, as other programs write it too.
HUB_FILE = re.compile(
    rf"(?:https://)?(?:hf\.co|huggingface\.co)/(?P<id>{HUB_ID.pattern})(?::(?P<type>\w+))?",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)?(:[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_name(name: str) -> bool:
    """Whether a model may be called so here: a word, or owner/word, and a tag.

    It becomes the name of a folder.
    """
    return _NAME.fullmatch(name) is not None


def name_here(asked: str) -> str:
    """What a model is called here that is asked for as `asked`: without the hub's address."""
    match = HUB_FILE.fullmatch(asked)
    if match is None:
        return asked
    return match["id"] + (f":{match['type']}" if match["type"] else "")
