"""Makes texts for long-range recall: pass keys in filler, look-ups in a table, facts in prose.

It has the wording, so that training data and evaluation ask in the same way. It knows no tokens:
whoever needs a length in tokens asks for more or less text. Equal random states give equal text.

    rng = random.Random(0)
    prompt, answer = passkey(rng, filler_text(rng, 12_000), depth=0.5)
    prompt, answer = key_value(rng, num_pairs=300, depth=0.5)

`prompt + answer` reads as one text, and the answer begins with its space. A training example is
`Recall.text`, which ends the answer's line. `passkey` takes any text as filler (books, code).
"""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

# Numbers of a key's second part: enough for tables far longer than any context here.
_KEY_NUMBERS = 1000

_TASK = "There is a pass key hidden in a lot of text that does not matter. Find it and keep it.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"
_SENTENCES = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
    "There and back again.", "The river runs to the sea.", "Bread is made of flour.",
    "The train leaves at noon.", "A door can be open or shut.", "Winter follows autumn.",
)  # fmt: skip
_WORDS = (
    "amber", "apple", "arrow", "basin", "birch", "blade", "brick", "cabin", "candle", "cedar",
    "cliff", "cloud", "coral", "crane", "delta", "dune", "eagle", "ember", "fern", "field",
    "flint", "forest", "glass", "grain", "harbor", "hazel", "heron", "iron", "island", "ivory",
    "jade", "lake", "lamp", "larch", "leaf", "lemon", "linen", "maple", "marsh", "meadow",
    "mirror", "moss", "north", "ocean", "olive", "orchid", "otter", "pearl", "pine", "plume",
    "quartz", "rail", "reed", "ridge", "river", "robin", "salt", "shell", "silver", "slate",
    "spruce", "stone", "timber", "willow",
)  # fmt: skip
_READ = "Read this text; a question about it follows.\n\n"
_OFFICES = (
    "harbour master", "town clerk", "chief librarian", "head gardener", "fire warden",
    "bridge keeper", "choir leader", "night porter", "museum curator", "market inspector",
)  # fmt: skip
_TOWNS = (
    "Ostrava", "Tampere", "Coimbra", "Galway", "Utrecht", "Bergen", "Cadiz", "Graz", "Lublin",
    "Aarhus", "Ghent", "Turku", "Trieste", "Varna", "Rouen", "Malmo",
)  # fmt: skip
_GIVEN_NAMES = (
    "Milena", "Tobias", "Ingrid", "Rafael", "Oksana", "Duncan", "Beatriz", "Henrik", "Salome",
    "Matteo", "Agnes", "Lorenz",
)  # fmt: skip
_SURNAMES = (
    "Kovar", "Lindqvist", "Okafor", "Brandt", "Moreau", "Tanaka", "Pereira", "Novak", "Haldane",
    "Vasilev", "Quiroga", "Eriksen",
)  # fmt: skip
_PLACES = re.compile(r"[.!?]\s+|\n+")


class Recall(NamedTuple):
    """Holds a prompt that contains its own answer; `answer` continues it, with a space first."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """Returns question and answer as one text with its line ended: a training example."""
        return f"{self.prompt}{self.answer}\n"


def filler_text(rng: random.Random, characters: int) -> str:
    """Returns at least `characters` of plain sentences, rounds of all of them in random order."""
    sentences: list[str] = []
    length = 0
    while length < characters:
        sentences += rng.sample(_SENTENCES, len(_SENTENCES))
        length += sum(len(sentence) + 1 for sentence in _SENTENCES)
    return " ".join(sentences)


def passkey(rng: random.Random, filler: str, depth: float) -> Recall:
    """Hides a pass key of five digits in `filler`, at the sentence or line end nearest `depth`.

    `depth` 0 is the beginning of the filler and 1 its end. The task is that of Mohtashami and
    Jaggi, arXiv 2305.16300.
    """
    key = rng.randrange(10_000, 100_000)
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    hidden = _hidden(filler, needle, depth * len(filler))
    return Recall(f"{_TASK}{hidden}{_QUESTION}", f" {key}")


class Fact(NamedTuple):
    """Describes an invented person who holds an office in a town."""

    office: str
    town: str
    name: str

    @property
    def statement(self) -> str:
        """Returns the sentence that states it."""
        return f"{self.lead} {self.name}."

    @property
    def question(self) -> str:
        """Returns the question for the name."""
        return f"What is the {self.office} of {self.town} called?"

    @property
    def lead(self) -> str:
        """Returns the beginning of an answer, up to the name."""
        return f"The {self.office} of {self.town} is called"


def two_facts(rng: random.Random) -> tuple[Fact, Fact]:
    """Returns two facts that share no word."""
    pairs = [rng.sample(names, 2) for names in (_OFFICES, _TOWNS, _GIVEN_NAMES, _SURNAMES)]
    first, second = (
        Fact(office, town, f"{forename} {surname}")
        for office, town, forename, surname in zip(*pairs, strict=True)
    )
    return first, second


def fact_question(
    prose: str, facts: Sequence[Fact], depths: Sequence[float], target: int
) -> Recall:
    """Hides each of `facts` in the prose at its depth, 0 to 1, and asks for fact number `target`.

    The prompt ends with `Fact.lead` on a line of its own; for a chat model, leave it out.
    """
    text = prose
    # From the end, so that no inserted sentence moves the place of a later one.
    for depth, fact in sorted(zip(depths, facts, strict=True), reverse=True):
        text = _hidden(text, fact.statement, depth * len(prose))
    fact = facts[target]
    return Recall(f"{_READ}{text}\n\n{fact.question}\n{fact.lead}", f" {fact.name}")


def sentence_starts(text: str) -> list[int]:
    """Returns where sentences and lines begin in `text`."""
    return [0, *(match.end() for match in _PLACES.finditer(text))]


def _hidden(text: str, needle: str, near: float) -> str:
    """Returns `text` with one more sentence, at the sentence or line end nearest `near`."""
    places = [*sentence_starts(text), len(text)]
    place = min(places, key=lambda at: abs(at - near))
    before, after = text[:place], text[place:]
    gap = "\n" if before.endswith("\n") else " "
    if before and not before[-1].isspace():
        before += gap
    return f"{before}{needle}{gap if after else ''}{after}"


def key_value(rng: random.Random, num_pairs: int, depth: float) -> Recall:
    """Asks for one number in a Python dict of `num_pairs` distinct names with random numbers.

    `depth` 0 asks for the first pair and 1 for the last. The task is that of Liu et al., arXiv
    2307.03172, written as code. `num_pairs` is 1 to 64,000.
    """
    return key_values(rng, num_pairs, [depth])[0]


def key_values(rng: random.Random, num_pairs: int, depths: Sequence[float]) -> list[Recall]:
    """Asks as `key_value` does, once per depth in the same table; a prompt has the earlier ones."""
    places = rng.sample(range(len(_WORDS) * _KEY_NUMBERS), num_pairs)
    names = [f"{_WORDS[place % len(_WORDS)]}_{place // len(_WORDS)}" for place in places]
    values = [rng.randrange(10_000, 100_000) for _ in names]
    lines = [f'    "{name}": {value},' for name, value in zip(names, values, strict=True)]
    text = "\n".join(["values = {", *lines, "}\n"])
    recalls: list[Recall] = []
    for depth in depths:
        index = round(depth * (num_pairs - 1))
        recalls.append(Recall(f'{text}assert values["{names[index]}"] ==', f" {values[index]}"))
        text = recalls[-1].text
    return recalls
