"""What an export is asked to be. Knows no file and no model."""

from dataclasses import dataclass, field

from kvq.config import KvPlan
from kvq.errors import UsageError

WEIGHT_BITS = (4, 8)
BLOCKS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How weight matrices are stored: `bits` per code, one scale per `block` codes of a row.

    `embedding_bits` is the width of the token embedding and of the output head, whether the
    two are tied or not.
    """

    bits: int = 4
    block: int = 64
    embedding_bits: int = 8

    def __post_init__(self) -> None:
        for flag, value in (("wbits", self.bits), ("embedding-bits", self.embedding_bits)):
            if value not in WEIGHT_BITS:
                raise UsageError(f"--{flag} {value} is not possible: choose 4 or 8")
        if self.block not in BLOCKS:
            raise UsageError(f"--group {self.block} is not possible: choose 32, 64 or 128")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """One export: weight format, default KV plan, and what to do around them.

    `name` defaults to the destination's folder name. `force` replaces an existing bundle.
    `tokenizer` False exports a checkpoint that has none: the bundle then takes token ids only.
    """

    weights: WeightFormat = field(default_factory=WeightFormat)
    kv: KvPlan = field(default_factory=KvPlan)
    name: str | None = None
    force: bool = False
    quality: bool = True
    tokenizer: bool = True
    threads: int = 2

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError(f"--threads {self.threads} is not possible: give 1 or more")
