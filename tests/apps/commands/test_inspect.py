"""`kvq inspect`: every kind of file, what is wrong with it, and the memory it will take."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelError
from kvq_apps.cli import main
from kvq_apps.names import model_path
from kvq_apps.terminal import output
from kvq_export.config import ExportOptions
from kvq_export.fit import calibrated
from kvq_export.write.random_bundle import random_bundle
from kvq_models.registry import family_for
from kvq_runtime.bundle.manifest import checksum
from kvq_runtime.engine import Engine
from kvq_runtime.machine import device
from kvq_runtime.session import snapshot
from shelf import Shelf
from tiny import CASES, COMMON, make_llama_checkpoint

Inspect = Callable[..., dict[str, Any]]
Refused = Callable[..., str]
Listed = Callable[[], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> Path:
    return shelf.bundle(ExportOptions(quality=False, calibrate=False))


@pytest.fixture(scope="module")
def saved(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "session.kvq"
    with Engine.open(bundle, threads=1) as engine, engine.session(context_tokens=256) as session:
        session.prefill(range(1, 151))
        session.save(path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_state: None) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvq"


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def run(*words: object) -> dict[str, Any]:
        assert main(["inspect", *map(str, words), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Listed:
    """What `kvq models` lists."""

    def run() -> list[dict[str, Any]]:
        assert main(["models", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["models"]

    return run


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object) -> str:
        assert main(["inspect", *map(str, words), "-v"]) == 0, capsys.readouterr().err
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    def run(*words: object) -> str:
        assert main(["inspect", *map(str, words)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("error: ")
        return line

    return run


# What a model takes


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--ctx-size", "300"], {"context_tokens": 300}),
        (["--ctx-size", "512", "--kv", "8:4"], {"context_tokens": 512, "k_bits": 8, "v_bits": 4}),
        (["--kv", "2:2"], {"context_tokens": 512, "k_bits": 2, "v_bits": 2}),
        (["--kv", "fp", "--ctx-size", "200"], {"context_tokens": 200, "k_bits": 16, "v_bits": 16}),
    ],
)
def test_the_estimate_is_what_a_session_then_uses(
    words: list[str], options: dict[str, int], bundle: Path, inspect: Inspect
) -> None:
    estimate = inspect(bundle, "--estimate", "--threads", "1", *words)["estimate"]
    tokens = options["context_tokens"]
    assert estimate["context"] == tokens
    with (
        Engine.open(bundle, threads=1) as engine,
        engine.session(kv_budget=estimate["kv_bytes"], **options) as session,
    ):
        session.prefill([1 + index % 200 for index in range(tokens)])
        used = session.stats()
        plan = session.config.plan
    assert used.kv_budget == estimate["kv_bytes"]
    assert 0.9 * estimate["kv_bytes"] < used.kv_bytes_peak <= estimate["kv_bytes"]
    # It held the whole context, and no page lost bits for it.
    assert used.held.evicted_share == 0
    assert used.held.mean_k_bits >= plan.k_bits
    assert used.held.mean_v_bits >= plan.v_bits
    assert estimate["weight_bytes"] <= (bundle / "model.onnx.data").stat().st_size
    assert estimate["total_bytes"] == estimate["weight_bytes"] + estimate["kv_bytes"]


def test_a_thousand_tokens_more_take_what_the_estimate_says(bundle: Path, inspect: Inspect) -> None:
    def estimate(*words: object) -> dict[str, Any]:
        return inspect(bundle, "--estimate", "--threads", "1", *words)["estimate"]

    for kv in ("fp", "8:8", "4:2"):
        short, long = (estimate("--kv", kv, "--ctx-size", size) for size in (2048, 4096))
        more = (long["kv_bytes"] - short["kv_bytes"]) / 2
        # The page table costs a little beside the pages.
        assert 1 <= more / short["kv_bytes_per_1024_tokens"] < 1.25
        at = short["kv_bytes_per_1024_tokens_at"]
        assert at[kv] == short["kv_bytes_per_1024_tokens"]
    assert at["fp"] == 2 * 2 * 64 * 2 * 2 * 1024
    assert list(at.values()) == sorted(at.values(), reverse=True)


def test_a_context_beyond_the_models_own_is_warned_of(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(bundle), "--estimate", "--ctx-size", "512"]) == 0
    assert "more than the 512" not in capsys.readouterr().err
    assert main(["inspect", str(bundle), "--estimate", "--ctx-size", "600"]) == 0
    warning = capsys.readouterr().err
    assert "a context of 600 tokens is more than the 512 this model was made for" in warning


def test_a_budget_is_taken_as_it_is(bundle: Path, inspect: Inspect, refused: Refused) -> None:
    estimate = inspect(bundle, "--estimate", "--kv-budget", "1MiB")["estimate"]
    assert estimate["kv_bytes"] == 1 << 20
    assert "--kv-budget 'lots' is not possible" in refused(
        bundle, "--estimate", "--kv-budget", "lots"
    )
    assert "--kbits 3 is not possible" in refused(bundle, "--estimate", "--kbits", "3")


def test_what_does_not_fit_says_what_takes_less(
    bundle: Path,
    inspect: Inspect,
    table: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = inspect(bundle, "--estimate")["estimate"]["total_bytes"]
    probed = device.probe()
    for free, fits, words in (
        (total, True, "fits yes, "),
        (total - 1, False, "are free; a smaller --ctx-size or --kv-budget, or fewer bits (--kv)"),
        (0, None, "fits unknown: this system does not say how much memory is free"),
    ):
        smaller = replace(probed, memory_free_bytes=free)
        monkeypatch.setattr(device, "probe", lambda smaller=smaller: smaller)
        assert inspect(bundle, "--estimate")["estimate"]["fits"] is fits
        assert words in table(bundle, "--estimate")


# Kinds of files


def test_a_bundle_at_its_name_or_path(
    bundle: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    assert inspect("bundle") == inspect("-m", "bundle")
    assert inspect(bundle)["path"] == str(bundle)


def test_layers_with_a_window_are_counted_for_their_window(
    inspect: Inspect, table: Callable[..., str], tmp_path: Path
) -> None:
    """In olmo3 the first layers see some tokens, the last one all: the context is paid for once."""
    model_type, keys = CASES["olmo3"]
    config_json = COMMON | dict(keys) | {"model_type": model_type}
    config = family_for(config_json).config(config_json)
    bundle = random_bundle(config, tmp_path / "olmo3").path
    report = inspect(bundle)
    windows = [layer["mixer"].get("window_tokens", 0) for layer in report["config"]["layers"]]
    context, seeing = report["context_length"], [window for window in windows if window]
    assert 0 < len(seeing) < len(windows)
    assert max(seeing) < context
    share = (sum(seeing) + context * windows.count(0)) / (context * len(windows))
    assert report["bytes_at_context"] == round(report["bytes_per_token"] * context * share)
    note = f"({len(seeing)} of {len(windows)} layers see the last {seeing[0]} tokens)"
    assert note in table(bundle)


def test_how_a_model_asks_to_be_sampled_is_shown(
    bundle: Path, table: Callable[..., str], inspect: Inspect, tmp_path: Path
) -> None:
    none = "kvq's own defaults; the model asks for none"
    assert f" sampling {none} end tokens" in table(bundle)
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    manifest = folder / "kvq.json"
    asks = {"temperature": 0.7, "top_k": 20}
    data = json.loads(manifest.read_text()) | {"sampling": asks}
    manifest.write_text(json.dumps(data | {"checksum": checksum(data)}))
    assert inspect(folder)["sampling"] == asks
    assert " sampling temperature 0.7, top_k 20 end tokens" in table(folder)


def test_a_checkpoint(checkpoint: Path, inspect: Inspect, table: Callable[..., str]) -> None:
    report = inspect(checkpoint)
    assert (report["format"], report["model_type"]) == ("checkpoint", "llama")
    assert report["bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert report["fp16_bytes_per_token"] == 2 * 2 * 64 * 2 * 2
    assert f"kvq export {checkpoint} -o NAME" in table(checkpoint)


def test_a_gguf_file(
    inspect: Inspect, table: Callable[..., str], refused: Refused, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tiny_gguf import CONTEXT, KV_HEADS, write_gguf

    file = write_gguf(tmp_path / "tiny.gguf")
    estimate = inspect(file, "--estimate", "--kv", "8:8")["estimate"]
    row_bytes = 2 * KV_HEADS * 64 // 32 * 34 * 2
    assert estimate["kv_bytes_per_1024_tokens"] == row_bytes * 1024
    assert estimate["kv_bytes"] == row_bytes * CONTEXT
    assert "2:2" not in estimate["kv_bytes_per_1024_tokens_at"]
    assert "keys of 2 bits (--kv or --kbits) are not possible on the llama.cpp" in refused(
        file, "--estimate", "--kv", "2:2"
    )
    assert "fits yes, " in table(file, "--estimate")


def test_a_gguf_file_says_what_its_first_reading_takes(
    cache: Path, table: Callable[..., str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tiny_gguf import write_gguf

    file = write_gguf(tmp_path / "tiny.gguf")
    assert main(["inspect", str(file)]) == 0
    assert "It is put into kvq's layout when it first runs" in capsys.readouterr().out
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"takes [\d.]+ .iB of disk .* has 1000 bytes free; make"):
        model_path.resolve_model(str(file))
    assert not (cache / "bundles").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    path = model_path.resolve_model(str(file))
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("reading tiny.gguf for the first time: its weights are put into kvq's")
    assert re.search(r", which takes about 5 s and [\d.]+ .iB of disk; later starts", first)
    # What runs is what is told of.
    assert model_path.bundle_of_gguf(file) == path
    assert main(["inspect", str(file)]) == 0
    assert "tokens of its context at 4 bits." in capsys.readouterr().out


def test_a_saved_session(
    saved: Path, inspect: Inspect, table: Callable[..., str], refused: Refused
) -> None:
    report = inspect(saved)
    assert (report["format"], report["tokens"]) == ("kvq-session", 150)
    assert report["plan"].items() >= {"k_bits": 4, "v_bits": 4, "sink_tokens": 4}.items()
    shown = table(saved)
    assert "tokens 150, of a context of 256" in shown
    assert "KV plan 4:4" in shown
    assert "--estimate is of a model" in refused(saved, "--estimate")


def _with_header(content: bytes, **changes: object) -> bytes:
    """A saved session with another header, its digest made right again."""
    prefix = snapshot.PREFIX
    length = prefix.unpack_from(content)[1]
    header = json.loads(content[prefix.size : prefix.size + length]) | changes
    encoded = json.dumps(header).encode()
    rest = content[prefix.size + length : -32]
    body = prefix.pack(snapshot.MAGIC, len(encoded)) + encoded + rest
    return body + hashlib.sha256(body).digest()


def test_damaged_and_newer_sessions(saved: Path, refused: Refused, tmp_path: Path) -> None:
    content = saved.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path = tmp_path / "session.kvq"
    for damaged, words in {
        content[:-1]: "is truncated or was altered after it was saved; save the session again",
        content[:20]: "is truncated or was altered after it was saved; save the session again",
        flipped: "is truncated or was altered after it was saved; save the session again",
        _with_header(
            content, version=11
        ): "is a session of version 11, newer than the 10 this kvq reads",
        _with_header(content, identity={}): "lacks what it must say of its session",
        content[:4]: "is a file, and neither a GGUF file nor a saved session",
        b"": "is a file, and neither a GGUF file nor a saved session",
    }.items():
        path.write_bytes(damaged)
        line = refused(path)
        assert f"{path} {words}" in line
    assert "upgrade kvq-runtime, or read its text" in refused(
        _written(path, _with_header(content, version=11))
    )


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# The list


def test_without_a_path_it_is_the_model_that_runs(
    bundle: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_MODEL", str(bundle))
    assert inspect() == inspect(bundle)


def test_the_bundles_made_so_far_are_listed(bundle: Path, cache: Path, listed: Listed) -> None:
    made = Path(shutil.copytree(bundle, cache / "bundles" / "good-0123456789ab"))
    broken = Path(shutil.copytree(bundle, cache / "bundles" / "torn-0123456789ab"))
    (broken / "model.onnx").unlink()
    (cache / "bundles" / ".good-1.0a.partial").mkdir()
    good, torn = listed()
    assert (good["name"], good["path"]) == (str(made), str(made))
    assert torn["name"] == str(broken)
    assert "model.onnx is missing" in torn["error"]


def test_what_was_made_is_found_by_its_name_and_what_was_run_by_its_path(
    bundle: Path,
    checkpoint: Path,
    inspect: Inspect,
    listed: Listed,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvq_apps.terminal.text_input.piped_input", lambda: "")
    run = Path(shutil.copytree(bundle, tmp_path / "elsewhere" / "was-run"))
    made = tmp_path / "elsewhere" / "was-made"
    assert main(["run", "-m", str(run), "-n", "1", "a", "b"]) == 0
    quickly = ("--no-quality", "--no-calibrate")
    assert main(["export", str(checkpoint), "-o", str(made), *quickly]) == 0
    capsys.readouterr()
    assert [row["path"] for row in listed()] == [str(run), str(made)]
    assert set(model_path.known_names()) == {str(run), "was-made"}
    assert inspect("was-made")["path"] == str(made)
    assert main(["run", "-m", "was-run", "-n", "1", "hello"]) == 2
    assert "there is no model at was-run" in capsys.readouterr().err
    assert main(["run", "-m", "was-made", "-n", "1", "hello"]) == 0
    capsys.readouterr()
    # A folder of that name here takes nothing over, whether it is looked at or run.
    checkout = tmp_path / "checkout"
    shutil.copytree(bundle, checkout / "was-made")
    monkeypatch.chdir(checkout)
    assert inspect("was-made")["path"] == str(made)
    assert inspect("./was-made")["path"] == "was-made"
    assert main(["run", "-m", "was-made", "-n", "1", "hello"]) == 0
    note = f"was-made is the model at {made}; for the one here give ./was-made"
    assert note in capsys.readouterr().err
    assert main(["run", "-m", "./was-made", "-n", "1", "hello"]) == 0
    assert "is the model at" not in capsys.readouterr().err
    assert model_path.resolve_model("was-made") == made
    assert model_path.known_names()["was-made"] == made
    # Of two that were made under a name it is the first, here as elsewhere.
    assert main(["export", str(checkpoint), "-o", "was-made", "--force", *quickly]) == 0
    assert model_path.resolve_model("was-made") == made
    shutil.rmtree(checkout)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(made)
    capsys.readouterr()
    assert [row["path"] for row in listed()] == [str(run)]


def test_a_checkout_takes_no_name_over(
    bundle: Path,
    checkpoint: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Neither an embedded model's nor a hub id's, by a bundle or by a checkpoint."""

    def export(source: str, destination: Path, *_: object) -> Any:
        exported.append(source)
        shutil.copytree(bundle, destination)
        return Opened(destination)

    exported: list[str] = []
    monkeypatch.setattr("kvq_export.export.export_model", export)
    pulled = model_path.resolve_model("evil/model")
    checkout = tmp_path / "checkout"
    for name in ("default", "evil/model", "elsewhere"):
        shutil.copytree(bundle, checkout / name)
    for name in ("nano", "evil--other", "plain"):
        shutil.copytree(checkpoint, checkout / name)
    monkeypatch.chdir(checkout)
    assert model_path.resolve_model("evil/model") == pulled
    embedded = [model_path.resolve_model(name) for name in (None, "default", "nano")]
    assert [path.parent for path in embedded] == [cache / "bundles"] * 3
    assert exported[0] == "evil/model"
    assert [Path(source).parent.name for source in exported[1:]] == ["kvq_embedded"] * 2
    # Once used by their paths they are still not meant by their names, here or elsewhere.
    by_path = [
        model_path.model_files(f"./{name}", "auto").path.resolve()
        for name in ("default", "evil/model", "elsewhere", "nano", "evil--other", "plain")
    ]
    assert model_path.resolve_model("default") == embedded[0]
    assert model_path.resolve_model("nano") == embedded[2]
    assert model_path.resolve_checkpoint("nano") != "nano"
    monkeypatch.chdir(tmp_path)
    assert model_path.resolve_model("evil/model") == pulled
    for name in ("elsewhere", "plain"):
        with pytest.raises(ModelError, match=f"there is no model at {name}"):
            model_path.resolve_model(name)
    assert model_path.ready_model("evil/other") is None
    names = model_path.known_names()
    assert {name for name in names if not Path(name).is_absolute()} == {
        "default", "nano", "evil/model"
    }  # fmt: skip
    assert set(map(str, by_path)) < names.keys()


class Opened:
    """What an export gives back, as far as it is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path


def test_devices_and_pipes_are_no_models(bundle: Path, refused: Refused, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe.gguf", tmp_path / "model.gguf"
    os.mkfifo(pipe)
    link.symlink_to("/proc/self/mem")
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (folder / "model.onnx.data").unlink()
    (folder / "model.onnx.data").symlink_to("/proc/self/mem")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (
        pipe,
        link,
        folder,
        "/proc/self/mem",
        "/proc/self/maps",
        "/dev/zero",
        "/sys/power/state",
    ):
        said = "is a device, a pipe or another file that the system makes up while it is read"
        assert said in refused(path)
        with pytest.raises(ModelError, match=said):
            model_path.resolve_model(str(path))
    for path in (loop, "x" * 5000):
        with pytest.raises(ModelError, match="cannot be read"):
            model_path.resolve_model(str(path))
    # What a link of the system leads to is a file like another.
    with (bundle / "kvq.json").open() as file:
        inside = Path(f"/proc/self/fd/{file.fileno()}")
        model_path.check_regular(inside)


@pytest.mark.parametrize(
    ("agreement", "form", "advised"),
    [
        (0.91, "4/32/super_minimum", True),
        (0.93, "4/32/super_minimum", False),
        (0.91, "8/64/symmetric", False),
    ],
)
def test_a_verdict_advises_8_bits_where_fewer_keep_little(
    agreement: float, form: str, *, advised: bool
) -> None:
    quality = {
        "weights": {"top1_agreement": agreement},
        "kv": {"top1_agreement": 0.99},
        "weights_and_kv": {"kv": "4:4", "top1_agreement": 0.9},
    }
    report = {
        "quality": quality,
        "path": "small",
        "source": {"model": "org/small"},
        "weights": {"formats": {form: ["layers.0.down"], "8/64/symmetric": ["embed"]}},
    }
    rows = dict(output.verdict_rows(report))
    assert rows["verdict"] == (
        f"weights and 8-bit activations keep {agreement:.0%} of the checkpoint's first choices, a "
        "cache at 4:4 99% of theirs"
    )
    assert ("advice" in rows) is advised
    if advised:
        assert rows["advice"].endswith("kvq export org/small -o small --wbits 8 --force")


@pytest.mark.slow
def test_the_advice_can_be_followed_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names the path given to an export; a bundle knows only its folder's name."""
    monkeypatch.setattr(calibrated, "REPORT_TEXTS", 3)
    source, made = make_llama_checkpoint(tmp_path / "a source"), tmp_path / "made"
    words = ["export", str(source), "-o", str(made), "--wbits", "4", "--no-calibrate"]
    for command, named in ((words, str(source)), (["inspect", str(made), "-v"], "a source")):
        assert main(command) == 0
        advice = f"first choices: kvq export '{named}' -o {made} --wbits 8 --force\n"
        assert advice in capsys.readouterr().out
