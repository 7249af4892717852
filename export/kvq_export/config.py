"""What an export is asked to be. Knows no file and no model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvq.config import DEFAULT_POLICY, KvPlan
from kvq.errors import UsageError, argument
from kvq.policies import policy_named
from kvq.reference_linear import BLOCKS, WIDTHS, BlockFormat, Grid

# Of a checkpoint's weights where nothing is asked for: the widest mean, and what narrower ones may
# lose by estimate, nats a token. At 5 bits half a billion parameters lost 3.7 points of infilling.
MEAN_BITS, LOSS_NATS = 6.0, 0.0025

# Of ONNX Runtime's product.
STANDARD_WIDTHS = (4, 8)

Linear = Literal["kvq", "ort"]

Format = Literal["onnx", "gguf", "both"]
GgufType = Literal["q4_k_m", "q4_0", "q8_0", "f16", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How weight matrices are stored: `bits` per code, constants per `block` codes of a row.

    `embedding_bits` is the width of the token embedding and of the output head, whether the
    two are tied or not. `linear` names the op that multiplies them: ours, or ONNX Runtime's
    MatMulNBits, kept to compare with. `mean_bits` instead mixes widths: so many bits per code over
    all matrices, more for those that are worth it, and fewer bits yet for as long as all together
    lose no more than `loss_nats`; `size_bytes` mixes them until the data file has that size
    (`damage`). An export fills `others` with the formats of matrices, by canonical name, that are
    not stored as these say.
    """

    bits: int = 4
    block: int = 64
    embedding_bits: int = 8
    linear: Linear = "kvq"
    mean_bits: float | None = None
    loss_nats: float = 0.0
    size_bytes: int | None = None
    others: Mapping[str, BlockFormat] = field(default_factory=dict[str, BlockFormat])

    def __post_init__(self) -> None:
        widths = WIDTHS if self.linear == "kvq" else STANDARD_WIDTHS
        for name, value in (("bits", self.bits), ("embedding_bits", self.embedding_bits)):
            if value not in widths:
                *most, last = widths
                choices = f"{', '.join(map(str, most))} or {last}"
                raise UsageError(about=name, value=value, possible=f"choose {choices}")
        if self.block not in BLOCKS:
            raise UsageError(about="block", value=self.block, possible="choose 32, 64 or 128")
        if self.linear not in get_args(Linear):
            raise UsageError(about="linear", value=self.linear, possible="choose kvq or ort")
        if self.mean_bits is not None and not min(WIDTHS) <= self.mean_bits <= max(WIDTHS):
            raise UsageError(about="bits", value=f"{self.mean_bits:g}", possible="choose 4 to 8")
        if self.mixed and self.embedding_bits != 8:
            raise UsageError(
                f"{argument('embedding_bits')} is for {argument('bits')} 4, 5, 6 or 8; where "
                "widths are mixed, embedding and head get what they are worth"
            )
        if self.mixed and self.linear == "ort":
            raise UsageError(
                f"{argument('linear', 'ort')} has one width for all matrices: {argument('bits')} "
                "4 or 8"
            )

    @classmethod
    def recommended(cls, **asked: Any) -> "WeightFormat":
        """What a checkpoint gets where no width is asked for."""
        return cls(mean_bits=MEAN_BITS, loss_nats=LOSS_NATS, **asked)

    @property
    def mixed(self) -> bool:
        """Whether widths of matrices are to be found by what they are worth."""
        return self.mean_bits is not None or self.size_bytes is not None

    def format_of(self, name: str) -> BlockFormat:
        """How the canonical matrix `name` is stored."""
        if name in self.others:
            return self.others[name]
        return self.at(self.embedding_bits if name in ("embed", "head") else self.bits)

    def at(self, bits: int) -> BlockFormat:
        """How a matrix is stored at `bits`; at 8 a zero point would gain a twentieth."""
        symmetric = self.linear == "ort" or bits == max(WIDTHS)
        grid = Grid.SYMMETRIC if symmetric else Grid.ZERO_POINT
        return BlockFormat(bits=bits, block=self.block, grid=grid)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """One export: formats, default KV plan, and what to do around them.

    `weights` are those of the ONNX graph, by default what suits the source: `WeightFormat()` a
    checkpoint, what holds its blocks a GGUF file. A GGUF file that is written as q4_0 takes the
    width of the embedding from there. `policy` is the bundle's default one, or a spelling of it
    with options. `name` defaults to the destination's folder name. `force` replaces an existing
    bundle. `calibrate` rounds weights with error feedback over a text (`calibration_text`, None:
    what ships) and measures what errors of the cache cost in each layer, for policies that ask.
    `tokenizer` False exports a checkpoint that has none: the bundle then takes ids only. `predict`:
    fit matrices that predict a prompt's later layers from what leaves so many first ones, or auto,
    which measures how many. `predict_with`: fit those that make keys and values from what the
    bundle at this path computes. `tune` trains the constants of the weights (`tuning`), for which
    torch must be there.
    """

    weights: WeightFormat | None = None
    format: Format = "onnx"
    gguf_type: GgufType = "q4_k_m"
    kv: KvPlan = field(default_factory=KvPlan)
    policy: str = DEFAULT_POLICY
    name: str | None = None
    force: bool = False
    quality: bool = True
    calibrate: bool = True
    calibration_text: str | None = None
    tokenizer: bool = True
    predict: str | None = None
    predict_with: Path | None = None
    tune: bool = False
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
        if self.predict is not None and not (
            self.onnx and (self.weights is None or self.weights.linear == "kvq")
        ):
            raise UsageError(
                f"{argument('predict')} is of a graph with {argument('linear', 'kvq')}; leave one "
                "of them out"
            )
        if self.predict_with is not None and not self.onnx:
            raise UsageError(
                f"{argument('predict_with')} is of the ONNX graph; leave it out, or "
                f"{argument('format')}"
            )
        self._check_tune()
        # Evaluated for its refusals.
        _ = policy_named(self.policy)
        if self.threads < 1:
            raise UsageError(about="threads", value=self.threads, possible="give 1 or more")

    def _check_tune(self) -> None:
        if not self.tune:
            return
        if not (self.onnx and (self.weights is None or self.weights.linear == "kvq")):
            raise UsageError(
                f"{argument('tune')} is of a graph with {argument('linear', 'kvq')}; leave one of "
                "them out"
            )
        if not self.quality:
            raise UsageError(
                f"what {argument('tune')} trains is kept only where it keeps more of the "
                f"checkpoint, which {argument('no-quality')} does not ask; leave one of them out"
            )

    @property
    def onnx(self) -> bool:
        """Whether a graph is asked for."""
        return self.format != "gguf"

    @property
    def gguf(self) -> bool:
        """Whether a GGUF file is asked for."""
        return self.format != "onnx"
