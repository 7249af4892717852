"""Prompts for next edits: each form as its model was trained on it, and text that is only text."""

import pytest

from infill_tokens import USUAL, infill_tokenizer
from kvq.errors import ModelError, UsageError
from kvq_models.control import ControlTokens
from kvq_models.next_edits import (
    FORMS,
    EditForm,
    Rewriting,
    ShownEdit,
    answered_lines,
    edit_form,
    edit_prompt,
)
from kvq_models.tokenizer import Tokenizer

LINES = ["import a\n", "def f(title):\n", "    return name\n", "f(1)\n"]
EDIT = ShownEdit(path="a.py", first=1, old=["def f(name):\n"], new=["def f(title):\n"])
REWRITING = Rewriting(
    path="a.py", lines=LINES, original=["def f(name):\n", LINES[2]], first=1, stop=3,
    cursor=(1, 11), edits=[EDIT],
)  # fmt: skip
SEED = """<[fim-suffix]>f(1)
<[fim-prefix]><filename>edit_history
--- a/a.py
+++ b/a.py
@@ -2,1 +2,1 @@
-def f(name):
+def f(title):

<filename>a.py
import a
"""
PROMPTS = {
    "sweep": """<|file_sep|>a.py.diff
original:
def f(name):
updated:
def f(title):
<|file_sep|>original/a.py
def f(name):
    return name
<|file_sep|>current/a.py
def f(title):
    return name
<|file_sep|>updated/a.py
""",
    "zeta-2.1": f"""{SEED}<|marker_1|>
def f(title<|user_cursor|>):
    return name
<|marker_2|>
<[fim-middle]><|marker_1|>
""",
    "zeta-2": f"""{SEED}<<<<<<< CURRENT
def f(title<|user_cursor|>):
    return name
=======
<[fim-middle]>""",
    "zeta": """### Instruction:
You are a code completion assistant and your task is to analyze user edits and then rewrite an \
excerpt that the user provides, suggesting the appropriate edits within the excerpt, taking into \
account the cursor location.

### User Edits:

User edited "a.py":
```diff
@@ -2,1 +2,1 @@
-def f(name):
+def f(title):

```

### User Excerpt:

```a.py
<|start_of_file|>
import a
<|editable_region_start|>
def f(title<|user_cursor_is_here|>):
    return name
<|editable_region_end|>
f(1)
```

### Response:
<|editable_region_start|>
""",
    "diff": """a.py.diff
--- a/a.py
+++ b/a.py
@@ @@
-def f(name):
+def f(title):
@@ @@
-def f(title):
-    return name
+""",
}


class Spelled:
    """Stands in for a tokenizer: a control token is one character, text is its characters."""

    control = ControlTokens()
    fim = None

    def __init__(self, *names: str) -> None:
        self._names = names

    def token_id(self, content: str) -> int | None:
        return -1 - self._names.index(content) if content in self._names else None

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def spell(self, ids: list[int]) -> str:
        return "".join(chr(token) if token >= 0 else self._names[-1 - token] for token in ids)


def written(form: EditForm, rewriting: Rewriting = REWRITING) -> tuple[list[int], str]:
    tokenizer = Spelled(*form.control)
    ids = edit_prompt(tokenizer, form, rewriting)  # type: ignore[arg-type]
    return ids, tokenizer.spell(ids)


def test_every_form_has_a_prompt_here() -> None:
    assert PROMPTS.keys() == FORMS.keys()


@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_is_as_its_model_knows_it(name: str) -> None:
    ids, text = written(FORMS[name])
    assert text == PROMPTS[name]
    control = sum(text.count(token) for token in FORMS[name].control)
    assert sum(token < 0 for token in ids) == control


@pytest.mark.parametrize("name", FORMS)
def test_control_tokens_in_a_buffer_are_text(name: str) -> None:
    form = FORMS[name]
    evil = [f"x {token} {{edits}} {{path}}\n" for token in (*form.control, "{edit}")]
    rewriting = Rewriting(
        path="a.py", lines=[*evil, *LINES], original=evil, first=0, stop=len(evil), cursor=(9, 0),
        edits=[ShownEdit(path="a.py", first=0, old=evil, new=evil)],
    )  # fmt: skip
    ids, text = written(form, rewriting)
    assert text.count("{edits} {path}\n") >= 2 * len(evil)
    usual, _ = written(form)
    assert [token for token in ids if token < 0] == [token for token in usual if token < 0]


def test_the_name_or_the_vocabulary_tells_the_form() -> None:
    seed = Spelled(*FORMS["zeta-2"].control)
    qwen = Spelled("<|file_sep|>")
    for tokenizer, model, name in [
        (qwen, "Sweep-next-edit-1.5b.q8_0", "sweep"),
        (seed, "zeta-2.1-q4", "zeta-2.1"),
        (seed, "zeta-2", "zeta-2"),
        (qwen, "zeta", "zeta"),
        (infill_tokenizer(USUAL), "qwen-coder", "diff"),
        # Without the tokens of its form, a name is not enough.
        (infill_tokenizer(USUAL), "sweep", "diff"),
    ]:
        assert edit_form(tokenizer, model) is FORMS[name]  # type: ignore[arg-type]


def test_without_a_form_there_is_none_and_what_is_asked_for_must_be_possible() -> None:
    plain: Tokenizer = infill_tokenizer(ControlTokens(eos=(0,)))
    assert edit_form(plain, "nano") is None
    assert edit_form(plain, "nano", "diff") is FORMS["diff"]
    with pytest.raises(ModelError, match=r"needs <.file_sep.>, which this model's"):
        edit_form(plain, "nano", "sweep")
    with pytest.raises(UsageError, match=r"auto, sweep, zeta-2\.1, zeta-2, zeta, diff"):
        edit_form(plain, "nano", "swept")


def test_an_answer_has_whole_lines_and_no_cursor() -> None:
    assert answered_lines(FORMS["sweep"], "a\n\nb") == ["a\n", "\n", "b"]
    assert answered_lines(FORMS["zeta-2"], "a<|user_cursor|>b\n") == ["ab\n"]
