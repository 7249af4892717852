"""Names say the thing: none is a pronoun or participle, no two modules or classes share one.

A docstring says what its class or function does: it begins with a verb.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "kvq/kvq",
    "models/kvq_models",
    "runtime/kvq_runtime",
    "specdraft/kvq_specdraft",
    "export/kvq_export",
    "apps/kvq_apps",
    "apps/lab/kvq_lab",
)
BANNED = {
    "one", "own", "found", "told", "asked", "held", "given", "taken", "wanted", "others", "what",
    "those",
}  # fmt: skip
# Of Lua: the names that `local`, `function` with its parameters, and `for` bind.
LUA_NAMES = re.compile(
    r"\blocal (?!function)([\w, ]+)|\bfunction ?([\w.: ]*\([\w, ]*\))|\bfor ([\w, ]+) (?:in|=)"
)
# `SessionStats.held` is public: what a session's cache holds.
ALLOWED = {("runtime/kvq_runtime/session/metrics.py", "held")}

# A verb in the third person, and words of that form that are none.
VERB = re.compile(r"[A-Z][a-z]*s")
NO_VERBS = {
    "Its", "This", "Those", "As", "Less", "Always", "Has", "Bytes", "Tokens", "Rows", "Logits",
    "Pages", "Bits", "Columns", "Seconds", "Medians", "Openers", "Cells", "Texts", "Prompts",
    "Policies", "Powers",
}  # fmt: skip

# Classes that share their name with another, and why.
SAME_NAME = {
    "Engine": "`kvq.Engine` is the runtime's engine, and opens what a user calls a model",
}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields each name that a module defines or binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.arg():
                yield node.lineno, node.arg
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.ImportFrom(module="hypothesis"):  # its `given` is not ours to name
                pass
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield node.lineno, alias.asname or alias.name
            case ast.MatchAs() | ast.MatchStar() | ast.ExceptHandler():
                yield node.lineno, node.name or ""
            case _:
                pass


def test_no_name_is_a_pronoun_or_a_participle() -> None:
    banned = [
        (file, line, name)
        for path in (*modules(), *sorted((ROOT / "tests").rglob("*.py")))
        for file in [path.relative_to(ROOT).as_posix()]
        for line, name in defined_names(ast.parse(path.read_text()))
        if name.strip("_").lower() in BANNED and (file, name) not in ALLOWED
    ]
    assert banned == []


def test_no_name_of_the_neovim_plugin_is_a_pronoun_or_a_participle() -> None:
    banned = [
        (path.name, name)
        for path in sorted((ROOT / "apps/editors/nvim").rglob("*.lua"))
        for names in LUA_NAMES.findall(path.read_text())
        for name in re.findall(r"\w+", "".join(names))
        if name.lower() in BANNED
    ]
    assert banned == []


def test_names_of_lua_are_read_wherever_they_are_bound() -> None:
    code = (
        "local own, b = 1\nlocal function held(told)\nfunction M.found(a, one)\nfor asked in x do"
    )
    names = {name for row in LUA_NAMES.findall(code) for name in re.findall(r"\w+", "".join(row))}
    assert {*BANNED} & names == {"own", "held", "told", "found", "one", "asked"}


def test_names_are_read_wherever_they_are_bound() -> None:
    code = (
        "import a as one\ndef own(held): pass\nclass Found: pass\nx.told = 1\n"
        "for asked in (taken := 1,): pass\nmatch x:\n case [*others]: pass\n"
    )
    names = {name.lower() for _, name in defined_names(ast.parse(code))}
    assert names == {"one", "own", "held", "found", "told", "asked", "taken", "others"}


def verbless_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the first word of each docstring that does not begin with a verb, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            word = (ast.get_docstring(node) or "Returns").split()[0].rstrip(".,:;")
            if not VERB.fullmatch(word) or word in NO_VERBS:
                yield node.lineno, word


def test_every_docstring_begins_with_a_verb() -> None:
    scripts = [ROOT / "kvq/build_wheels.py", *sorted((ROOT / "apps/lab").glob("*.py"))]
    verbless = [
        (path.relative_to(ROOT).as_posix(), line, word)
        for path in (*modules(), *scripts)
        for line, word in verbless_docstrings(ast.parse(path.read_text()))
    ]
    assert verbless == []


@pytest.mark.parametrize(
    ("docstring", "begins"),
    [
        ("Counts what it holds.", []),
        ("Evicts: the oldest page goes.", []),
        ("What a cache holds.", ["What"]),
        ("`count` pages.", ["`count`"]),
        ("Bytes of a page.", ["Bytes"]),
        ("Has the pages counted.", ["Has"]),
        ("See `Cache.begin`.", ["See"]),
    ],
)
def test_a_docstring_that_begins_with_no_verb_is_seen(docstring: str, begins: list[str]) -> None:
    code = f'class A:\n    """{docstring}"""\n    def f(): pass\n'
    assert [word for _, word in verbless_docstrings(ast.parse(code))] == begins


def test_no_two_modules_of_a_package_have_one_file_name() -> None:
    """A command's module may be called as the module that it runs."""
    places = defaultdict[tuple[str, str], list[str]](list)
    for path in modules():
        file = path.relative_to(ROOT)
        if path.stem != "__init__" and path.parent.name != "commands":
            places[file.parts[-len(file.parts) + 1], path.name].append(file.as_posix())
    assert [files for files in places.values() if len(files) > 1] == []


def test_no_two_classes_have_one_name() -> None:
    """Also no private ones: a traceback and a type checker show names without their modules."""
    places = defaultdict[str, list[str]](list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert shared.keys() == SAME_NAME.keys(), shared
