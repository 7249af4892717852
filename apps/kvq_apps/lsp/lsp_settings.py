"""The settings of `kvq lsp` that a client may change, checked field by field. Knows no server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from kvq.json_values import is_array, is_object

MOST_DRAFTS = 9
# How eagerly completions and next edits are shown, and the longest wait for one in milliseconds.
EAGERNESS = ("off", "likely", "always")
MOST_DELAY_MS = 10_000
# Files that usually hold secrets: they are never given to a model.
SECRETS = (".env", ".env.*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", ".netrc", ".pgpass")
_SCHEMES = ("file", "untitled", "vscode-userdata", "vscode-remote")


@dataclass(frozen=True, kw_only=True, slots=True)
class LspSettings:
    """Holds the settings: `enabled`, most `drafts` shown, and `ignore` globs of names or paths.

    `completion`: how eagerly completions are shown that nobody asked for. `other_files`: parts of
    other open files are read before a completion.
    Of next edits: how eagerly they are shown, after how many milliseconds without a change, and in
    which form the model is asked.
    """

    enabled: bool = True
    drafts: int = MOST_DRAFTS
    ignore: tuple[str, ...] = SECRETS
    completion: str = "likely"
    other_files: bool = True
    next_edit: str = "likely"
    next_edit_delay: int = 150
    next_edit_form: str = "auto"

    def updated(self, values: object, log: Callable[[str], None]) -> "LspSettings":
        """Returns settings with `values`; an impossible value is logged and changes nothing."""
        if not is_object(values):
            return self
        settings = self
        for name, value in values.items():
            if name not in _CHECKS:
                continue
            field, is_possible = _CHECKS[name]
            if is_possible(value):
                # `_why_not` remembers its answers, and a list could be no key of them.
                settings = replace(settings, **{field: tuple(value) if is_array(value) else value})
            else:
                log(f"{name} = {value!r} is not possible and stays {getattr(self, field)!r}")
        return settings

    def why_not(self, uri: str) -> str | None:
        """Says why a document of this address is not completed, or None."""
        return _why_not(uri, self.ignore)


# Every key asks this of every open document.
@lru_cache
def _why_not(uri: str, ignore: tuple[str, ...]) -> str | None:
    parts = urlsplit(uri)
    if parts.scheme not in _SCHEMES:
        return f"{parts.scheme}: documents are left alone"
    path = unquote(parts.path)
    name = path.rpartition("/")[2]
    if any(fnmatchcase(text, pattern) for text in (name, path) for pattern in ignore):
        return "this file is ignored"
    return None


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_eagerness(value: Any) -> bool:
    return value in EAGERNESS


# By the names that clients send: the field, and what says whether a value is possible.
_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "enabled": ("enabled", _is_boolean),
    "drafts": ("drafts", lambda value: type(value) is int and 1 <= value <= MOST_DRAFTS),
    "ignore": ("ignore", lambda value: is_array(value) and all(isinstance(x, str) for x in value)),
    "completion": ("completion", _is_eagerness),
    "otherFiles": ("other_files", _is_boolean),
    "nextEdit": ("next_edit", _is_eagerness),
    "nextEditDelay": (
        "next_edit_delay",
        lambda value: type(value) is int and 0 <= value <= MOST_DELAY_MS,
    ),
    "nextEditForm": ("next_edit_form", lambda value: isinstance(value, str)),
}
