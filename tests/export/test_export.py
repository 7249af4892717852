"""Exports: their memory, the quantiser, the bundle, and what is left when one is stopped."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import time
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native_library
from kvq.config import KvPlan
from kvq.errors import BundleError, ModelError, UsageError
from kvq.reference.linear import (
    WIDTHS,
    BlockFormat,
    Grid,
    dequantize,
)
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model, fit_cache
from kvq_export.fit import quality
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.read.hub import locate
from kvq_export.write import staging
from kvq_export.write.staging import staged
from kvq_export.write.weights import join_rows, quantize, quantize_chunks
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import read_checkpoint
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import FEEDBACK_FILE, MANIFEST_FILE, checksum
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from matrices import relative_error
from shelf import EIGHT, PLAIN, Shelf
from tiny import checkpoint_weights, make_llama_checkpoint

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


# Its memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's memory")
def test_large_arrays_of_threads_go_back_to_the_system() -> None:
    program = (
        "import sys, threading\n"
        "import numpy as np\n"
        "from kvq_export import export\n"
        "def used():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "def work():\n"
        "    for _ in range(3):\n"
        "        arrays = [np.ones(5 << 20, np.float32) for _ in range(3)]\n"
        "        kept.append(bytearray(1000))\n"
        "        del arrays\n"
        "kept = []\n"
        "if sys.argv[1:]: export._return_large_arrays()\n"
        "before = used()\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(used() - before)\n"
    )
    kept, returned = (
        int(subprocess.check_output([sys.executable, "-c", program, *arguments]))
        for arguments in ([], ["asked"])
    )
    # Three arrays of 20 MiB at a time.
    assert kept > 20 * 1024
    assert returned < 5 * 1024


# The quantiser


@pytest.mark.parametrize("columns", [96, 128, 80, 2048])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_scale_search_beats_min_max_rounding(bits: int, block: int, columns: int) -> None:
    rows = np.random.default_rng(0).standard_normal((40, columns), np.float32)
    actual = dequantize(quantize(rows, BlockFormat(bits=bits, block=block)), bits)[:, :columns]
    padded = np.pad(rows, ((0, 0), (0, -columns % block))).reshape(-1, block)
    step = np.abs(padded).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
    plain = (np.rint(padded / step) * step).reshape(40, -1)[:, :columns]
    limit = {4: 0.75, 8: 0.95}[bits]
    assert relative_error(actual, rows) < limit * relative_error(plain, rows)


@pytest.mark.parametrize("bits", [4, 8])
def test_representable_weights_come_back_exactly(bits: int) -> None:
    random = np.random.default_rng(1)
    half = 2 ** (bits - 1)
    levels = random.integers(-half, half, (20, 64)).astype(np.float32)
    levels[:, ::32] = -half
    rows = levels * np.float32(2.0**-6) * np.where(np.arange(20) % 2, 1, -1)[:, None]
    blocks = quantize(rows.astype(np.float32), BlockFormat(bits=bits, block=32))
    np.testing.assert_array_equal(dequantize(blocks, bits), rows)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_zero_point_is_worth_its_byte(bits: int) -> None:
    """Loses a fifth of the error of blocks off centre, and nothing of exact ones and of zero."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((40, 640), np.float32) + np.float32(0.5)
    forms = [BlockFormat(bits=bits, grid=grid) for grid in (Grid.SYMMETRIC, Grid.ZERO_POINT)]
    plain, better = (relative_error(dequantize(quantize(rows, form), bits), rows) for form in forms)
    assert better < 0.8 * plain
    codes = random.integers(0, 1 << bits, (20, 64))
    codes[:, 0], codes[:, 1] = 0, (1 << bits) - 1
    # What a block holds exactly is found again, for any zero point among the codes.
    zeros = random.integers(0, 1 << bits, (20, 1))
    rows = ((codes - zeros) * 2.0**-6).astype(np.float32)
    np.testing.assert_allclose(dequantize(quantize(rows, forms[1]), bits), rows, atol=1e-6)
    rows[0], rows[1] = 0, 1e-30
    assert not dequantize(quantize(rows, forms[1]), bits)[:2].any()


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_super_blocks_are_worth_more_than_smaller_blocks(bits: int) -> None:
    """They take an eighth of a bit more than blocks of 64 and a quarter less than those of 32."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((40, 768), np.float32)
    rows *= np.exp(0.3 * random.standard_normal((40, 24))).repeat(32, axis=1).astype(np.float32)
    forms = [
        WeightFormat().at(bits, 768),
        *(WeightFormat(block=block).at(bits, 768) for block in (64, 32)),
    ]
    assert [form.bits_per_weight - bits for form in forms] == [0.5, 0.375, 0.75]
    supers, wide, narrow = (
        relative_error(dequantize(quantize(rows, form), bits), rows) for form in forms
    )
    assert supers < 0.75 * wide
    assert supers < 1.03 * narrow


def test_what_super_blocks_hold_comes_back() -> None:
    """A sub-block of zeros stays zeros, and so does a whole super-block; numbers are whole."""
    random = np.random.default_rng(3)
    codes = random.integers(0, 16, (20, 512)).reshape(20, 16, 32)
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    scales, minima = random.integers(20, 64, (2, 20, 16, 1))
    scales[:, ::8], minima[:, ::8] = 63, 63
    rows = ((codes * scales - 4 * minima) * 2.0**-12).astype(np.float32).reshape(20, 512)
    rows[3, 32:64] = 0
    rows[4, 256:] = 0
    form = WeightFormat().at(4, 512)
    blocks = quantize(rows, form)
    assert blocks.sub_scales is not None
    assert blocks.sub_scales.dtype == np.uint8
    assert blocks.sub_scales.max() == 63
    actual = dequantize(blocks, 4)
    np.testing.assert_allclose(actual, rows, atol=1e-6)
    assert not actual[3, 32:64].any()
    assert not actual[4, 256:].any()


@pytest.mark.parametrize(
    ("columns", "bits", "expected"),
    [
        (512, 3, "3/32/super_minimum"),
        (512, 4, "4/32/super_minimum"),
        (512, 6, "6/32/super_minimum"),
        (512, 8, "8/64/symmetric"),
        (576, 5, "5/64/zero_point"),
    ],
)
def test_the_format_depends_on_the_columns(columns: int, bits: int, expected: str) -> None:
    assert str(WeightFormat(bits=bits).format_of("layers.0.qkv", columns)) == expected
    if bits == 3:
        return
    narrow = WeightFormat(bits=bits, block=32).format_of("layers.0.qkv", columns)
    assert str(narrow) == f"{bits}/32/{'symmetric' if bits == 8 else 'zero_point'}"


def test_zero_and_tiny_blocks_are_stored_as_zeros() -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[1, 40] = 1e-40
    assert not dequantize(quantize(rows, BlockFormat(block=32)), 4).any()


def test_chunks_on_threads_equal_one_call() -> None:
    rows = np.random.default_rng(2).standard_normal((50, 96), np.float32)
    form = BlockFormat(block=32, grid=Grid.ZERO_POINT)
    chunks = ((part, None) for part in np.array_split(rows, 7))
    parts = list(quantize_chunks(chunks, form, threads=2))
    for actual, whole in zip(join_rows(parts), quantize(rows, form), strict=True):
        np.testing.assert_array_equal(actual, whole)


@pytest.mark.parametrize(
    "wrong", [{"bits": 2}, {"bits": -4}, {"block": 48}, {"embedding_bits": 16}]
)
def test_impossible_weight_formats_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong.values()))} is not possible"):
        WeightFormat(**wrong)


# The bundle an export writes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_come_back_near_the_checkpoint(tmp_path: Path, dtype: str) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype=dtype, attention_bias=True)
    bundle = export_model(source, tmp_path / "bundle", PLAIN)
    expected = checkpoint_weights(source)
    for name, limit in (
        ("embed", 1e-4),
        ("head", 1e-4),
        ("layers.0.qkv", 0.01),
        ("layers.1.gate_up", 0.01),
        ("layers.1.down", 0.01),
    ):
        assert relative_error(bundle.read_weight(name), expected(name)) < limit
    for name in ("final_norm", "layers.1.mlp_norm", "layers.0.qkv_bias"):
        np.testing.assert_array_equal(bundle.read_weight(name), expected(name))
    rows = bundle.read_weight("embed", np.array([5, 2]))
    np.testing.assert_array_equal(rows, bundle.read_weight("embed")[[5, 2]])


def test_sharded_and_single_checkpoints_give_the_same_bytes(tmp_path: Path) -> None:
    single = make_llama_checkpoint(tmp_path / "single", dtype="bfloat16")
    sharded = make_llama_checkpoint(tmp_path / "sharded", dtype="bfloat16", shards=3)
    first = export_model(single, tmp_path / "a", PLAIN)
    second = export_model(sharded, tmp_path / "b", PLAIN)
    assert first.manifest.files == second.manifest.files


def test_manifest_tokenizer_and_licence(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (source / "README.md").write_text("---\nlanguage: en\nlicense:\n- apache-2.0\n---\n# A model\n")
    options = ExportOptions(kv=KvPlan(k_bits=8, v_bits=4), name="small", quality=False)
    calls: list[tuple[float, float]] = []
    bundle = export_model(
        source, tmp_path / "bundle", options, lambda done, total, _: calls.append((done, total))
    )
    manifest = bundle.manifest
    assert (manifest.name, manifest.kv) == ("small", KvPlan(k_bits=8, v_bits=4))
    assert manifest.source["license"] == "apache-2.0"
    assert manifest.source["model"] == "source"
    assert 0 in manifest.eos_token_ids
    assert manifest.tokens["fim"]["prefix"] == 3
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("def add(first)")) == "def add(first)"
    assert tokenizer.chat([{"role": "user", "content": "hi"}])[0] == 1
    # One job: it begins at nothing, never goes back, and is whole at its end alone.
    assert calls == sorted(calls)
    assert (calls[0], calls[-1], calls.count((1.0, 1.0))) == ((0.0, 1.0), (1.0, 1.0), 1)


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1,
             "repetition_penalty": 1.1, "typical_p": 0.3},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repeat_penalty": 1.1},
        ),
        ({"temperature": 0.7, "top_k": -1}, {"temperature": 0.7, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, {"temperature": 0}),
        ({"eos_token_id": 0, "temperature": None}, {}),
        # What cannot be is left out with a warning: the file is often a stranger's.
        (
            {"temperature": "hot", "top_p": 0, "top_k": 10**30, "min_p": 10**400,
             "repetition_penalty": 1.2},
            {"repeat_penalty": 1.2},
        ),
    ],
)  # fmt: skip
def test_the_manifest_keeps_how_the_model_asks_to_be_sampled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: dict[str, Any], sampling: dict[str, Any]
) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps(said))
    bundle = export_model(source, tmp_path / "bundle", PLAIN)
    assert bundle.manifest.sampling == sampling
    assert caplog.text.count("is not possible and is left out") == 4 * (said.get("top_p") == 0)
    with Engine.open(bundle.path, threads=1) as engine:
        assert engine.model.sampling == Sampling(**sampling)
    # A bundle of before says nothing of it, one of later may say more.
    path = bundle.path / MANIFEST_FILE
    data = json.loads(path.read_text())
    for entry, expected in ((None, {}), ({"top_k": 3, "smoothing": 1}, {"top_k": 3})):
        other = {key: value for key, value in data.items() if key != "sampling"}
        other |= {} if entry is None else {"sampling": entry}
        path.write_text(json.dumps(other | {"checksum": checksum(other)}))
        assert Bundle.open(bundle.path).manifest.sampling == expected
    for entry in ({"top_k": "many"}, {"temperature": -1}, 3):
        other = data | {"sampling": entry}
        path.write_text(json.dumps(other | {"checksum": checksum(other)}))
        with pytest.raises(BundleError, match="damaged"):
            Bundle.open(bundle.path)


@pytest.mark.slow
def test_peak_memory_is_a_few_chunks_not_the_model(tmp_path: Path) -> None:
    source = make_llama_checkpoint(
        tmp_path / "source", dtype="bfloat16", shards=2, vocab_size=1 << 17, hidden_size=256
    )
    weights_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    tracemalloc.start()
    try:
        # Calibration holds a small model as float32; a large one it never does.
        export_model(source, tmp_path / "bundle", PLAIN)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weights_bytes > 128 << 20
    assert peak_bytes < 40 << 20


# What is left when an export does not finish


def stop(done: int, total: int, _label: str) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


def test_an_existing_bundle_is_replaced_with_force_only(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    export_model(source, tmp_path / "bundle", PLAIN)
    with pytest.raises(BundleError, match="already holds a bundle; replace it with force"):
        export_model(source, tmp_path / "bundle", PLAIN)
    # Before anything is measured.
    news_told: list[object] = []
    wide = ExportOptions(weights=WeightFormat(mean_bits=4.5))
    with pytest.raises(BundleError, match="already holds a bundle"):
        export_model(source, tmp_path / "bundle", wide, lambda *news: news_told.append(news))
    assert news_told == []
    forced = dataclasses.replace(EIGHT, force=True)
    with pytest.raises(KeyboardInterrupt):
        export_model(source, tmp_path / "bundle", forced, stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "source"]
    assert "4/64/zero_point" in Bundle.open(tmp_path / "bundle").manifest.weights.by_format
    assert [*export_model(source, tmp_path / "bundle", forced).manifest.weights.by_format] == [
        "8/64/symmetric"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "source"]


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    options = dataclasses.replace(PLAIN, force=True)
    with pytest.raises(BundleError, match="is not a bundle, so it is not replaced"):
        export_model(source, tmp_path / "thesis", options)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


def test_what_came_to_be_there_meanwhile_is_never_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"

    def write() -> None:
        with staged(thesis, force=True):
            thesis.mkdir()
            (thesis / "chapter.tex").write_text("years of work")

    with pytest.raises(BundleError, match="is not a bundle, so it is not replaced"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    assert (thesis / "chapter.tex").read_text() == "years of work"


def test_what_killed_exports_of_other_names_left_goes_after_a_day(tmp_path: Path) -> None:
    old = time.time() - 2 * 24 * 60 * 60
    leftovers = {".a.01234567.partial", ".b.01234567.old", ".c.notes.partial", "d.01234567.partial"}
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx.data").write_bytes(b"half")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / ".new.01234567.partial").mkdir()
    with staged(tmp_path / "bundle", force=False) as running:
        os.utime(running, (old, old))
        with staged(tmp_path / "second", force=False):
            pass  # a running export is no leftover, however old
    kept = {*leftovers, ".new.01234567.partial", "bundle", "second"} - {".a.01234567.partial"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_link_to_a_bundle_stays_and_the_bundle_is_replaced(tmp_path: Path) -> None:
    bundle, link = tmp_path / "disk" / "bundle", tmp_path / "link"
    bundle.mkdir(parents=True)
    (bundle / MANIFEST_FILE).write_text("old")
    link.symlink_to(bundle)
    with staged(link, force=True) as partial:
        (partial / MANIFEST_FILE).write_text("new")
    assert link.readlink() == bundle
    assert (bundle / MANIFEST_FILE).read_text() == "new"
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


# The hub


def test_a_hub_id_is_found_in_the_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"org/small cannot be downloaded .*connect to the network"
    ):
        locate("org/small")
    # Who asked for no network is not told to connect to it.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="org/small is not on this machine, and offline"):
        locate("org/small")
    commit = "0123456789012345678901234567890123456789"
    model = tmp_path / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    make_llama_checkpoint(model / "snapshots" / commit)
    (model / "snapshots" / commit / "LICENSES").mkdir()
    located = locate("org/small")
    assert (located.name, located.revision) == ("org/small", commit)
    bundle = export_model("org/small", tmp_path / "bundle", PLAIN)
    assert bundle.manifest.source["model"] == "org/small"
    assert bundle.manifest.source["revision"] == commit
    assert bundle.manifest.source["license"] == "unknown"


def test_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no checkpoint at"):
        locate(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no folder checkpoints/my--model here"):
        locate("checkpoints/my--model")


# The quality report


def test_divergence_of_known_distributions() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    actual = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    result = quality.compare(expected, actual)
    assert result["mean_kld"] == pytest.approx(0.25 * np.log(2) / 2, rel=1e-5)
    assert result["kld_99_9"] == pytest.approx(0.25 * np.log(2) * 0.999, rel=1e-5)
    assert result["top1_agreement"] == 0.5


def test_report_compares_weights_alone_and_everything(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    family, config, _ = read_checkpoint(source)
    original = quality.Original(
        config=config, sources=family.weights(config), checkpoint=Checkpoint.open(source)
    )
    ids = np.arange(40) % config.vocab_size
    exact = forward(config, checkpoint_weights(source), ids, np.arange(40), PlainAttention())
    streamed = original.logits(ids)
    np.testing.assert_allclose(streamed, exact, atol=1e-4)

    def run(plan: KvPlan, prompt: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(0).standard_normal(exact.shape).astype(np.float32)
        return exact[: len(prompt)] + (noise if plan.quantized else 0)

    steps: list[tuple[float, float]] = []
    texts = np.stack([ids, ids])
    report = quality.measure(
        original.logits, KvPlan(), run, texts, lambda done, of, _: steps.append((done, of))
    )
    assert steps == [(0, 2), (1, 2)]
    assert report["weights"]["kv"] == "fp"
    assert abs(report["weights"]["mean_kld"]) < 1e-5
    assert report["weights"]["top1_agreement"] == 1.0
    assert report["weights_and_kv"]["kv"] == "4:4"
    assert 0.1 < report["weights_and_kv"]["mean_kld"] < report["weights_and_kv"]["kld_99_9"]


def test_an_export_reports_its_own_quality(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    options = ExportOptions(weights=WeightFormat(bits=8))
    report = export_model(source, tmp_path / "bundle", options).manifest.quality
    assert report == json.loads((tmp_path / "bundle" / "kvq.json").read_text())["quality"]
    assert report is not None
    assert report["tokens"] == 6 * quality.MAX_TOKENS > 2000
    assert report["weights_and_kv"]["kv"] == "4:4"
    assert 0 <= report["weights"]["mean_kld"] < 0.05
    assert report["weights"]["mean_kld"] < report["weights_and_kv"]["mean_kld"] < 2
    assert report["weights"]["top1_agreement"] > 0.9


@pytest.mark.parametrize("force", [True, False])
def test_an_export_that_another_overtakes_replaces_it_or_says_so(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, move = tmp_path / "bundle", staging._move
    overtaken: list[Path] = []

    def overtaking(folder: Path, *places: Path) -> None:
        if not overtaken:
            overtaken.append(folder)
            destination.mkdir()
            (destination / "kvq.json").write_text("theirs")
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        move(folder, *places)

    monkeypatch.setattr(staging, "_move", overtaking)
    refusal = nullcontext() if force else pytest.raises(BundleError, match="already holds")
    with refusal, staged(destination, force=force) as folder:
        (folder / "kvq.json").write_text("ours")
    assert (destination / "kvq.json").read_text() == ("ours" if force else "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_cache_is_fitted_later_as_an_export_fits_it(shelf: Shelf, tmp_path: Path) -> None:
    source = shelf.checkpoint(max_position_embeddings=1024)
    at_once, later = (
        export_model(
            source, tmp_path / name, ExportOptions(name="tiny", quality=False, fit_cache=fits)
        )
        for name, fits in (("at_once", True), ("later", False))
    )
    assert later.manifest.forms == ()
    fit_cache(later.path, threads=2)
    fitted = Bundle.open(later.path)
    assert fitted.manifest == Bundle.open(at_once.path).manifest
    content = (later.path / FEEDBACK_FILE).read_bytes()
    assert content == (at_once.path / FEEDBACK_FILE).read_bytes()
    before = (later.path / MANIFEST_FILE).stat().st_mtime_ns
    fit_cache(later.path, threads=2)
    assert (later.path / MANIFEST_FILE).stat().st_mtime_ns == before
