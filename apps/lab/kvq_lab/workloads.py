"""Texts that drafts are measured with: what a model is given and what it would write.

Made from this package's own files, which lie wherever it is installed, and from two short texts
beside this file. Knows no model.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from kvq_apps.bench.model_shapes import SHAPES

# Characters of a prompt, about; the file `texts/chat.txt` is shorter.
_PROMPT_CHARACTERS = 3000
_TURN = "\n----\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Holds one kind of work: a prompt and the text that follows it."""

    name: str
    prompt: str
    answer: str


def workloads() -> tuple[Workload, ...]:
    """Makes all of them, from what repeats its prompt most to what repeats nothing."""
    return (_code_edit(), _json_rewriting(), _chat(), _quotes(), _code_completion(), _prose())


def other_text() -> str:
    """Returns a long text that no workload repeats, to come before one: more of our sources."""
    names = ("class_cache.py", "reference/linear.py", "native.py")
    return "\n".join(_source("kvq", name) for name in names)


def _code_edit() -> Workload:
    """Asks for a file again with a name changed."""
    code = _source("kvq", "sizing.py")[:_PROMPT_CHARACTERS]
    return Workload(
        name="code edit",
        prompt=f"{code}\n\n# The same file with `tokens` called `positions`:\n\n",
        answer=re.sub(r"\btokens\b", "positions", code),
    )


def _json_rewriting() -> Workload:
    """Asks for a list of records as an object of them, with a key more."""
    records = [{"name": name, **row} for name, row in SHAPES.items()]
    by_name: Mapping[str, object] = {
        name: {"checked": True, "parameters": dict(row)} for name, row in SHAPES.items()
    }
    return Workload(
        name="JSON rewriting",
        prompt=f"{json.dumps(records, indent=2)}\n\nThe same by name, each marked as checked:\n\n",
        answer=json.dumps(by_name, indent=2),
    )


def _chat() -> Workload:
    """Asks for the second answer of a chat, which takes the first one up."""
    *before, answer = _text("chat.txt").split(_TURN)
    return Workload(name="chat turns", prompt="\n\n".join(before) + "\n\n", answer=answer)


def _quotes() -> Workload:
    """Asks for a summary in sentences of its own around sentences of the text."""
    prose = _text("prose.txt")
    sentences = re.findall(r"[A-Z][^.]+\.", prose.replace("\n", " "))
    lead = ("The text begins: ", "It goes on to say: ", "What follows from this? ", "And lastly: ")
    quoted = (
        f'{lead[place % len(lead)]}"{sentence}"' for place, sentence in enumerate(sentences[1::3])
    )
    return Workload(
        name="summary with quotes",
        prompt=f"{prose}\n\nA summary of the above, with quotes:\n\n",
        answer="\n".join(quoted),
    )


def _code_completion() -> Workload:
    """Asks for the second half of a file after its first."""
    code = _source("kvq", "cache.py")
    return Workload(
        name="code completion",
        prompt=code[:_PROMPT_CHARACTERS],
        answer=code[_PROMPT_CHARACTERS : 2 * _PROMPT_CHARACTERS],
    )


def _prose() -> Workload:
    """Asks for the second half of a text that does not repeat itself."""
    prose = _text("prose.txt")
    half = prose.index("\n\n", len(prose) // 2)
    return Workload(name="free prose", prompt=prose[:half], answer=prose[half:])


def _source(package: str, name: str) -> str:
    return (files(package) / name).read_text("utf-8")


def _text(name: str) -> str:
    return (files("kvq_lab") / "texts" / name).read_text("utf-8")
