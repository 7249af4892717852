"""What is published: wheels without the embedded models' weights, and those as a package."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from environment import environment_in
from kvq.errors import ModelError
from kvq_apps.cli import EXTRAS
from kvq_apps.names import model_path
from kvq_models import catalogue

ROOT = Path(__file__).parents[2]
LINUX = "manylinux_2_28_x86_64"
RUNTIME = {
    "kvq/libkvq_native.so": b"",
    "x.dist-info/WHEEL": f"Tag: py3-none-{LINUX}\n".encode(),
}


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """The script that builds and checks wheels."""
    spec = util.spec_from_file_location("build_wheels", ROOT / "kvq/build_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_installed_from_a_checkout_has_the_weights() -> None:
    """What a source archive leaves out is in no wheel either, whatever its packages say."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert "models/kvq_embedded" in build["wheel"]["packages"]
    assert not {*build["wheel"]["packages"]} & {*build["sdist"]["exclude"]}


def wheel(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def complaints(builder: ModuleType, folder: Path, files: dict[str, bytes], name: str) -> list[str]:
    return list(builder.complaints(wheel(folder, files), name))


def test_a_wheel_of_a_platform_holds_no_weights_and_is_small(
    builder: ModuleType, tmp_path: Path
) -> None:
    assert complaints(builder, tmp_path, RUNTIME, LINUX) == []
    weights = RUNTIME | {"kvq_embedded/nano/model.safetensors": b""}
    assert complaints(builder, tmp_path, weights, LINUX) == [
        "it holds weights, which kvq-models brings: kvq_embedded/nano/model.safetensors"
    ]
    large = RUNTIME | {"kvq/more": bytes(6_000_000)}
    (said,) = complaints(builder, tmp_path, large, LINUX)
    assert re.fullmatch(r"it has 6000\d+ bytes, of 6000000 at most", said)


def test_the_models_wheel_holds_their_files_and_no_others(
    builder: ModuleType, tmp_path: Path
) -> None:
    models = ROOT / "models"
    folders = [models / "kvq_embedded" / name for name in catalogue.EMBEDDED]
    there = [file for folder in folders for file in folder.iterdir()]
    files = {file.relative_to(models).as_posix(): b"" for file in there}
    assert complaints(builder, tmp_path, files, "kvq-models") == []
    files["kvq_models/llama.py"] = b""
    del files["kvq_embedded/nano/tokenizer.json"]
    assert complaints(builder, tmp_path, files, "kvq-models") == [
        "it holds what belongs to kvq-runtime: kvq_models/llama.py",
        "it lacks kvq_embedded/nano/tokenizer.json",
    ]


def test_the_extra_takes_the_models_of_this_checkout() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    theirs = tomllib.loads((ROOT / "models/pyproject.toml").read_text())["project"]
    (requirement,) = ours["optional-dependencies"]["models"]
    match = re.fullmatch(r"kvq-models>=0\.(\d+),<0\.(\d+)", requirement)
    assert match is not None
    assert theirs["name"] == "kvq-models"
    assert int(match[1]) == int(theirs["version"].split(".")[1]) == int(match[2]) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run -m {bundle} -n 2 --json hello", '"new_tokens": 2'),
        ("pull {checkpoint}", "takes"),
        ("export {checkpoint} -o made --no-quality --no-calibrate", "made"),
        ("complete -m {bundle} text.py:1 --json", '"drafts"'),
        ("inspect {bundle} -v", "kvq-bundle version"),
        (
            "export {checkpoint} -o made --format gguf",
            'error: writing a GGUF file needs the gguf package: pip install "kvq-runtime[export]"',
        ),
    ],
)
def test_without_extras_bundles_run_and_the_rest_names_its_extra(
    words: str, says: str, bundle: str, checkpoint: Path, tmp_path: Path
) -> None:
    """In an installation without them, which `None` among the modules stands for."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(sys.argv[1].split()); "
        "from kvq_apps.cli import main; sys.exit(main(sys.argv[2:]))"
    )
    (tmp_path / "text.py").write_text("import os\n")
    extras = " ".join(package for names in EXTRAS.values() for package in names)
    arguments = words.format(bundle=bundle, checkpoint=checkpoint).split()
    done = subprocess.run(
        [sys.executable, "-c", program, extras, *arguments],
        env=environment_in(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert says in done.stdout + done.stderr
    assert done.returncode == (2 if says.startswith("error") else 0), done.stderr


def test_the_embedded_models_are_beside_the_code() -> None:
    for name in catalogue.EMBEDDED:
        assert catalogue.embedded_folder(name) == ROOT / "models/kvq_embedded" / name
    assert catalogue.installed_names() == ("default", "nano")
    assert catalogue.embedded_folder("other") is None


def test_without_them_only_models_to_pull_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "PACKAGE", "kvq_embedded_not_here")
    assert catalogue.installed_names() == ()
    assert model_path.default_name() == model_path.FIRST
    assert model_path.FIRST in catalogue.catalogue()
    for resolve in (model_path.resolve_model, model_path.resolve_checkpoint):
        for name in catalogue.EMBEDDED:
            with pytest.raises(ModelError, match=f"'{name}' is not installed; `pip install kvq-m"):
                resolve(name)
    assert model_path.ready_model(None) is None
    with pytest.raises(ModelError, match="pull it with `kvq pull smollm2-135m`, or give --yes"):
        model_path.pull_missing(None)
