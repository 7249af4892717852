"""A tokenizer with the tokens that ask a model to fill in, for the tests of such prompts."""

from kvq_models.control import ControlTokens, FimTokens
from kvq_models.tokenizer import Tokenizer
from tiny import CONTROL_TOKENS, byte_level_tokenizer

PREFIX, SUFFIX, MIDDLE = (
    CONTROL_TOKENS.index(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle")
)
FIM = FimTokens(prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE)
# No merge of the tokenizer joins these: one token each.
LETTERS = "!#$%&*+?@^"
USUAL = ControlTokens(eos=(0,), fim=FIM)


def infill_tokenizer(control: ControlTokens = USUAL, template: str | None = None) -> Tokenizer:
    """Returns the tokenizer with these control tokens."""
    return Tokenizer.from_json(byte_level_tokenizer().to_str(), control, template)
