"""Whether this build of llama.cpp computes on this machine, found out in a process of its own.

llama.cpp is compiled for the instructions that the processor announces. Virtual machines announce
AMX that they do not have, and there the first product of several rows ends the program without a
word. Judges nothing else: what is refused in an orderly way is refused again where it is used.
"""

import hashlib
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from kvq.settings import cache_folder, llama_folder
from kvq_runtime import device
from kvq_runtime.gguf_format import DEFAULT_ALIGNMENT, MAGIC, TENSOR_TYPES, VERSIONS

# pip would take a wheel that it has built before, whatever CMAKE_ARGS says now.
REBUILD = (
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python "
    "llama-cpp-python"
)
TIMEOUT_S = 120
_SCRIPT = "import sys; sys.path[:0] = {path!r}; from {module} import main; main({file!r})"
# Other signals are someone else's: a full memory, an interrupt, an assertion.
_FAULTS = ("SIGILL", "SIGSEGV", "SIGBUS")

# What llama.cpp's build calls instructions, and how Linux names them. Never AMX.
_INSTRUCTIONS = {
    "SSE42": "sse4_2", "AVX": "avx", "AVX2": "avx2", "BMI2": "bmi2", "FMA": "fma", "F16C": "f16c",
    "AVX_VNNI": "avx_vnni", "AVX512": "avx512f avx512cd avx512bw avx512dq avx512vl",
    "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
}  # fmt: skip

# A model of zeros. One row is a product of vectors, which needs no AMX; the last layer computes
# one row only. Both types are among those that AMX and llama.cpp's own layouts are for.
_ROWS, _WIDTH, _LAYERS = 16, 64, 2
_F32, _Q4_0, _Q8_0 = 0, 2, 8
_PARTS = {
    "attn_norm": _F32, "attn_q": _Q8_0, "attn_k": _Q8_0, "attn_v": _Q8_0, "attn_output": _Q8_0,
    "ffn_norm": _F32, "ffn_gate": _Q4_0, "ffn_up": _Q4_0, "ffn_down": _Q4_0,
}  # fmt: skip
_KEYS: dict[str, str | int | float] = {
    "general.architecture": "llama",
    "llama.block_count": _LAYERS,
    "llama.context_length": _WIDTH,
    "llama.embedding_length": _WIDTH,
    "llama.feed_forward_length": _WIDTH,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": _WIDTH,
    "tokenizer.ggml.model": "no_vocab",
}


def fault(package: Path) -> str | None:
    """Why the llama.cpp of the `package` llama_cpp ends programs on this machine, or None.

    A build that has computed is remembered until it or the processor changes; one that has not is
    tried again by the next process.
    """
    folder = llama_folder() or package / "lib"
    return _tried(folder, _digest(folder))


def build_flags() -> str:
    """The CMAKE_ARGS of a llama.cpp with the instructions that are here, and never AMX."""
    here = device.instructions()
    named = _INSTRUCTIONS if "sse2" in here else {}
    states = {name: "ON" if here.issuperset(of.split()) else "OFF" for name, of in named.items()}
    return " ".join(f"-DGGML_{name}={state}" for name, state in {"NATIVE": "OFF", **states}.items())


def main(path: str) -> None:
    """The process of the trial: computes `_ROWS` tokens with the model at `path`."""
    from kvq.config import FLOAT_WIDTH, KvPlan
    from kvq_runtime.backends.llama_cache import open_context
    from kvq_runtime.backends.llama_library import LlamaModel
    from kvq_runtime.config import SessionConfig

    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    model = LlamaModel(Path(path))
    functions = model.library.functions
    plan = KvPlan(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH, sink_tokens=0)
    config = SessionConfig(plan=plan, context_tokens=_ROWS, budget_bytes=0, chunk_tokens=_ROWS)
    context, _ = open_context(model, config=config, threads=1, sequences=1)
    # A batch only points at its tokens.
    tokens = (functions.llama_token * _ROWS)()
    sys.exit(functions.llama_decode(context, functions.llama_batch_get_one(tokens, _ROWS)))


@cache
def _tried(folder: Path, digest: str) -> str | None:
    mark = cache_folder() / "llama.cpp" / digest
    if mark.exists():
        return None
    # What cannot be tried here is not judged.
    with suppress(OSError, subprocess.TimeoutExpired):
        status = _status()
        name = signal.Signals(-status).name if status < 0 else ""
        if name in _FAULTS:
            return (
                f"llama.cpp ends the program that computes with it ({name}): the build in {folder} "
                "uses instructions that this machine announces but does not execute, as some "
                "virtual machines do with AMX; build it without them: "
                f'CMAKE_ARGS="{build_flags()}" {REBUILD}'
            )
        if status == 0:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return None


def _status() -> int:
    """What the process of the trial returns, or minus the signal that ended it."""
    with TemporaryDirectory(prefix="kvq-") as folder:
        file = Path(folder) / "zeros.gguf"
        file.write_bytes(_zeros())
        script = _SCRIPT.format(path=sys.path, module=__name__, file=str(file))
        return subprocess.run(  # noqa: S603  our own interpreter and script
            [sys.executable, "-c", script], timeout=TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ).returncode  # fmt: skip


def _digest(folder: Path) -> str:
    """Another one for another build or another processor."""
    found = [device.probe().processor, *sorted(device.instructions())]
    for path in sorted((*folder.glob("*llama*"), *folder.glob("*ggml*"))):
        with suppress(OSError):
            status = path.stat()
            found.append(f"{path} {status.st_mtime_ns} {status.st_size}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:32]


def _zeros() -> bytes:
    """The GGUF file of the trial."""
    layers = {f"blk.{i}.{part}": kind for i in range(_LAYERS) for part, kind in _PARTS.items()}
    tensors = {"token_embd": _Q8_0, "output_norm": _F32} | layers
    header = struct.pack("<4sIQQ", MAGIC, VERSIONS[-1], len(tensors), len(_KEYS))
    for key, value in _KEYS.items():
        header += _text(key)
        match value:
            case str():
                header += struct.pack("<I", 8) + _text(value)
            case int():
                header += struct.pack("<II", 4, value)
            case float():
                header += struct.pack("<If", 6, value)
    offset = 0
    for name, kind in tensors.items():
        shape = (_WIDTH,) if kind == _F32 else (_WIDTH, _WIDTH)
        header += _text(f"{name}.weight")
        header += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        # Of these sizes every tensor is a multiple of the alignment.
        offset += _WIDTH ** len(shape) // TENSOR_TYPES[kind].block * TENSOR_TYPES[kind].block_bytes
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT + offset)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
