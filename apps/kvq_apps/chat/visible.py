"""Makes any text safe to show: every control character becomes a printable one of the same length.

The model's and the user's texts are data. An escape code in them must neither colour nor move
anything, a lone surrogate must not stop the terminal's encoder, and a bidirectional override must
not reorder what stands around it.
"""

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_BIDI_OVERRIDES = (0x202A, 0x202B, 0x202C, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068, 0x2069)
_REPLACED = (*range(0x80, 0xA0), *range(0xD800, 0xE000), 0x2028, 0x2029, *_BIDI_OVERRIDES)
_VISIBLE = {**_PICTURES, 0x7F: 0x2421, **dict.fromkeys(_REPLACED, 0xFFFD)}


def visible(text: str) -> str:
    """`text` with control pictures (ESC is U+241B) or U+FFFD for what must not reach a terminal."""
    return text if text.isascii() and text.isprintable() else text.translate(_VISIBLE)


def storable(text: str) -> str:
    """`text` with CRLF and CR as newlines and lone surrogates as U+FFFD: valid UTF-8."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
