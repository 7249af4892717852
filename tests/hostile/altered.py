"""A process that alters a model file again and again and reads it, with bounded memory.

`python altered.py FILE HEADER COUNT` prints each alteration, by its seed, that is neither read nor
refused as a user's mistake is, and at last how many were refused.
"""

import json
import random
import re
import resource
import signal
import sys
from pathlib import Path

from kvq.errors import KvqError
from kvq_export.config import ExportOptions
from kvq_export.export import open_model
from kvq_export.phases import no_progress
from kvq_export.read.checkpoint import LENGTH_BYTES
from kvq_export.read.source import open_source
from kvq_runtime.bundle import gguf_format

# More than any of these files may take, were its sizes believed.
DATA_BYTES = 1 << 30
MUTANT_S = 10
MOST_CHARACTERS = 2000
NUMBERS = (
    *(0, 1, 2, 31, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
VALUES = (*NUMBERS, -1, 1.5, "F32", "I64", None, True, [], [[]], {})
# Numbers and types of tensors as a safetensors header has them.
VALUE = re.compile(rb'\d+|"(?:F|BF)\d+"')


def gguf_fields(file: Path, content: bytes) -> list[slice]:
    """Returns where each number of the header stands, by what the reader takes."""
    fields: list[slice] = []

    class Noting(gguf_format._GgufReader):  # pyright: ignore[reportPrivateUsage]
        def _take(self, num_bytes: int) -> bytes:
            raw = super()._take(num_bytes)
            if num_bytes <= 8:
                fields.append(slice(self._at - num_bytes, self._at))
            return raw

    Noting(file, content).contents()  # type: ignore[arg-type]
    return fields


def alter_number(draw: random.Random, data: bytearray, field: slice, is_gguf: bool) -> None:
    if is_gguf:
        width = field.stop - field.start
        value = draw.choice((*NUMBERS, draw.randrange(16))) & (256**width - 1)
        data[field] = value.to_bytes(width, "little")
        return
    old = bytes(data[field])
    text = json.dumps(draw.choice((*VALUES, float(old) if old.isdigit() else old.decode())))
    data[field] = text.encode()
    length = int.from_bytes(data[:LENGTH_BYTES], "little") + len(text) - len(old)
    data[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "little")


def alter_bytes(draw: random.Random, data: bytearray, header: int) -> None:
    place = draw.randrange(min(header, len(data)))
    match draw.choice(("flip", "cut", "remove", "repeat", "insert")):
        case "flip":
            data[place] ^= 1 << draw.randrange(8)
        case "cut":
            del data[draw.randrange(1, len(data)) :]
        case "remove":
            del data[place : place + draw.choice((1, 4, 8, 64))]
        case "repeat":
            data[place:place] = data[place : place + draw.choice((1, 8, 64))]
        case _:
            place = data.find(b"[", place)
            data[place + 1 : place + 1] = draw.choice((b"-", b"9" * 30, b"1e9", b"[", b"null,"))


def read(source: Path) -> None:
    model = open_model(open_source(source, no_progress), ExportOptions())
    for name in sorted(model.original.sources):
        rows = model.original.sources[name]
        model.original.checkpoint.read(rows)


def too_late(*_: object) -> None:
    raise TimeoutError(f"it took more than {MUTANT_S} s")


def main(file: Path, header: int, count: int) -> None:
    is_gguf = file.suffix == gguf_format.SUFFIX
    content = file.read_bytes()
    if is_gguf:
        fields = gguf_fields(file, content)
    else:
        fields = [slice(*match.span()) for match in VALUE.finditer(content[:header], LENGTH_BYTES)]
    signal.signal(signal.SIGALRM, too_late)
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    refused = 0
    for seed in range(count):
        draw, data = random.Random(seed), bytearray(content)
        if seed % 2:
            alter_number(draw, data, draw.choice(fields), is_gguf)
        else:
            for _ in range(draw.randint(1, 3)):
                alter_bytes(draw, data, header)
        file.write_bytes(data)
        signal.alarm(MUTANT_S)
        try:
            read(file if is_gguf else file.parent)
        except KvqError as error:
            refused += 1
            if len(str(error)) > MOST_CHARACTERS:
                print(seed, "says too much:", len(str(error)))
        except Exception as error:  # noqa: BLE001  the faults that are looked for
            print(seed, repr(error)[:300])
        finally:
            signal.alarm(0)
    print("refused", refused)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
