"""The documentation site builds, and what its pages show is true of this checkout."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kvq
from environment import folders_in
from kvq.policies import POLICIES
from kvq.selectors import SELECTORS
from kvq_apps import cli
from kvq_apps.chat.commands import COMMANDS
from kvq_apps.chat.keys import KEYS
from kvq_apps.settings.configuration import FLAG_OF
from kvq_apps.settings.flags import FLAGS
from kvq_models.catalogue import catalogue
from kvq_models.registry import FAMILIES, WRAPPERS
from kvq_runtime.bundle.manifest import BUNDLE_FILES
from kvq_specdraft import DRAFTERS, WRITERS
from shown_commands import shown_commands

ROOT = Path(__file__).parents[2]
SITE = ROOT / "apps/docs"
PAGES = [*sorted((SITE / "docs").rglob("*.md")), ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PRODUCT = ("kvq/kvq", "models/kvq_models", "runtime", "specdraft", "export", "apps/kvq_apps")
MOST_WORDS = 90
# What each generated page has to show, as it stands in HTML.
SHOWN = {
    "commands": [f'id="kvq-{name}"' for name in cli.COMMANDS],
    "settings": [
        *(f"<td><code>--{name}</code>" for name in FLAGS),
        *(f"<code>{name.partition('.')[2]}</code>" for name in FLAG_OF),
    ],
    "chat": [
        *(f"<td><code>{row.name}</code></td>" for row in KEYS),
        *(f"<td><code>/{row.name}" for row in COMMANDS),
    ],
    "models": [f"<td><code>{name}</code></td>" for name in catalogue()],
    "http": ("/v1/responses", "/v1/messages", "/infill"),
    "python": [f'id="{name.lower()}"' for name in dir(kvq) if name[0] != "_"],
    "methods": [
        f"<td><code>{name}</code></td>" for name in (*POLICIES, *SELECTORS, *DRAFTERS, *WRITERS)
    ],
    "bundle": [f"<code>{name}</code>" for name in BUNDLE_FILES],
}


def page_parameters() -> list[object]:
    return [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in PAGES]


def commands_of(text: str) -> Iterator[str]:
    """Yields commands that stand in lines of their own, and those with words between backticks."""
    for _, line in shown_commands(text):
        yield line.rpartition(" | ")[2]
    for match in re.finditer(r"`(kvq\s+\w+\s[^`]+)`", text):
        yield re.sub(r"\s+", " ", match[1])


@pytest.mark.parametrize("page", page_parameters())
def test_every_command_of_a_page_is_one(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, folder in folders_in(tmp_path).items():
        monkeypatch.setenv(name, str(folder))
    for command in commands_of(page.read_text()):
        with suppress(SystemExit):  # --help
            cli.parse(shlex.split(command)[1:])


def test_pages_show_commands() -> None:
    commands = [command for page in PAGES for command in commands_of(page.read_text())]
    assert len(commands) > 50
    assert {command.split()[1] for command in commands} <= {*cli.COMMANDS}


@pytest.mark.parametrize("page", page_parameters())
def test_paragraphs_are_short_and_tables_have_heads(page: Path) -> None:
    for paragraph in re.split(r"\n\n|\n(?=- )", page.read_text()):
        if paragraph.startswith("|"):
            assert "\n|-" in paragraph, paragraph
        else:
            assert len(paragraph.split()) <= MOST_WORDS, paragraph


def test_messages_that_are_explained_are_said_by_the_code() -> None:
    files = (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))
    source = "".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    page = (SITE / "docs/howto/troubleshooting.md").read_text()
    messages = re.findall(r"^\| (?:status \d+, )?`([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 15
    assert [message for message in messages if message not in source] == []


def test_the_table_of_families_has_every_one() -> None:
    text = (SITE / "docs/reference/families.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \(`(\w+)`\))? \|", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(FAMILIES)
    assert {wrapper for _, wrapper in rows if wrapper} == {*WRAPPERS}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built where every warning, such as of a link that leads nowhere, is an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=SITE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_reference_names_all_there_is(site: Path) -> None:
    for page, rows in SHOWN.items():
        text = (site / f"reference/{page}.html").read_text()
        assert [row for row in rows if row not in text] == [], page


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > len(PAGES)
    loaded = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//""")
    assert [page for page in pages if loaded.search(page.read_text())] == []
