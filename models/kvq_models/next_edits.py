"""Prompts that ask a model how a few lines of a file read after the user's next edit.

A form is data: templates with names of control tokens and slots. What fills a slot is text, also
where it spells a control token. Sources: the card of sweepai/sweep-next-edit-1.5B; zed-industries'
zeta, zeta-2 and zeta-2.1, which the crate `zeta_prompt` of the editor Zed describes (its formats
V0211SeedCoder and V0318SeedMultiRegions). `diff` is our own: any code model has read diffs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from kvq.errors import ModelError, UsageError, argument
from kvq_models.tokenizer import Tokenizer

# Lines around the region that a form's prompt shows, where it has slots for them.
CONTEXT_LINES = 60
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EditForm:
    """Says how a model reads the last edits and a region of lines, and how its answer ends.

    Attributes:
        models: Patterns of names of models that were trained on this form.
        control: Names of control tokens in the templates; a vocabulary must have them.
        prompt: The template. Slots: `path`, `edits`, `original` (the region before the last edit),
            `region`, `marked` (the region with the cursor), `before` and `after` (lines around it),
            `minus` (the region's lines, each with a minus sign).
        edit: The template of an edit. Slots: `path`, `old`, `new`, `diff`, `plain_diff`
            (without line numbers).
        edits: The template around the edits. Slot: `all`.
        between: What stands between two edits.
        most_edits: The last edits of the history that are shown.
        above, below: Lines of the region on both sides of the place that is asked about.
        cursor: Marks the cursor.
        first: Marks the beginning of a file, on a line of its own before it.
        starts_file: The prompt begins with the token that begins a file, where there is one.
        stop: Texts that end an answer.
    """

    models: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    prompt: str
    edit: str
    edits: str = "{all}"
    between: str = ""
    most_edits: int = 6
    above: int
    below: int
    cursor: str = ""
    first: str = ""
    starts_file: bool = False
    stop: tuple[str, ...]


_SEED = ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>", "<filename>")
_SEED_HEAD = "<[fim-suffix]>{after}<[fim-prefix]>{edits}<filename>{path}\n{before}"
_SEED_EDITS = "<filename>edit_history\n{all}\n"
_FILE_DIFF = "--- a/{path}\n+++ b/{path}\n{diff}"

FORMS: dict[str, EditForm] = {
    "sweep": EditForm(
        models=("*sweep*",),
        control=("<|file_sep|>",),
        prompt="{edits}<|file_sep|>original/{path}\n{original}<|file_sep|>current/{path}\n{region}"
        "<|file_sep|>updated/{path}\n",
        edit="<|file_sep|>{path}.diff\noriginal:\n{old}updated:\n{new}",
        most_edits=3, above=10, below=10, stop=("<|file_sep|>",),
    ),
    # Two markers: the region is too short for the format to divide it.
    "zeta-2.1": EditForm(
        models=("*zeta-2.1*", "*zeta2.1*"),
        control=_SEED,
        prompt=f"{_SEED_HEAD}<|marker_1|>\n{{marked}}<|marker_2|>\n<[fim-middle]><|marker_1|>\n",
        edit=_FILE_DIFF, edits=_SEED_EDITS,
        above=5, below=5, cursor="<|user_cursor|>", stop=("<|marker_",),
    ),
    "zeta-2": EditForm(
        models=("*zeta-2*", "*zeta2*"),
        control=_SEED,
        prompt=f"{_SEED_HEAD}<<<<<<< CURRENT\n{{marked}}=======\n<[fim-middle]>",
        edit=_FILE_DIFF, edits=_SEED_EDITS,
        above=10, below=10, cursor="<|user_cursor|>", stop=(">>>>>>> UPDATED",),
    ),
    "zeta": EditForm(
        models=("*zeta*",),
        prompt="### Instruction:\nYou are a code completion assistant and your task is to analyze "
        "user edits and then rewrite an excerpt that the user provides, suggesting the appropriate "
        "edits within the excerpt, taking into account the cursor location.\n\n### User Edits:\n\n"
        "{edits}\n\n### User Excerpt:\n\n```{path}\n{before}<|editable_region_start|>\n{marked}"
        "<|editable_region_end|>\n{after}```\n\n### Response:\n<|editable_region_start|>\n",
        edit='User edited "{path}":\n```diff\n{diff}\n```', between="\n\n",
        above=10, below=10, cursor="<|user_cursor_is_here|>", first="<|start_of_file|>\n",
        stop=("<|editable_region_end|>",),
    ),
    "diff": EditForm(
        prompt="{path}.diff\n--- a/{path}\n+++ b/{path}\n{edits}@@ @@\n{minus}+",
        edit="@@ @@\n{plain_diff}",
        most_edits=4, above=0, below=0, starts_file=True, stop=("\n",),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownEdit:
    """Holds an edit for a prompt: from line `first` on, `new` stands in place of `old`."""

    path: str
    first: int
    old: Sequence[str]
    new: Sequence[str]

    def slots(self) -> dict[str, str]:
        """Returns what fills the slots of an edit's template."""
        rows = f"@@ -{self.first + 1},{len(self.old)} +{self.first + 1},{len(self.new)} @@\n"
        signed = _signed("-", self.old) + _signed("+", self.new)
        return {
            "path": self.path, "old": _text(self.old), "new": _text(self.new),
            "diff": rows + signed, "plain_diff": signed,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewriting:
    """Asks for lines `first` to `stop` of a file.

    `lines` is the file with its line ends, `original` are the region's lines before the last edit,
    `cursor` is a line and code points before it, and `edits` come oldest first.
    """

    path: str
    lines: Sequence[str]
    original: Sequence[str]
    first: int
    stop: int
    cursor: tuple[int, int]
    edits: Sequence[ShownEdit]


def edit_form(tokenizer: Tokenizer, model: str, name: str = "auto") -> EditForm | None:
    """Returns the form `name`; `auto`: the one that the model's name or vocabulary tells.

    None: no form suits. Raises `UsageError` for an unknown form, and `ModelError` for one whose
    control tokens the model does not have.
    """
    if name == "auto":
        trained = (
            form
            for form in FORMS.values()
            if any(fnmatchcase(model.lower(), pattern) for pattern in form.models)
            and not _missing(tokenizer, form)
        )
        return next(trained, FORMS["diff"] if tokenizer.fim is not None else None)
    form = FORMS.get(name)
    if form is None:
        possible = ", ".join(("auto", *FORMS))
        raise UsageError(about="nextEditForm", value=name, possible=possible)
    if missing := _missing(tokenizer, form):
        raise ModelError(
            f"the form {name} of next edits needs {', '.join(missing)}, which this model's "
            f"vocabulary lacks; choose another {argument('nextEditForm')}"
        )
    return form


def _missing(tokenizer: Tokenizer, form: EditForm) -> list[str]:
    return [token for token in form.control if tokenizer.token_id(token) is None]


def edit_prompt(
    tokenizer: Tokenizer,
    form: EditForm,
    rewriting: Rewriting,
    encode: Callable[[str], list[int]] | None = None,
) -> list[int]:
    """Returns the ids of the prompt after which the region's new lines follow.

    `encode` encodes a text as the tokenizer does; None: the tokenizer.
    """
    encode = tokenizer.encode if encode is None else encode
    ids = list(tokenizer.control.start)
    if form.starts_file and tokenizer.fim is not None and tokenizer.fim.file is not None:
        ids.append(tokenizer.fim.file)
    pieces = _pieces(form, form.prompt, _slots(form, rewriting))
    for control, group in groupby(pieces, key=lambda piece: piece[1]):
        text = [piece for piece, _ in group]
        if control:
            ids += [token for name in text if (token := tokenizer.token_id(name)) is not None]
        else:
            ids += encode("".join(text))
    return ids


def answered_lines(form: EditForm, answer: str) -> list[str]:
    """Returns the lines of an answer so far with their ends; the last may be incomplete."""
    text = answer.replace(form.cursor, "") if form.cursor else answer
    *lines, last = text.split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]


_Piece = tuple[str, bool]


def _slots(form: EditForm, rewriting: Rewriting) -> dict[str, list[_Piece]]:
    region = rewriting.lines[rewriting.first : rewriting.stop]
    begin = max(0, rewriting.first - CONTEXT_LINES)
    edits: list[_Piece] = []
    for edit in rewriting.edits[-form.most_edits :]:
        edits += [(form.between, False)] if edits else []
        filled = {name: [(text, False)] for name, text in edit.slots().items()}
        edits += _pieces(form, form.edit, filled)
    if edits:
        edits = list(_pieces(form, form.edits, {"all": edits}))
    texts = {
        "path": rewriting.path,
        "original": _text(rewriting.original),
        "region": _text(region),
        "marked": _text(
            _with_cursor(form, region, rewriting.cursor[0] - rewriting.first, rewriting.cursor[1])
        ),
        "before": ("" if begin else form.first) + "".join(rewriting.lines[begin : rewriting.first]),
        "after": _text(rewriting.lines[rewriting.stop : rewriting.stop + CONTEXT_LINES]),
        "minus": _signed("-", region),
    }
    return {name: [(text, False)] for name, text in texts.items()} | {"edits": edits}


def _pieces(form: EditForm, template: str, slots: dict[str, list[_Piece]]) -> Iterator[_Piece]:
    """Yields the pieces of a filled template, and whether each is a control token's name."""
    names = "|".join(map(re.escape, form.control))
    for part in re.split(rf"(\{{\w+\}}{'|' + names if names else ''})", template):
        if part in form.control:
            yield part, True
        elif slot := _SLOT.fullmatch(part):
            yield from slots[slot[1]]
        else:
            yield part, False


def _with_cursor(form: EditForm, region: Sequence[str], line: int, column: int) -> list[str]:
    return [
        text[:column] + form.cursor + text[column:] if number == line else text
        for number, text in enumerate(region)
    ]


def _text(lines: Sequence[str]) -> str:
    """Joins lines; the last one gets a line end if it has none."""
    text = "".join(lines)
    return text if not text or text.endswith("\n") else f"{text}\n"


def _signed(sign: str, lines: Sequence[str]) -> str:
    return "".join(sign + _text([line]) for line in lines)
