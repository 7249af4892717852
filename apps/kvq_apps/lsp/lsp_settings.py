"""The settings of `kvq lsp` that a client may change, checked field by field. Knows no server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
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
            field, check = _CHECKS.get(name, ("", None))
            if check is None:
                continue
            try:
                settings = replace(settings, **{field: check(value)})
            except (TypeError, ValueError):
                log(f"{name} = {value!r} is not possible and stays {getattr(self, field)!r}")
        return settings

    def why_not(self, uri: str) -> str | None:
        """Says why a document of this address is not completed, or None."""
        parts = urlsplit(uri)
        if parts.scheme not in _SCHEMES:
            return f"{parts.scheme}: documents are left alone"
        path = unquote(parts.path)
        name = path.rpartition("/")[2]
        if any(any(map(partial(fnmatchcase, text), self.ignore)) for text in (name, path)):
            return "this file is ignored"
        return None


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _drafts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DRAFTS:
        raise ValueError
    return value


def _globs(value: Any) -> tuple[str, ...]:
    if not is_array(value) or not all(isinstance(item, str) for item in value):
        raise TypeError
    return tuple(value)


def _eagerness(value: Any) -> str:
    if value not in EAGERNESS:
        raise ValueError
    return value


def _delay(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_DELAY_MS:
        raise ValueError
    return value


def _form(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


# By the names that clients send: the field and its check.
_CHECKS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "enabled": ("enabled", _boolean),
    "drafts": ("drafts", _drafts),
    "ignore": ("ignore", _globs),
    "completion": ("completion", _eagerness),
    "otherFiles": ("other_files", _boolean),
    "nextEdit": ("next_edit", _eagerness),
    "nextEditDelay": ("next_edit_delay", _delay),
    "nextEditForm": ("next_edit_form", _form),
}
