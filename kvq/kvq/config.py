"""Describes a cache that is to be opened: shape, widths, budget. Knows no model and no file."""

import re
from dataclasses import dataclass
from enum import IntFlag

from kvq.errors import UsageError, argument

PAGE_TOKENS = 64
PAGE_WIDTHS = (8, 6, 4, 2)
FLOAT_WIDTH = 16
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
MOST_HEAD_DIM = 512
MOST_TAPS = 16
MOST_DELTA_DIM = 256
# Tokens after which a delta net folds rows into its state.
FOLD_TOKENS = 8
# Checkpoints that convolutions keep at most.
CONV_CHECKPOINTS = 16

DEFAULT_CHUNK_TOKENS = 256
# Rows of the floating-point tail kept free for tokens that may be forgotten.
DEFAULT_DRAFT_TOKENS = 8
MOST_DRAFT_TOKENS = 128

# A row of `kvq.policies.POLICIES`; here, because a session is described before numpy loads.
DEFAULT_POLICY = "budget"
# A row of `kvq.selectors.SELECTORS`, likewise.
DEFAULT_READ = "blasst"


class PageForm(IntFlag):
    """Names how the pages of one (layer, KV head) are encoded; an export measures which suits it.

    `ROTATED_KEYS`: keys are stored as their Hadamard transform, which spreads what single channels
    have too much of over all (QuaRot, arXiv 2404.00456); queries are transformed to meet them.
    `CHANNEL_VALUES`: values have a scale per channel, not per token.
    """

    PLAIN = 0
    ROTATED_KEYS = 1
    CHANNEL_VALUES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Describes the layers of one class: their number, and the sizes that all of them share.

    Attributes:
        num_layers: Layers that have keys and values.
        num_heads: Query heads, a multiple of the KV heads.
        num_kv_heads: KV heads: heads of keys and values, each for as many query heads.
        head_dim: Channels per head, a multiple of 16 up to 512.

    Raises:
        UsageError: The sizes are not possible.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim % 16 or not 16 <= self.head_dim <= MOST_HEAD_DIM:
            raise UsageError(
                f"head_dim {self.head_dim} is not possible: it must be a multiple of 16 up to "
                f"{MOST_HEAD_DIM} (tested: {', '.join(map(str, HEAD_DIMS))})"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads: "
                "the first must be a multiple of the second"
            )

    @property
    def streams(self) -> int:
        """Counts the streams: pairs of a layer and a KV head."""
        return self.num_layers * self.num_kv_heads

    @property
    def float_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values at 16 bits, all layers."""
        return self.streams * self.head_dim * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvShape:
    """Describes short convolutions of `width` channels over a row and `taps` - 1 before it.

    They have no keys and values; what they remember are rows float32 [width].
    """

    num_layers: int
    width: int
    taps: int

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.width < 1 or not 2 <= self.taps <= MOST_TAPS:
            raise UsageError(
                f"{self.num_layers} convolutions of {self.width} channels over {self.taps} rows "
                f"are not possible: 1 or more over 2 to {MOST_TAPS} rows"
            )

    @property
    def before(self) -> int:
        """Counts the rows before its own that a row needs."""
        return self.taps - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Describes gated delta nets, each of `value_heads`, which share `key_heads` evenly.

    A value head keeps a matrix float32 [key_dim, value_dim]; queries, keys and values come of
    convolutions over a row and `taps` - 1 before it. See `kvq.reference.delta`.
    """

    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        if min(self.num_layers, self.key_heads, self.key_dim, self.value_dim) < 1:
            raise UsageError(f"{self} is not possible: no number of it can be below 1")
        if self.value_heads < 1 or self.value_heads % self.key_heads:
            raise UsageError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads: the "
                "first must be a multiple of the second"
            )
        most = MOST_DELTA_DIM
        if max(self.key_dim, self.value_dim) > most or (self.key_dim | self.value_dim) % 16:
            raise UsageError(
                f"heads of {self.key_dim} and {self.value_dim} channels are not possible in a "
                f"delta net: both must be multiples of 16 up to {most}"
            )
        if not 2 <= self.taps <= MOST_TAPS:
            raise UsageError(f"a convolution over {self.taps} rows: 2 to {MOST_TAPS} are possible")

    @property
    def before(self) -> int:
        """Counts the rows before its own that a row needs."""
        return self.taps - 1

    @property
    def conv_width(self) -> int:
        """Counts the channels of the convolutions: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Counts the channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def state_width(self) -> int:
        """Counts the numbers in a layer's matrices."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of one state of all layers, with the rows before it that it needs."""
        return self.num_layers * (self.state_width + self.before * self.conv_width) * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """Says at which widths a page is closed, and how many tokens stay in floating point.

    Attributes:
        k_bits: Bits of a key's number: 8, 6, 4 or 2. With 16 for both nothing is quantised, and
            every token stays in floating point. Default 4.
        v_bits: The same of values. Default 4.
        sink_tokens: First tokens of the text, which always stay in floating point, 0 to 64.
            Default 4.
        tail_tokens: Tokens that stay so before the newest, which do not fill a page yet; 0 to 64.
            Only a cache with bytes for its whole context keeps them. Default 64.

    Raises:
        UsageError: A number is not possible.
    """

    k_bits: int = 4
    v_bits: int = 4
    sink_tokens: int = 4
    tail_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        check_widths(self.k_bits, self.v_bits)
        for name, tokens in (("sink", self.sink_tokens), ("tail", self.tail_tokens)):
            if not 0 <= tokens <= PAGE_TOKENS:
                raise UsageError(f"{tokens} {name} tokens: 0 to {PAGE_TOKENS} are possible")

    @property
    def quantized(self) -> bool:
        """Returns whether pages are closed at all."""
        return self.k_bits != FLOAT_WIDTH


def check_widths(k_bits: int, v_bits: int) -> None:
    """Raises `UsageError` unless the pair is one a page can have, or 16 and 16."""
    if k_bits == v_bits == FLOAT_WIDTH:
        return
    for name, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
        if bits not in PAGE_WIDTHS:
            hint = (
                f"; 16 is possible for both together (`{argument('kv', 'fp')}`)"
                if bits == FLOAT_WIDTH
                else ""
            )
            raise UsageError(about=name, value=bits, possible=f"choose 8, 6, 4 or 2{hint}")


def parse_kv(text: str, prefix: str = f"{argument('kv')} ") -> tuple[int, int]:
    """Returns key and value bits: `"4:2"` or `"4,2"` is (4, 2), `"8"` (8, 8), `"fp"` (16, 16).

    Raises `UsageError`; `prefix` is what was typed before `text`.
    """
    if text.strip().lower() in ("fp", "f16", "fp16"):
        return FLOAT_WIDTH, FLOAT_WIDTH
    match = re.fullmatch(r"(\d+)(?:[:,](\d+))?", text.strip())
    if match is None:
        raise UsageError(f"{prefix}{text!r} is not possible: write K:V widths such as 4:2, or fp")
    k_bits = int(match[1])
    v_bits = int(match[2] or match[1])
    whole = k_bits == v_bits == FLOAT_WIDTH
    if not whole and not {k_bits, v_bits} <= set(PAGE_WIDTHS):
        *most, last = map(str, PAGE_WIDTHS)
        raise UsageError(
            f"{prefix}{text} is not possible: choose {', '.join(most)} or {last} for keys and for "
            "values, such as 4:2, or fp (16 bits for both)"
        )
    return k_bits, v_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Holds a KV budget as the user gave it; one field is set, or none for 8192 tokens.

    Attributes:
        num_bytes: Bytes of the whole cache: pages, tables, floating-point rows and scratch.
        tokens: Tokens that the cache is to hold without losing a bit.
        fraction: Share of the bytes that the whole context would take at 16 bits.
    """

    num_bytes: int | None = None
    tokens: int | None = None
    fraction: float | None = None


_UNITS = {
    "": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "k": 1 << 10, "m": 1 << 20,
    "g": 1 << 30, "kb": 1000, "mb": 1000**2, "gb": 1000**3,
}  # fmt: skip


def parse_budget(text: str | int) -> Budget:
    """Reads a budget: `"64MiB"`, `"4096tok"`, `"25%"` or a number of bytes.

    A share is one of the fp16 bytes of the whole context that a session is opened with.
    Raises `UsageError` for anything else, zero and negative values included.
    """
    match = re.fullmatch(r"([0-9]{0,15}\.?[0-9]{1,15})\s*([A-Za-z%]*)", str(text).strip())
    unit = match[2].lower() if match else "?"
    value = float(match[1]) if match else 0.0
    if unit == "%" and value > 0:
        return Budget(fraction=value / 100)
    if unit in ("tok", "token", "tokens") and value >= 1:
        return Budget(tokens=int(value))
    if unit in _UNITS and value * _UNITS[unit] >= 1:
        return Budget(num_bytes=int(value * _UNITS[unit]))
    raise UsageError(
        about="kv_budget",
        value=f"{text!r}",
        possible="give bytes (64MiB, 1.5GiB, 67108864), "
        "tokens (4096tok) or a share of what the whole context takes in fp16 (25%)",
    )


def parse_offload(text: str | int) -> int:
    """Returns bytes of the host's memory, from `"8GiB"` or a number. Raises `UsageError`."""
    return parse_bytes(argument("kv_offload"), text)


def parse_weights(text: str | int) -> int:
    """Returns bytes of experts in memory, from `"4GiB"` or a number. Raises `UsageError`."""
    return parse_bytes(argument("weights_budget"), text)


def parse_bytes(flag: str, text: str | int) -> int:
    """Returns the bytes that `flag` was given, from `"8GiB"` or a number. Raises `UsageError`."""
    try:
        num_bytes = parse_budget(text).num_bytes
    except UsageError:
        num_bytes = None
    if num_bytes is None:
        raise UsageError(f"{flag} {text!r} is not possible: give bytes (8GiB, 536870912)")
    return num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionParams:
    """Holds the constants of one attention layer, the attributes of a `kvq::Attention` node.

    Attributes:
        layer: Number of the layer in its class, from 0.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Channels per head.
        scale: Factor of the products q.k.
        softcap: Above 0, a logit s becomes softcap * tanh(s / softcap). Default 0, off.
        window_tokens: Above 0, a query at position p sees keys at positions above
            p - window_tokens. Default 0, all of them.
        rope_factor: Factor of the rotation's cos and sin. Default 1.
        norm_eps: Added to the mean square that an RMS norm divides by. Default 1e-6.
        cache: Number of the class among the sequence's caches (`kvq.cache`). Default 0.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window_tokens: int = 0
    rope_factor: float = 1.0
    norm_eps: float = 1e-6
    cache: int = 0
