"""The VS Code extension: its manifest, its package, and a real VS Code in a browser.

What needs npm's packages runs where they are installed (`npm ci` in apps/editors/vscode); the
browser where KVQ_VSCODE names a folder for VS Code's server, half a gigabyte from npm.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvq_apps.lsp.lsp_settings import MOST_DRAFTS

FOLDER = Path(__file__).parents[3] / "apps/editors/vscode"
SOURCE = "".join(file.read_text() for file in sorted((FOLDER / "src").glob("*.ts")))
MANIFEST: dict[str, Any] = json.loads((FOLDER / "package.json").read_text())
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_packages = pytest.mark.skipif(
    shutil.which("npm") is None or not (FOLDER / "node_modules").is_dir(),
    reason="npm's packages of the extension are not installed",
)


def npm(script: str, **environment: str) -> None:
    command = ["npm", "run", "--silent", script]
    subprocess.run(command, cwd=FOLDER, env=os.environ | environment, check=True)


def test_the_manifest_names_what_the_source_has() -> None:
    contributes = MANIFEST["contributes"]
    commands = {command["command"].removeprefix("kvq.") for command in contributes["commands"]}
    table = SOURCE.partition("const commands")[2].partition("};")[0]
    assert set(re.findall(r"^    (\w+): ", table, re.MULTILINE)) == commands
    settings = {name.removeprefix("kvq.") for name in contributes["configuration"]["properties"]}
    assert set(re.findall(r"\.get<[^;]*?>\(\s*\"(\w+)\"", SOURCE)) == settings
    drafts = contributes["configuration"]["properties"]["kvq.drafts"]
    assert (drafts["minimum"], drafts["maximum"]) == (1, MOST_DRAFTS)
    # What a folder's own settings could name would be run by opening that folder.
    for name in ("path", "model", "arguments"):
        assert contributes["configuration"]["properties"][f"kvq.{name}"]["scope"] == "machine"


def test_the_lock_file_names_no_host() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []
    assert all("integrity" in package for name, package in lock["packages"].items() if name)


@pytest.mark.slow
@needs_packages
def test_it_is_typed_and_packed_and_small() -> None:
    npm("package")
    with zipfile.ZipFile(FOLDER / "dist/kvq.vsix") as package:
        inside = {info.filename: info.file_size for info in package.infolist()}
    assert "extension/dist/extension.js" in inside
    assert not [name for name in inside if "node_modules" in name or "src/" in name]
    assert sum(inside.values()) < 1_000_000


@pytest.mark.slow
@needs_packages
@pytest.mark.skipif(
    CHROMIUM is None or "KVQ_VSCODE" not in os.environ,
    reason="there is no chromium, or KVQ_VSCODE names no folder for VS Code's server",
)
def test_it_works_in_a_real_editor() -> None:
    assert CHROMIUM is not None
    paths = os.pathsep.join(filter(None, sys.path))
    npm("test", KVQ_PYTHON=sys.executable, KVQ_CHROMIUM=CHROMIUM, PYTHONPATH=paths)
