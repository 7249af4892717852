"""Bad input on the command line: one line that says what is possible, exit code 2, no traceback."""

import json
import re
import shutil
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from environment import folders_in
from kvq_apps.cli import main, parse
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_runtime.bundle.manifest import VERSION, checksum
from shelf import PLAIN, Shelf

Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Refused:
    """Runs a command that must refuse, and returns its one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str, stdin: bytes = b"") -> str:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(stdin)))
        assert main(list(words)) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        errors = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "Traceback" not in shown.err
        assert main([*words, "--json"]) == 2
        message = json.loads(capsys.readouterr().out)["error"]["message"]
        if not stdin:
            assert f"error: {message}" == errors[0]
        return errors[0]

    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kbits", "3"], "--kbits 3 is not possible: choose 8, 6, 4 or 2"),
        (["--vbits", "16"], "--vbits 16 is not possible: choose 8, 6, 4 or 2"),
        (["--kbits", "four"], "'four' is not a whole number"),
        (["--kv", "4:3"], "--kv 4:3 is not possible: choose "),
        (["--kv", "low"], "--kv 'low' is not possible: write K:V widths such as 4:2, or fp"),
        (["--kv-budget", "lots"], "--kv-budget 'lots' is not possible: give bytes (64MiB"),
        (["--kv-budget", "0"], "--kv-budget '0' is not possible"),
        (["--kv-budget=-1MiB"], "--kv-budget '-1MiB' is not possible"),
        (["--kv-policy", "best"], "--kv-policy 'best' is unknown; possible: "),
        (["--draft", "guess"], "--draft 'guess' is unknown; possible: auto, lookup, model"),
        (["--draft", "suffix:most=0"], "--draft suffix: most=0 is not possible: 1 or more"),
        (["--ctx-size", "1"], "--ctx-size 1 is not possible: give 2 or more"),
        (["--threads", "0"], "--threads 0 is not possible: give 1 or more"),
        (["--predict", "0"], "--predict 0 is not possible: give 1 or more, or -1 (until the"),
        (["--temp", "-1"], "--temp -1.0 is not possible: give 0 (greedy) or more"),
        (["--temp", "nan"], "--temp nan is not possible"),
        (["--top-p", "2"], "--top-p 2.0 is not possible: give above 0 and up to 1 (off)"),
        (["--min-p", "1"], "--min-p 1.0 is not possible"),
        (["--top-k", "-1"], "--top-k -1 is not possible"),
        (["--repeat-penalty", "0"], "--repeat-penalty 0.0 is not possible"),
        (["--seed", "-1"], "--seed -1 is not possible: give 0 or more"),
        (["--stream", "--no-stream"], "--stream and --no-stream exclude each other; give one"),
        (["--regex", "a", "--grammar", "x"], "--grammar and --regex exclude each other; give one"),
        (["--json-schema", "none.json"], "none.json cannot be read: No such file or directory"),
        (["--regex", "("], "the constraint cannot be followed: "),
        (["--stop", ""], "an empty stop string would stop before the first character"),
        (["--backend", "cuda"], "invalid choice: 'cuda'"),
        (["--frobnicate"], "--frobnicate is not known to `kvq run`; see `kvq run --help`"),
        (["--kv-budgets=1"], "--kv-budgets=1 is not known to `kvq run`; did you mean --kv-budget?"),
    ],
)
def test_flags(flags: list[str], words: str, bundle: str, refused: Refused) -> None:
    assert words in refused("run", "-m", bundle, "hello", *flags)


def test_an_unknown_policy_is_refused_before_a_model_is_made(
    refused: Refused, tmp_path: Path
) -> None:
    line = refused("run", "-m", "default", "--kv-policy", "best", "hello")
    assert "--kv-policy 'best' is unknown; possible: a2sf, budget, " in line
    assert not (tmp_path / "cache" / "kvq" / "bundles").exists()


def test_words(bundle: str, refused: Refused) -> None:
    assert "the prompt is empty; write" in refused("run")
    assert "the prompt is empty" in refused("run", "-m", bundle, "")
    assert "the prompt is empty" in refused("run", "-m", bundle, "-")
    assert "at most two words; quote the prompt, or name the model" in refused("run", "a", "b", "c")
    words = (
        "folder.kvq is a word too many for `kvq export`, or belongs behind a flag such as --out; "
    )
    assert words in refused("export", "folder", "folder.kvq")
    assert "error: x is a word too many for `kvq doctor`; see" in refused("doctor", "x")
    assert "there is no command 'exprt'; did you mean export?" in refused("exprt")
    assert "there is no command 'qqq'; `kvq --help` lists all" in refused("qqq")


def test_without_an_embedded_model_one_is_pulled_or_installed(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvq_models.catalogue.PACKAGE", "kvq_embedded_not_here")
    for words in (("run", "hello"), ("chat",), ("serve",)):
        assert "smollm2-135m is not here yet; pull it with `kvq pull" in refused(*words)
    for name in ("default", "nano"):
        line = refused("run", "-m", name, "hello")
        assert f"the embedded model {name!r} is not installed; `pip install kvq-models`" in line
    assert "'nano' is not installed" in refused("export", "nano", "-o", "somewhere")
    assert refused("run", "-m", "defalt", "hello").count("default") == 0


def test_models(bundle: str, refused: Refused, tmp_path: Path) -> None:
    assert "there is no model at ./nowhere; give" in refused("run", "-m", "./nowhere", "hello")
    assert "no model at defualt; did you mean default?" in refused("run", "-m", "defualt", "hello")
    assert "at smollm2; did you mean smollm2-135m?" in refused("run", "-m", "smollm2", "hello")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    assert "is not a GGUF file, or is cut short" in refused(
        "run", str(tmp_path / "weights.gguf"), "hello"
    )
    assert "is a file, and no GGUF file; a model is a bundle" in refused(
        "run", f"{bundle}/kvq.json", "hello"
    )
    assert "is not a bundle: it has no kvq.json" in refused("run", str(tmp_path), "hello")
    assert "there is no model at /nowhere" in refused("inspect", "/nowhere")
    assert "some/model is no bundle here yet; make one: `kvq export some/model -o NAME`" in refused(
        "inspect", "some/model"
    )


def test_a_model_that_cannot_chat(
    refused: Refused, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that was typed goes into the error, which is made of more than a message."""
    source = tmp_path / "base"
    shutil.copytree(shelf.checkpoint(), source)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink(missing_ok=True)
    base = str(export_model(source, tmp_path / "base-kvq", PLAIN).path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    line = refused("chat", "-m", base, stdin=b"hi")
    assert f"error: {base} has no chat template, so it cannot chat; `kvq run -m {base}`" in line


def test_damaged_and_newer_bundles(bundle: str, refused: Refused, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    data = (folder / "model.onnx.data").read_bytes()
    (folder / "model.onnx.data").write_bytes(data[:-1])
    assert "model.onnx.data is truncated" in refused("run", str(folder), "hello")
    (folder / "model.onnx.data").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "model.onnx.data was altered" in refused("inspect", str(folder))
    assert "model.onnx.data was altered" in refused("serve", str(folder), "--port", "0")
    manifest = json.loads((folder / "kvq.json").read_text()) | {"version": VERSION + 1}
    (folder / "kvq.json").write_text(json.dumps(manifest | {"checksum": checksum(manifest)}))
    assert f"version {VERSION + 1}, newer than the {VERSION} this kvq reads" in refused(
        "inspect", str(folder)
    )


def test_a_budget_too_small_names_one_that_works(
    bundle: str, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused("run", bundle, "hello", "--kv-budget", "10KiB")
    assert "10.0 KiB of KV budget cannot hold the least that this model keeps, its first" in line
    smallest = int(line.split("(")[1].split(" bytes)")[0])
    words = ("run", bundle, "hello", "-n", "4", "--json", "--kv-budget")
    assert main([*words, str(smallest)]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_peak"] <= smallest
    assert main([*words, str(smallest - 1)]) == 2


def test_prompts_longer_than_the_context_or_the_budget(bundle: str, refused: Refused) -> None:
    long = "lazy dog " * 300
    line = refused("run", bundle, long)
    assert "tokens and the context holds 512; shorten the prompt or raise --ctx-size" in line
    line = refused("run", bundle, long, "--kv", "fp", "--kv-budget", "100tok")
    assert "the context holds 100; " in line
    assert "raise --ctx-size and --kv-budget" in line


def test_megabytes_of_prompt(bundle: str, refused: Refused) -> None:
    line = refused("run", bundle, "-", stdin=b"lazy dog, " * 1_000_000)
    assert "the prompt has more than 1024 tokens and the context holds 512; shorten" in line
    # Few tokens of many characters are counted to the end.
    line = refused("run", bundle, "-", stdin=b"lazy dog, " * 600)
    assert " tokens and the context holds 512; shorten" in line
    assert "more than" not in line


def test_text_that_is_not_utf8(bundle: str, refused: Refused, tmp_path: Path) -> None:
    line = refused("run", bundle, "-", stdin=b"caf\xe9")
    assert "standard input is not valid UTF-8 at byte 3 (0xe9); convert it to UTF-8" in line
    assert "the prompt is not valid UTF-8 at character 3" in refused("run", bundle, "caf\udce9")
    line = refused("run", bundle, "hi", "--system", "\udce9")
    assert "not valid UTF-8 at character 0" in line
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfgood" + b"\xff")
    line = refused("eval", "-m", bundle, "--task", "ppl", str(tmp_path / "text"))
    assert "text is not valid UTF-8 at byte 7 (0xff)" in line


def test_evaluations(bundle: str, refused: Refused, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("abc")
    file = str(text)

    def evaluate(*words: str) -> str:
        return refused("eval", "-m", bundle, *words)

    missing = evaluate(file)
    assert "--task is missing; choose ppl, kld, weights, passkey, retrieval or facts" in missing
    for words in (["--task", "weights"], ["--task", "ppl", "--checkpoint", "x"]):
        assert "give both, or neither" in evaluate(file, *words)
    assert "invalid choice: 'speed'" in evaluate(file, "--task", "speed")
    assert "--task kld needs a text" in evaluate("--task", "kld")
    assert "leave out the files" in evaluate("--task", "passkey", file)
    assert "text-absent: no such file" in evaluate("--task", "ppl", f"{file}-absent")
    assert "scoring needs at least 4" in evaluate("--task", "ppl", file)
    several = evaluate("--task", "ppl", file, "--context", "64,128")
    assert "only --task passkey, retrieval and facts take several" in several
    assert "--context 0 is not possible" in evaluate("--task", "ppl", file, "--context", "0")
    assert "--max-tokens 0 is not possible" in evaluate("--task", "ppl", file, "--max-tokens", "0")
    assert "give numbers from 0 to 1" in evaluate("--task", "passkey", "--depths", "0,2")
    assert "--trials 0 is not possible" in evaluate("--task", "passkey", "--trials", "0")
    assert "--seed -3 is not possible" in evaluate("--task", "passkey", "--seed", "-3")
    assert "prompt of 30 tokens is not possible" in evaluate("--task", "passkey", "--context", "30")
    assert "'x' is not a whole number" in evaluate("--task", "passkey", "--context", "64,x")


def test_exports(checkpoint: Path, bundle: str, refused: Refused, tmp_path: Path) -> None:
    def export(*words: str) -> str:
        line = refused("export", *words, "-o", str(tmp_path / "made"))
        assert list(tmp_path.glob("*made*")) == []
        return line

    source = str(checkpoint)
    assert "CHECKPOINT is missing" in export()
    assert "--wbits 7 is not possible: choose 3, 4, 5, 6 or 8" in export(source, "--wbits", "7")
    assert "--group 48 is not possible: choose 32, 64 or 128" in export(source, "--group", "48")
    assert "--embedding-bits 2 is not" in export(source, "--embedding-bits", "2")
    assert "--kbits -2 is not possible" in export(source, "--kbits", "-2")
    assert "invalid choice: 'ggml'" in export(source, "--format", "ggml")
    assert "--gguf-type is of the GGUF file; add --format gguf" in export(
        source, "--gguf-type", "q8_0"
    )
    assert "--wbits is of the ONNX graph" in export(source, "--format", "gguf", "--wbits", "4")
    assert "--embedding-bits changes nothing in a GGUF file of type q8_0" in export(
        source, "--format", "gguf", "--gguf-type", "q8_0", "--embedding-bits", "4"
    )
    assert "there is no checkpoint at /nowhere" in export("/nowhere")
    assert "already holds a bundle; replace it with --force" in refused(
        "export", source, "-o", bundle
    )


def test_a_bundle_without_a_tokenizer(checkpoint: Path, refused: Refused, tmp_path: Path) -> None:
    options = ExportOptions(quality=False, tokenizer=False)
    folder = export_model(checkpoint, tmp_path / "bundle", options).path
    assert "has no tokenizer, it takes token ids only" in refused("run", str(folder), "hello")


def test_errors_name_what_was_typed(
    bundle: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", "-m", bundle, "hello")
    assert "error: -ctk 3 is not possible" in refused(*run, "-ctk", "3")
    assert "error: --max-tokens 0 is not possible" in refused(*run, "--max-tokens", "0")
    assert "error: -n 0 is not possible" in refused(*run, "-n", "0")
    monkeypatch.setenv("KVQ_PREDICT", "0")
    assert "error: KVQ_PREDICT 0 is not possible" in refused(*run)
    assert "error: --predict -5 is not possible" in refused(*run, "--predict", "-5")


ODD_NAMES = (
    *("x" * 300, "x" * 5000, "x" * 300 + "/y", "owner/" + "y" * 300, "x" * 300 + ".gguf"),
    *("a\0b", "nano\0", "a\0b.gguf", "\udcff", "o/\udc80x", "~nobody-at-all", "~nobody-at-all/x"),
    *("tiny/", "a/b/", ".", "..", "...", "./", "//", "loop", "loop/x", "loop.gguf", "file.txt/x"),
    *("   ", "a\nb", "hf.co/a/b:Q4", "hf.co/" + "a" * 300 + "/b", "a:b:c", "\x1b[2J", "[red]"),
)
PYTHONS = re.compile(
    r"\[Errno|codec can't|Expecting |invalid literal|to unpack|Error\(|embedded null|internal error"
)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        ("pull", "--", "{}"),
        ("models", "rm", "--yes", "--", "{}"),
        ("export", "-o", "out", "--", "{}"),
        ("run", "--model={}", "hi"),
        ("run", "--model={}", "--backend", "llama.cpp", "hi"),
        ("run", "--model={}", "--backend", "float", "hi"),
        ("run", "-m", "nano", "--json-schema={}", "hi"),
        ("chat", "--model={}"),
        ("complete", "--", "{}", "a.py:1"),
        ("serve", "--model={}", "--port", "0"),
        ("eval", "--model={}", "--task", "ppl", "a.py"),
        ("bench", "--", "{}"),
        ("inspect", "--", "{}"),
        ("inspect", "--model={}", "--estimate"),
        ("ngrams", "--model={}", "."),
    ],
    ids=" ".join,
)
def test_an_odd_name_is_one_line(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, folder in folders_in(tmp_path / "home").items():
        monkeypatch.setenv(variable, folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "file.txt").write_text("x")
    for loop in ("loop", "loop.gguf"):
        (tmp_path / loop).symlink_to(loop)
    for name in ODD_NAMES:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"hi")))
        assert main([word.replace("{}", name) for word in words]) == 2, name
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("error: "), name
        assert not PYTHONS.search(error), error


# What llama.cpp and Ollama call otherwise


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run -ngl 99 hi", "--device cuda"),
        ("serve -ngl 99", "--device cuda"),
        ("serve --n-gpu-layers=99", "--device cuda"),
        ("run -fa hi", "leave it out"),
        ("chat -fa on", "leave it out"),
        ("run -hf a/b:Q4_K_M hi", "-m hf.co/OWNER/REPOSITORY:TYPE"),
        ("serve -hf a/b", "`kvq pull hf.co/OWNER/REPOSITORY:TYPE`"),
        ("run -p hi", 'a prompt needs no flag: `kvq run -m NAME "..."`'),
        ("bench -p 512", "--prefill N"),
        ("bench -c 512", "--context N"),
        ("run -f prompt.txt", "`kvq run -m NAME < FILE`"),
        ("serve --mlock", "leave it out"),
        ("run -b 512 hi", "--chunk-tokens N"),
        ("serve -ub 512", "--chunk-tokens N"),
        ("run -tb 4 hi", "--threads N"),
        ("run -cnv", "`kvq chat NAME`"),
        ("run -ctk f16 hi", "--kv fp"),
        ("run --cache-type-v q5_1 hi", "'q5_1' is not a whole number"),
        ("chat -c 4096", "--ctx 4096"),
        ("inspect --remove tiny", "`kvq models rm NAME`"),
        ("list", "`kvq models`"),
        ("ls", "`kvq models`"),
        ("ps", "`kvq serve --status`"),
        ("rm tiny", "`kvq models rm NAME`"),
        ("stop tiny", "`kvq serve --stop`"),
        ("show tiny", "`kvq inspect NAME`"),
        ("create tiny", "`kvq export CHECKPOINT -o NAME`"),
        ("cp tiny other", "`kvq export -o ANOTHER-NAME`"),
        ("help list", "`kvq models`"),
    ],
)
def test_what_others_call_otherwise_says_ours(words: str, message: str, refused: Refused) -> None:
    assert message in refused(*words.split())


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        *((f"{command} {flag} 4096", "ctx_size", 4096)
          for command in ("run", "serve") for flag in ("-c", "--ctx", "--ctx-size")),
        ("chat --ctx 4096", "ctx_size", 4096),
        ("chat -c", "continue", True),
        *((f"{command} -t 3", "threads", 3) for command in ("run", "chat", "serve")),
        ("bench -t 3", "threads", (3,)),
        ("run -ctk q4_0", "kbits", 4),
        ("serve --cache-type-v q8_0", "vbits", 8),
        ("bench -ctk 6", "kbits", 6),
        ("run --n-predict 5", "predict", 5),
        ("run -md tiny", "draft_model", "tiny"),
        ("serve -np 2", "sessions", 2),
        ("serve -a tiny", "alias", ["tiny"]),
        ("run -sys Brief.", "system", "Brief."),
    ],
)  # fmt: skip
def test_what_others_spell_otherwise_means_the_same(words: str, field: str, value: object) -> None:
    assert getattr(parse(words.split()), field) == value


def test_words_behind_two_dashes_are_no_flags_of_others() -> None:
    assert "-ngl" in str(parse(["run", "--", "-ngl"]))


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, start in (("help", "COMMAND"), ("help run", "usage: kvq run"), ("version", "kvq 0")):
        with pytest.raises(SystemExit, match="0"):
            main(words.split())
        assert start in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--offline run x", "--offline stands behind the command: kvq run --offline ..."),
        ("--nonsense run x", "--nonsense is not known to `kvq run`"),
    ],
)
def test_a_flag_before_its_command_is_told_where_it_stands(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
