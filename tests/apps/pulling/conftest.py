"""A user without any model, and a catalogue of the test's own."""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environment import folders_in
from kvq_export import export
from kvq_export.config import ExportOptions
from kvq_models import catalogue


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, where all that is kept lies; no hub and no flags."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name, value in folders_in(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("KVQ_YES", "KVQ_MODEL", "KVQ_OFFLINE", "HF_HUB_OFFLINE", "OLLAMA_MODELS"):
        # Set first, so that what a command sets is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("kvq_apps.terminal.text_input.piped_input", lambda: "")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pulled is exported without a text: nothing here asks how well it answers."""
    whole = export.export_model

    def quickly(source: Any, path: Path, options: ExportOptions, *more: Any) -> Any:
        return whole(source, path, replace(options, calibrate=False), *more)

    monkeypatch.setattr(export, "export_model", quickly)


@pytest.fixture
def models(home: Path) -> Path:
    """Where pulled models lie."""
    return home / "data" / "kvq" / "models"


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., None]]:
    """Makes the catalogue one model, `tiny`, with these sources in TOML."""

    def offer(*sources: str, name: str = "tiny") -> None:
        file = tmp_path / "catalogue.toml"
        file.write_text(
            f'[[model]]\nname = "{name}"\nparameters = "1 M"\nlicense = "MIT"\n'
            f'memory = "1 GiB"\ngood_for = "tests"\nsources = [{", ".join(sources)}]\n'
        )
        monkeypatch.setattr(catalogue, "FILE", file)
        catalogue.catalogue.cache_clear()

    yield offer
    catalogue.catalogue.cache_clear()
