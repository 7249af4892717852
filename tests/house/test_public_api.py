"""The facade: what `kvq` offers, and that importing it costs nothing."""

import importlib
import json
import subprocess
import sys

import pytest

import kvq


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
        assert error.__name__ in errors.__doc__
