"""Makes any text safe to show: a control character becomes a printable one of the same length.

The texts of the model and the user are data. An escape code in them must not colour or move
anything, a lone surrogate must not stop the terminal's encoder, and a bidirectional override must
not reorder the text around it.
"""

from kvq_apps.terminal.output import UNSAFE

_PICTURES = {code: 0x2400 + code for code in range(32) if code in UNSAFE}
_VISIBLE = dict.fromkeys(UNSAFE, 0xFFFD) | _PICTURES | {0x7F: 0x2421}


def visible(text: str) -> str:
    """Replaces what must not reach a terminal by control pictures (ESC: U+241B) or U+FFFD."""
    return text if text.isascii() and text.isprintable() else text.translate(_VISIBLE)


def storable(text: str) -> str:
    """Returns valid UTF-8 text: CRLF and CR become newlines, lone surrogates U+FFFD."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
