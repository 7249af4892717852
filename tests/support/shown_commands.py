"""The `kvq` commands that a text in Markdown shows."""

import re
from collections.abc import Iterator


def shown_commands(text: str) -> Iterator[tuple[int, str]]:
    """Yields where each indented command begins, and its line: joined where it goes on.

    What follows two spaces explains the command and is left out.
    """
    for match in re.finditer(r"^    (\S(?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE):
        line = re.split(r"\s{2,}", re.sub(r"\s*\\\n\s*", " ", match[1]))[0]
        line = re.sub(r"^.*&& \S*/(?=kvq )", "", line)
        if re.match(r"([^#|]+\| )?kvq ", line):
            yield match.start(), line
