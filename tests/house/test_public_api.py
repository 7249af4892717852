"""The facade: what `kvq` offers, and that importing it costs nothing."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvq
from kvq.errors import ModelError
from shelf import Shelf


def test_public_names_are_sorted_and_importable() -> None:
    assert kvq.__all__ == sorted(set(kvq.__all__))
    assert {"AttentionParams", "Cache", "CacheShape", "KvPlan", "KvqError"} <= set(kvq.__all__)
    for name in kvq.__all__:
        assert getattr(kvq, name).__name__ == name
    assert set(dir(kvq)) == {*kvq.__all__, "__version__"}


def test_a_public_name_is_the_object_of_its_module() -> None:
    for name in kvq.__all__:
        value = getattr(kvq, name)
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_type_checkers_are_told_the_same_names() -> None:
    stub = Path(kvq.__file__).with_suffix(".pyi")
    imports = [
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    rows = [(node.names[0].name, node.names[0].asname, node.module) for node in imports]
    assert sorted(rows) == [
        (name, name, getattr(kvq, name).__module__) for name in sorted(kvq.__all__)
    ]


def test_every_package_says_that_it_is_typed() -> None:
    packages = [file.parent for file in Path(__file__).parents[2].glob("*/kvq*/__init__.py")]
    assert len(packages) == 7
    assert all((package / "py.typed").exists() for package in packages)


def test_an_engine_opens_a_checkpoint_a_bundle_and_refuses_other_names(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = []
    for path in (shelf.checkpoint(), str(shelf.bundle())):
        with kvq.Engine.open(path, threads=1, backend="onnx") as engine:
            shown.append(repr(engine))
            assert isinstance(engine, kvq.Engine)
            assert len(list(engine.complete("the", 3, stop_ids=(), stream=True))) == 3
    assert [text.split()[1] for text in shown] == ["'tiny':", "'bundle':"]
    assert [made.name.split("-")[0] for made in (tmp_path / "kvq/bundles").iterdir()] == ["tiny"]
    with pytest.raises(ModelError, match="there is no model at no-such-folder; give a bundle"):
        kvq.Engine.open("no-such-folder")
    # What an export tells a person at a command, it tells a program's log.
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_an_engine_of_no_name_is_the_embedded_model(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.used_before(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for names, expected in (((), "default"), (("default",), "default"), (("nano",), "nano")):
        with kvq.Engine.open(*names, threads=1) as engine:
            assert engine.model.name == expected


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'kvq' has no attribute 'Engin'"):
        kvq.Engin  # noqa: B018


def modules_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(finished.stdout))


def test_import_kvq_loads_nothing_heavy() -> None:
    loaded = modules_after("import kvq")
    heavy = {"numpy", "torch", "transformers", "onnxruntime", "onnx_ir", "onnx", "tokenizers"}
    assert loaded & heavy == set()
    assert {name for name in loaded if name.startswith("kvq")} == {"kvq"}


def test_the_cache_needs_numpy_alone() -> None:
    loaded = modules_after("from kvq import Cache, KvPlan")
    assert "numpy" in loaded
    assert loaded & {"torch", "transformers", "onnxruntime", "onnx_ir", "tokenizers"} == set()
    assert {name for name in loaded if name.startswith("kvq_")} == set()


def test_errors_are_one_family_with_one_exit_code() -> None:
    errors = importlib.import_module("kvq.errors")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) >= 10
    for error in classes:
        assert issubclass(error, kvq.KvqError)
        assert error.exit_code == 2
