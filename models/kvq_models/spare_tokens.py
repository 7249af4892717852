"""Handles tokens of a tokenizer for which the model has no row of the embedding.

No text may become such a token. Added tokens are left out, as Gemma 3's image mark is: a text that
contains one is read as its characters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvq.errors import CheckpointError
from kvq.json_values import is_object
from kvq_models.pieces import is_byte_token
from kvq_models.tokenizer import Tokenizer, TokenizerFiles

logger = logging.getLogger(__name__)

_SHOWN = 4


def without_spare_tokens(files: TokenizerFiles, tokenizer: Tokenizer, rows: int) -> TokenizerFiles:
    """Returns the files of a tokenizer in which every token has one of the model's `rows`.

    Args:
        files: The tokenizer files of a checkpoint.
        tokenizer: The tokenizer of these files; it alone knows the ids of added tokens.
        rows: How many tokens the model knows, `vocab_size`.

    Raises:
        CheckpointError: A text needs a token that has no row.
    """
    definition: dict[str, Any] = json.loads(files.definition)
    model: dict[str, Any] = definition["model"]
    vocab: Any = model["vocab"]
    pieces: dict[str, int] = (
        vocab if is_object(vocab) else {entry[0]: token for token, entry in enumerate(vocab)}
    )
    added_tokens: list[dict[str, Any]] = definition.get("added_tokens") or []
    contents: list[str] = [token["content"] for token in added_tokens]
    spare_contents = {content for content in contents if (tokenizer.token_id(content) or 0) >= rows}
    spare = {piece for piece, token in pieces.items() if token >= rows}
    if not spare_contents and not spare:
        return files
    reachable = sorted(_reachable(model, spare, spare_contents), key=pieces.__getitem__)
    if reachable:
        raise CheckpointError(
            f"tokenizer.json has {len(reachable)} pieces, {_listing(reachable)}, beyond the {rows} "
            "tokens that config.json gives the model (vocab_size), and texts are made of them; "
            "they do not belong together"
        )
    definition["added_tokens"] = [
        token for token in added_tokens if token["content"] not in spare_contents
    ]
    rest = {piece: token for piece, token in pieces.items() if token < rows}
    model["vocab"] = rest if is_object(vocab) else list(vocab)[:rows]
    names = sorted(spare_contents | spare)
    logger.warning(
        "tokenizer.json names %d tokens beyond the %d that the model has, %s: they are left out, "
        "and a text that holds one is read as its characters",
        len(names),
        rows,
        _listing(names),
    )
    return replace(files, definition=json.dumps(definition, ensure_ascii=False))


def _reachable(model: Mapping[str, Any], spare: set[str], contents: set[str]) -> set[str]:
    """Returns the `spare` pieces that a text can become, other than as an added token."""
    merges: list[Any] | None = model.get("merges")
    if merges is None:
        return spare - contents
    texts: set[str] = set()
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        texts |= {left, right, left + right}
    takes_words = bool(model.get("ignore_merges"))
    return {
        piece
        for piece in spare
        if piece in texts
        or (piece not in contents and (takes_words or len(piece) == 1 or is_byte_token(piece)))
    }


def _listing(names: list[str]) -> str:
    first = ", ".join(map(repr, names[:_SHOWN]))
    return f"{first} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else first
