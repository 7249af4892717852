"""What a client may configure of `kvq lsp`: checked field by field. Knows no server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, urlsplit

from kvq.json_values import is_array, is_object

MOST_DRAFTS = 9
# What usually holds secrets: it never gets to a model.
SECRETS = (".env", ".env.*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", ".netrc", ".pgpass")
_SCHEMES = ("file", "untitled", "vscode-userdata", "vscode-remote")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`enabled`; `drafts`: most suggestions shown; `ignore`: globs of file names or paths."""

    enabled: bool = True
    drafts: int = MOST_DRAFTS
    ignore: tuple[str, ...] = SECRETS

    def changed(self, wanted: object, log: Callable[[str], None]) -> "Settings":
        """With the values of `wanted`; one that is not possible stays as it was, and is logged."""
        if not is_object(wanted):
            return self
        found = self
        for name, value in wanted.items():
            check = _CHECKS.get(name)
            if check is None:
                continue
            try:
                found = replace(found, **{name: check(value)})
            except (TypeError, ValueError):
                log(f"{name} = {value!r} is not possible and stays {getattr(self, name)!r}")
        return found

    def why_not(self, uri: str) -> str | None:
        """Why a document of this address is left alone, or None."""
        parts = urlsplit(uri)
        if parts.scheme not in _SCHEMES:
            return f"{parts.scheme}: documents are left alone"
        path = unquote(parts.path)
        name = path.rpartition("/")[2]
        if any(fnmatchcase(name, glob) or fnmatchcase(path, glob) for glob in self.ignore):
            return "this file is ignored"
        return None


def _whether(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _drafts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DRAFTS:
        raise ValueError
    return value


def _globs(value: Any) -> tuple[str, ...]:
    if not is_array(value) or not all(isinstance(one, str) for one in value):
        raise TypeError
    return tuple(value)


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "enabled": _whether, "drafts": _drafts, "ignore": _globs
}  # fmt: skip
