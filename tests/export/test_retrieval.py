"""Which heads look for what stood long ago: measured at export, and used by sessions."""

import json
from pathlib import Path

import numpy as np
import pytest

import tiny
from kvq.config import AttentionParams
from kvq.errors import BundleError
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_export.fit.retrieval import LEAST_TOKENS, TIMES, Echoes
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import MANIFEST_FILE, checksum
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import Engine
from shelf import Shelf

# Three turns of four tokens behind a first one that is said once.
FIRST, PERIOD, TOKENS = 1, 4, 13


def looking(*, back: int, share: float = 1.0) -> np.ndarray:
    """Returns weights [T, T] of a head that gives `share` to so many tokens before, else itself."""
    weights = np.eye(TOKENS, dtype=np.float32)
    rows = np.arange(back, TOKENS)
    weights[rows, rows] = 1 - share
    weights[rows, rows - back] = share
    return weights


def shares(*groups: list[np.ndarray], layer: int = 0, echoes: Echoes | None = None) -> list[float]:
    """Returns the shares of KV heads whose query heads have these weights each."""
    watching = Echoes(FIRST, PERIOD) if echoes is None else echoes
    weights = np.array(groups)
    heads, group = weights.shape[:2]
    params = AttentionParams(
        layer=layer, num_heads=heads * group, num_kv_heads=heads, head_dim=2, scale=1
    )
    watching.observe(params, np.zeros((TOKENS, heads * group, 2), np.float32), weights)
    return watching.shares[0, layer].tolist()


def test_a_share_is_what_repeats_give_to_themselves_before_and_the_token_behind() -> None:
    assert shares([looking(back=PERIOD)], [looking(back=PERIOD - 1)]) == [1, 1]
    # From the third turn alone one sees two turns back.
    assert shares([looking(back=2 * PERIOD)], [looking(back=2 * PERIOD - 1)]) == [0.5, 0.5]
    assert shares([looking(back=0)], [looking(back=1)]) == [0, 0]
    assert shares([looking(back=PERIOD + 1)], [looking(back=PERIOD - 2)]) == [0, 0]


def test_of_heads_and_layers_that_share_keys_the_largest_counts() -> None:
    quiet, half = looking(back=1), looking(back=PERIOD, share=0.5)
    assert shares([quiet, half], [quiet, quiet]) == [0.5, 0]
    # A later layer that reads the same keys.
    echoes = Echoes(FIRST, PERIOD)
    assert shares([quiet], [half], echoes=echoes) == [0, 0.5]
    assert shares([half], [quiet], echoes=echoes) == [0.5, 0.5]


@pytest.mark.slow
def test_a_trained_model_has_few_such_heads(shelf: Shelf) -> None:
    """Uses the embedded model, which was taught to find what it read; its first layer cannot."""
    scores = Bundle.open(shelf.embedded("default")).retrieval[0]
    assert scores.max() > 0.5
    assert np.median(scores) < 0.2
    assert scores[0].max() < 0.2


@pytest.mark.slow
def test_sessions_get_those_of_their_classes(shelf: Shelf) -> None:
    path = shelf.exported(shelf.family("gemma4"))
    bundle = Bundle.open(path)
    written = json.loads((path / MANIFEST_FILE).read_text())["retrieval"]
    np.testing.assert_allclose(np.concatenate(bundle.retrieval, axis=None), written, rtol=1e-6)
    with Engine.open(path, threads=1) as engine:
        cache = engine.backend.open_cache(engine.backend.session_config(SessionRequest()))
        assert len(cache.parts) == len(bundle.retrieval) == 2
        for part, expected in zip(cache.parts, bundle.retrieval, strict=True):
            assert expected.shape == (part.shape.num_layers, part.shape.num_kv_heads)
            np.testing.assert_array_equal(part.evidence().retrieval, expected)
        cache.close()


def test_a_bundle_without_them_is_read_and_one_with_others_refused(
    shelf: Shelf, tmp_path: Path
) -> None:
    source = shelf.bundle()
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    data = json.loads((source / MANIFEST_FILE).read_text())
    manifest = tmp_path / MANIFEST_FILE
    right = data["retrieval"]
    assert len(right) == 4
    for wrong in ([*right, 0.5], right[1:], [1.5, *right[1:]], [-0.1, *right[1:]]):
        manifest.unlink()
        changed = data | {"retrieval": wrong}
        manifest.write_text(json.dumps(changed | {"checksum": checksum(changed)}))
        with pytest.raises(BundleError, match=r"retrieval .* is none of this model's"):
            Bundle.open(tmp_path)
    del data["retrieval"]
    manifest.unlink()
    manifest.write_text(json.dumps(data | {"checksum": checksum(data)}))
    with Engine.open(tmp_path, threads=1) as engine:
        cache = engine.backend.open_cache(engine.backend.session_config(SessionRequest()))
        (part,) = cache.parts
        assert part.evidence().retrieval is None
        cache.close()


@pytest.mark.slow
def test_a_context_that_is_too_short_tells_nothing(tmp_path: Path) -> None:
    least = TIMES * LEAST_TOKENS
    for context in (least - 1, least + 1):
        source = tiny.make_llama_checkpoint(
            tmp_path / f"{context}" / "source", max_position_embeddings=context
        )
        made = export_model(source, tmp_path / f"{context}" / "made", ExportOptions(quality=False))
        assert len(made.manifest.retrieval) == (0 if context < least else 4)
