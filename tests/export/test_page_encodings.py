"""How pages are encoded and by which policy: chosen at export, kept in bundles and sessions."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from kvq.class_cache import ClassCache
from kvq.config import (
    DEFAULT_POLICY,
    PAGE_TOKENS,
    AttentionParams,
    CacheShape,
    KvPlan,
    PageForm,
)
from kvq.errors import BundleError
from kvq.native import NativeCache
from kvq.policies import policy_named
from kvq.reference.stored import KEYS, decode, encode
from kvq.sizing import ClassSpec
from kvq_apps.cli import main
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_export.fit import page_encodings
from kvq_export.fit.calibrated import TABLES
from kvq_export.fit.prediction import store_arrays
from kvq_export.phases import no_progress
from kvq_export.write.writer import write_manifest
from kvq_models.family import is_stack
from kvq_models.reference import forward
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import FEEDBACK_FILE, MANIFEST_FILE, Manifest, checksum
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import Engine
from shelf import PLAIN, Shelf

LAYERS, KV_HEADS = 2, 2


def export(source: Path, name: str = "bundle", **options: Any) -> Bundle:
    chosen = ExportOptions(**{"quality": False, "threads": 1, **options})
    return export_model(source, source.parent / name, chosen)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_llama_checkpoint(tmp_path_factory.mktemp("forms") / "source")


@pytest.fixture(scope="module")
def bundle(source: Path) -> Bundle:
    return export(source, policy="h2o:recent=0.25")


def test_each_head_gets_the_form_of_keys_and_of_values_that_makes_less_noise(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = {
        PageForm.PLAIN: [[1.0, 1.0], [2.0, 2.0]],
        PageForm.CHANNEL_VALUES: [[0.9, 1.1], [2.0, 1.9]],
    }
    turned = [[False, True], [False, True]]
    feedback = np.zeros((LAYERS, KV_HEADS, 16, 16), np.float16)
    monkeypatch.setattr(page_encodings, "_value_noise", lambda _, __, form: [np.array(noise[form])])
    monkeypatch.setattr(page_encodings, "_key_fits", lambda *_: [(np.array(turned), feedback)])
    rotated, channels = PageForm.ROTATED_KEYS, PageForm.CHANNEL_VALUES
    made = export(source, "told")
    assert made.forms == (channels, rotated, PageForm.PLAIN, rotated | channels)


@pytest.mark.slow
def test_a_loud_channel_that_no_query_reads_is_noise_only_once_it_is_spread(
    tmp_path: Path,
) -> None:
    """Looks at layer 0's first head: turning it puts its span into every channel."""
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    file = source / "model.safetensors"
    tensors = {name: array.copy() for name, array in tiny.read_safetensors(file).items()}
    keys, queries = (tensors[f"model.layers.0.self_attn.{side}_proj.weight"] for side in "kq")
    dim = len(keys) // KV_HEADS
    pair = [dim // 2 - 1, dim - 1]  # what the rotary embedding turns least
    keys[pair] *= 50
    for head in range(len(queries) // dim):
        queries[[head * dim + channel for channel in pair]] = 0
    tiny.write_safetensors(file, tensors)
    made = export(source)
    watcher = query_moments(made)
    noise = [
        (watcher.ranges((0, 0), 4, rotated=rotated) * page_encodings.feedback_of(moments)[1]).sum(
            -1
        )
        for rotated, moments in (
            (False, watcher.moments[0, 0]),
            (True, page_encodings.rotate_moments(watcher.moments[0, 0])),
        )
    ]
    assert noise[1][0] > 10 * noise[0][0]
    assert noise[1][1] < 3 * noise[0][1]
    assert not made.forms[0] & PageForm.ROTATED_KEYS


def query_moments(bundle: Bundle) -> page_encodings.QueryMoments:
    """Reads a text and returns what its queries ask of each head."""
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    ids = np.array(tokenizer.encode("def f(x):\n    return x\n" * 99)[:512])
    watcher = page_encodings.QueryMoments()
    positions = np.arange(len(ids))
    forward(bundle.config, bundle.read_weight, ids, positions, watcher, slice(0, 0))
    return watcher


@pytest.mark.parametrize("case", ["gemma4", "qwen3-moe", "phi"])
def test_keys_are_fitted_with_one_matrix_or_expert_in_memory(
    case: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, ids = Bundle.open(shelf.exported(shelf.family(case), PLAIN)), np.arange(100, 200)
    watcher, positions = page_encodings.QueryMoments(), np.arange(len(ids))
    forward(bundle.config, bundle.read_weight, ids, positions, watcher, slice(0, 0))
    read, whole = Bundle.read_weight, set[str]()

    def watched(self: Bundle, name: str, rows: Any = None) -> np.ndarray:
        if rows is None:
            whole.add(name)
        return read(self, name, rows)

    monkeypatch.setattr(Bundle, "read_weight", watched)
    fits = page_encodings._key_fits(bundle, ids, no_progress)
    assert whole
    assert not [name for name in whole if name in TABLES or is_stack(name)]
    for (index, layer), moments in watcher.moments.items():
        for head, turned in enumerate(fits[index][0][layer]):
            basis_moments = page_encodings.rotate_moments(moments) if turned else moments
            expected = page_encodings.feedback_of(basis_moments)[0][head]
            np.testing.assert_allclose(fits[index][1][layer][head], expected, atol=0.02)


@pytest.mark.parametrize(
    "change",
    [
        lambda feedback: feedback[:, :1],
        lambda feedback: feedback + np.tril(np.ones_like(feedback)),
        lambda feedback: np.where(feedback == 0, feedback, np.float16(np.inf)),
    ],
)
def test_feedback_that_is_none_is_refused(
    change: Callable[[np.ndarray], np.ndarray], bundle: Bundle, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(bundle.path, tmp_path / "bundle"))
    (feedback,) = bundle.key_feedback
    assert feedback.shape == (LAYERS, KV_HEADS, 64, 64)
    info = store_arrays(folder / FEEDBACK_FILE, {"0": change(feedback.astype(np.float16))})
    files = {**bundle.manifest.files, FEEDBACK_FILE: info}
    write_manifest(folder, dataclasses.replace(bundle.manifest, files=files))
    says = pytest.raises(BundleError, match=r"feedback.npz does not hold what was fitted")
    with Engine.open(folder, threads=1) as engine, says:
        engine.session()


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_carried_keys_err_where_queries_do_not_look(bits: int) -> None:
    """Rounds on the same grid; queries of eight directions leave at most a third of the error."""
    rng = np.random.default_rng(bits)
    x, ways = rng.standard_normal((64, 64)), rng.standard_normal((8, 64))
    queries = rng.standard_normal((500, 8)) @ ways + 0.1 * rng.standard_normal((500, 64))
    feedback, remaining = page_encodings.feedback_of(queries.T @ queries)
    squares = np.square(queries).sum(axis=0)
    assert (remaining <= 1.001 * (squares + page_encodings.DAMPING * squares.mean())).all()
    errors: list[float] = []
    for carried in (None, feedback.astype(np.float32)):
        codes, grid = encode(x.astype(np.float32), KEYS, bits=bits, feedback=carried)
        assert grid.stored() == encode(x.astype(np.float32), KEYS)[1].stored()
        errors.append(float(np.square(queries @ (decode(codes, grid, bits, 0) - x).T).sum()))
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("loudest", [17.0, 1000.0])
def test_values_that_no_query_reads_may_be_as_loud_as_they_like(loudest: float) -> None:
    """Spoils a grid of channels, which is finer where they lie apart, by one token of a page."""
    dim, tokens, loud = 64, 4 * PAGE_TOKENS, slice(30, None, PAGE_TOKENS)
    rng = np.random.default_rng(0)
    query = np.zeros((tokens, dim), np.float32)
    key, value = rng.normal(scale=0.1, size=(2, tokens, dim)).astype(np.float32)
    value += np.arange(dim, dtype=np.float32) / 4
    query[:, 0], key[loud, 0], value[loud, 5] = 8, -100, loudest
    rows = np.concatenate([query, key, value], axis=1)
    noise = {
        form: _noise_of_rows(form, rows)[0, 0] for form in (PageForm.PLAIN, PageForm.CHANNEL_VALUES)
    }
    ratio = noise[PageForm.CHANNEL_VALUES] / noise[PageForm.PLAIN]
    assert ratio < 0.1 if loudest < 20 else ratio > 10


def _noise_of_rows(form: PageForm, qkv: np.ndarray) -> np.ndarray:
    """Returns `_noise_of` of a cache of one head that has read the rows [T, 3 D]."""
    tokens, dim = len(qkv), qkv.shape[1] // 3
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=dim)
    spec = ClassSpec(
        shape=shape,
        plan=KvPlan(k_bits=8, v_bits=8),
        context_tokens=tokens,
        chunk_tokens=PAGE_TOKENS,
        policy="oldest",
        observed=True,
        page_encodings=(form,),
    )
    cache = ClassCache(spec.resolved())
    layer = AttentionParams(layer=0, num_heads=1, num_kv_heads=1, head_dim=dim, scale=dim**-0.5)
    try:
        for start in range(0, tokens, PAGE_TOKENS):
            cache.begin(PAGE_TOKENS)
            where = np.arange(start, start + PAGE_TOKENS)
            cache.attend(layer, qkv[where], where, np.zeros(dim // 2, np.float32))
            cache.commit(PAGE_TOKENS)
        return page_encodings._noise_of(cache)
    finally:
        cache.close()


@pytest.mark.slow
def test_the_same_bundle_gets_the_same_forms(source: Path, bundle: Bundle) -> None:
    again = export(source, "again")
    assert again.manifest.forms == bundle.manifest.forms
    data = json.loads((again.path / MANIFEST_FILE).read_text())
    assert data["page_forms"] == [int(form) for form in bundle.manifest.forms]


def test_norms_are_those_of_the_weights_that_make_keys_and_values(
    source: Path, bundle: Bundle
) -> None:
    tensors = tiny.read_safetensors(source / "model.safetensors")
    expected = [
        [np.linalg.norm(tensors[f"model.layers.{layer}.self_attn.{side}_proj.weight"])
         for side in "kv"]
        for layer in range(LAYERS)
    ]  # fmt: skip
    np.testing.assert_allclose(bundle.weight_norms(range(LAYERS)), expected, rtol=0.02)


# What the bundle keeps


def test_the_manifest_holds_policy_and_plan(bundle: Bundle) -> None:
    data = json.loads((bundle.path / MANIFEST_FILE).read_text())
    assert data["kv"] == {"k_bits": 4, "v_bits": 4, "sink_tokens": 4, "policy": "h2o:recent=0.25"}
    again = Manifest.from_json(json.loads(json.dumps(bundle.manifest.to_json())))
    assert again == bundle.manifest
    assert again.policy == "h2o:recent=0.25"


def test_a_bundle_of_before_is_read_without_what_it_measured(
    bundle: Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in bundle.path.iterdir():
        (folder / file.name).symlink_to(file)
    data = json.loads((bundle.path / MANIFEST_FILE).read_text())
    del data["kv"]["policy"]
    data["sensitivity"] = {"key": [[1.0, 1.0]] * LAYERS}
    (folder / MANIFEST_FILE).unlink()
    (folder / MANIFEST_FILE).write_text(json.dumps(data | {"checksum": checksum(data)}))
    manifest = Bundle.open(folder).manifest
    assert (manifest.policy, manifest.forms) == (DEFAULT_POLICY, bundle.manifest.forms)


@pytest.mark.parametrize("options", [{"calibrate": False}, {"tokenizer": False}])
def test_what_is_not_calibrated_has_plain_pages(source: Path, options: dict[str, bool]) -> None:
    made = export(source, "-".join(options), **options)
    assert made.manifest.forms == ()
    assert made.manifest.policy == DEFAULT_POLICY


@pytest.mark.slow
def test_a_short_context_has_plain_pages(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source", max_position_embeddings=383)
    assert export(source).manifest.forms == ()
    source = tiny.make_llama_checkpoint(tmp_path / "longer", max_position_embeddings=384)
    assert len(export(source, "other").manifest.forms) == LAYERS * KV_HEADS


# What sessions get


def test_sessions_decide_by_the_policy_and_norms_of_the_bundle(bundle: Bundle) -> None:
    with Engine.open(bundle.path, threads=1) as engine:
        for requested, policy in ((None, "h2o:recent=0.25"), ("budget", "budget")):
            config = engine.backend.session_config(SessionRequest(policy=requested))
            assert config.policy == policy
            (cache,) = engine.backend.open_cache(config).parts
            assert cache.policy == policy_named(policy)
            assert isinstance(cache.storage, NativeCache)
            np.testing.assert_array_equal(cache.storage._feedback, bundle.key_feedback[0])
            norms = cache.evidence().weight_norms
            assert norms is not None
            np.testing.assert_array_equal(norms(), bundle.weight_norms(range(LAYERS)))
            cache.close()
        with engine.session() as session:
            assert session.config.policy == "h2o:recent=0.25"


# The command


def test_the_flags_of_the_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(source), "--threads", "1", "--no-quality", "-o"]
    made = tmp_path / "made"
    assert main([*words, str(made), "--no-calibrate", "--kv-policy", "streaming", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["policy"] == "streaming"
    manifest = Bundle.open(made).manifest
    assert (manifest.policy, manifest.forms) == ("streaming", ())
    assert main([*words, str(made), "--force", "-v"]) == 0
    assert f"{DEFAULT_POLICY}\n" in capsys.readouterr().out
    assert Bundle.open(made).manifest.forms


def test_an_unknown_policy_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    assert main(["export", str(source), "-o", str(made), "--kv-policy", "newest"]) == 2
    assert "--kv-policy 'newest' is unknown; possible: a2sf, budget, " in capsys.readouterr().err
    assert not made.exists()
