"""The options of an export: weight formats, targets, what to fit. Knows no file and no model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvq.config import DEFAULT_POLICY, KvPlan
from kvq.errors import UsageError, argument
from kvq.policies import policy_named
from kvq.reference.linear import BLOCKS, SUPER_BLOCK, WIDTHS, BlockFormat, Grid
from kvq_runtime.text_embedding import Pooling, TextEmbedding

# Defaults for a checkpoint: the largest mean width in bits, and the estimated loss (nats a token)
# that narrower widths may cause. Small models lose much at 5 bits.
MEAN_BITS, LOSS_NATS = 6.0, 0.0025
# Codes that share constants where super-blocks cannot be had.
BLOCK = 64
# Bits of codes that weights are rounded to. Three are of super-blocks alone.
EXPORT_BITS = (3, *WIDTHS)

Format = Literal["onnx", "gguf", "both"]
GgufType = Literal["q8_0", "q4_0", "f16", "bf16", "q4_k_m"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """Says how weight matrices are stored: `bits` per code, constants per `block` codes of a row.

    Without a `block`, matrices whose columns 256 divides get super-blocks: 32 codes share whole
    numbers, and 256 the constants that these multiply. At 4 bits that takes 4.5 bits a weight and
    errs less than 32 codes with a scale and zero point, 4.75 bits. Other matrices get blocks of 64.

    `embedding_bits` is the width of the token embedding and of the output head, tied or not.
    `mean_bits` mixes widths instead: so many bits per code on average over all matrices, more for
    those that lose most, and fewer on average as long as the estimated loss of all together stays
    below `loss_nats`. `size_bytes` mixes widths until the data file has that size (`damage`). An
    export fills `overrides` with the formats of matrices, by canonical name, that differ from
    these.
    """

    bits: int = 4
    block: int | None = None
    embedding_bits: int = 8
    mean_bits: float | None = None
    loss_nats: float = 0.0
    size_bytes: int | None = None
    overrides: Mapping[str, BlockFormat] = field(default_factory=dict[str, BlockFormat])

    def __post_init__(self) -> None:
        for name, value in (("bits", self.bits), ("embedding_bits", self.embedding_bits)):
            if value not in EXPORT_BITS:
                *most, last = EXPORT_BITS
                choices = f"{', '.join(map(str, most))} or {last}"
                raise UsageError(about=name, value=value, possible=f"choose {choices}")
        if self.block not in (None, *BLOCKS):
            raise UsageError(about="block", value=self.block, possible="choose 32, 64 or 128")
        least = min(EXPORT_BITS if self.block is None else WIDTHS)
        if self.mean_bits is not None and not least <= self.mean_bits <= max(WIDTHS):
            raise UsageError(
                about="bits", value=f"{self.mean_bits:g}", possible=f"choose {least} to 8"
            )
        if self.block is not None and min(self.bits, self.embedding_bits) < least:
            raise UsageError(
                f"3 bits are of super-blocks; leave {argument('block')} out, or choose 4 or more"
            )
        if self.mixed and self.embedding_bits != 8:
            raise UsageError(
                f"{argument('embedding_bits')} is for {argument('bits')} 3, 4, 5, 6 or 8; where "
                "widths are mixed, embedding and head get what they are worth"
            )

    @classmethod
    def recommended(cls, **fields: Any) -> "WeightFormat":
        """Returns the format of a checkpoint's weights where no width is given."""
        return cls(mean_bits=MEAN_BITS, loss_nats=LOSS_NATS, **fields)

    @property
    def mixed(self) -> bool:
        """Tells whether each matrix gets a width of its own, by what rounding it costs."""
        return self.mean_bits is not None or self.size_bytes is not None

    @property
    def widths(self) -> tuple[int, ...]:
        """Returns the bits that are mixed: fewer than four only where fewer bytes are asked for."""
        return WIDTHS if self.loss_nats else EXPORT_BITS

    def format_of(self, name: str, columns: int) -> BlockFormat:
        """Returns how the canonical matrix `name` of so many columns is stored."""
        if name in self.overrides:
            return self.overrides[name]
        return self.at(self.embedding_bits if name in ("embed", "head") else self.bits, columns)

    def at(self, bits: int, columns: int) -> BlockFormat:
        """Returns the format of rows of so many `columns` at `bits`.

        At 8 bits an offset gains too little to be stored. Three bits are of super-blocks; where 256
        does not divide the columns it is four.
        """
        if bits == max(WIDTHS):
            return BlockFormat(bits=bits, block=self.block or BLOCK)
        if self.block is None and columns % SUPER_BLOCK == 0:
            return BlockFormat(bits=bits, block=min(BLOCKS), grid=Grid.SUPER_MINIMUM)
        bits = max(bits, min(WIDTHS))
        return BlockFormat(bits=bits, block=self.block or BLOCK, grid=Grid.ZERO_POINT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Says what one export writes: formats, the default KV plan, and what is fitted.

    `weights` is for the ONNX graph. By default a checkpoint gets `WeightFormat.recommended()`,
    and a GGUF file the formats that keep its blocks. A GGUF file that is written as q4_0 takes
    the width of the embedding from it; q4_k_m is made by llama.cpp. `policy` is the bundle's
    default one, perhaps with options. `name` defaults to the destination's folder name. `force`
    replaces an existing bundle. `calibrate` rounds weights with error feedback over a text
    (`calibration_text`, or the texts that ship). With the file `importance`, an importance matrix
    of llama.cpp's, each weight is rounded by itself instead, in blocks that suit the columns that
    matter. With `fit_cache` too, the cache is fitted to the
    model. `tokenizer=False` exports a checkpoint that has none: the bundle then takes ids only.
    `predict` fits matrices that predict a prompt's later layers from the output of so many first
    ones; `auto` finds how many. `predict_with` fits matrices that make keys and values from those
    of the bundle at this path. `tune` trains the constants of the weights (`tuning`) and needs
    torch. `embed` gives the graph an output for vectors of texts, pooled so; a checkpoint that
    was made for them has it by its own files.
    """

    weights: WeightFormat | None = None
    format: Format = "onnx"
    gguf_type: GgufType = "q8_0"
    kv: KvPlan = field(default_factory=KvPlan)
    policy: str = DEFAULT_POLICY
    name: str | None = None
    force: bool = False
    quality: bool = True
    calibrate: bool = True
    fit_cache: bool = True
    calibration_text: str | None = None
    importance: Path | None = None
    tokenizer: bool = True
    predict: str | None = None
    predict_with: Path | None = None
    tune: bool = False
    embed: Pooling | None = None
    threads: int = 2

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("format", self.format, get_args(Format)),
            ("gguf_type", self.gguf_type, get_args(GgufType)),
        ):
            if value not in choices:
                raise UsageError(about=name, value=value, possible=f"choose {', '.join(choices)}")
        if self.predict not in (None, "auto") and not self.predict.isdecimal():
            raise UsageError(
                about="predict",
                value=self.predict,
                possible="give auto, or how many of the first layers are computed",
            )
        if self.embed is not None:
            _ = TextEmbedding(pooling=self.embed)
        for name in ("importance", "predict", "predict_with", "embed", "tune"):
            if getattr(self, name) not in (None, False) and not self.onnx:
                raise UsageError(
                    f"{argument(name)} is of the ONNX graph; leave it out, or {argument('format')}"
                )
        if self.tune and not self.quality:
            raise UsageError(
                f"what {argument('tune')} trains is kept only where it keeps more of the "
                f"checkpoint, which {argument('no-quality')} does not ask; leave one of them out"
            )
        # Raises for an unknown policy.
        _ = policy_named(self.policy)
        if self.threads < 1:
            raise UsageError(about="threads", value=self.threads, possible="give 1 or more")

    @property
    def feedback(self) -> bool:
        """Tells whether weights are rounded with error feedback, where there is a tokenizer."""
        return self.calibrate and self.importance is None

    @property
    def onnx(self) -> bool:
        """Tells whether a graph is written."""
        return self.format != "gguf"

    @property
    def gguf(self) -> bool:
        """Tells whether a GGUF file is written."""
        return self.format != "onnx"
