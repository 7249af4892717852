"""Whose prompts a session may be reused for. Knows headers and a field, no session.

A prompt that is found in a session is read faster, and `cached_tokens` says so: a client could
learn by trying what another one has sent. Where the server asks for keys, what is sent with one
key is found only with the same key; `cache_salt` (vLLM's name) keeps users of one key apart too.
"""

import hashlib
from collections.abc import Mapping

_SALT_CHARACTERS = 16


def owner_of(headers: Mapping[str, str], cache_salt: str, *, keyed: bool) -> str:
    """A name for who may find a prompt again: hex digits, empty where everyone may."""
    key = headers.get("authorization", "") if keyed else ""
    if not key and not cache_salt:
        return ""
    told = f"{len(key)}:{key}{cache_salt}".encode("utf-8", errors="surrogatepass")
    return hashlib.sha256(told).hexdigest()[:_SALT_CHARACTERS]
