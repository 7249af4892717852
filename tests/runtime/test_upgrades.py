"""Files of other versions of kvq: this one opens them, or refuses them by their version.

`written/B-S` holds a bundle of version B, a session of version S saved with it, and the logits that
they led to then, float32 [2, V]. A commit that raises a version runs this file as a program: it
writes what this version writes beside what is there.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BundleError, SnapshotError
from kvq_apps.names import pull_records
from kvq_apps.serve import instances
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_runtime.bundle import bundle, manifest
from kvq_runtime.engine import Engine
from kvq_runtime.session import snapshot
from kvq_runtime.session.session import Session
from logits import divergence, prompt
from tiny import make_llama_checkpoint

WRITTEN = Path(__file__).parent / "written"
TEXT = prompt(200)
SESSION = {"context_tokens": 256, "kv": "4:2", "kv_budget": "256KiB"}
# Other kernels round differently, by 2e-3 nats. A file that is read wrongly is nats away.
MOST_NATS = 0.02

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
written = pytest.mark.parametrize("folder", sorted(WRITTEN.iterdir()), ids=lambda path: path.name)


def versions(folder: Path) -> tuple[int, int]:
    """Returns the versions of the bundle and of the session."""
    of_bundle, of_session = folder.name.split("-")
    return int(of_bundle), int(of_session)


def after(session: Session, ids: list[int]) -> np.ndarray:
    """Returns logits [1, V] after the session's text and `ids`."""
    return np.concatenate(list(session.logits(ids)))[-1:]


@written
def test_a_bundle_computes_what_it_did_or_is_refused_by_its_version(folder: Path) -> None:
    version, _ = versions(folder)
    expected = np.load(folder / "logits.npy")[:1]
    if version not in manifest.READ_VERSIONS:
        with pytest.raises(BundleError, match=f"of version {version}.*export or pull the model"):
            bundle.Bundle.open(folder / "bundle")
        return
    with Engine.open(folder / "bundle", threads=1) as engine, engine.session(kv="fp") as session:
        actual = after(session, TEXT)
    assert divergence(expected, actual) < MOST_NATS
    assert divergence(expected, np.roll(actual, 1)) > 1


@needs_native
@written
def test_a_session_goes_on_or_is_refused_by_its_version(folder: Path) -> None:
    of_bundle, version = versions(folder)
    expected = np.load(folder / "logits.npy")[1:]
    if version not in snapshot.READ_VERSIONS:
        says = f"of version {version}, older than the .*; read its text again and save"
        with pytest.raises(SnapshotError, match=says):
            snapshot.examine(folder / "session.kvq")
        return
    if of_bundle not in manifest.READ_VERSIONS:
        pytest.skip("the bundle it was saved with is refused")
    with Engine.open(folder / "bundle", threads=1) as engine:
        with engine.session(**SESSION) as session:
            session.load(folder / "session.kvq")
            assert list(session.tokens) == TEXT
            actual = after(session, [7])
        with engine.session(**SESSION) as session:
            session.prefill(TEXT)
            fresh = after(session, [7])
    assert divergence(expected, actual) < MOST_NATS
    # The answer goes on from the text that was saved.
    assert divergence(fresh, actual) < MOST_NATS


def test_this_version_is_among_them() -> None:
    """Fails until this file was run as a program and its output committed."""
    assert (manifest.VERSION, snapshot.VERSION) in [
        versions(folder) for folder in WRITTEN.iterdir()
    ]
    sizes = [path.stat().st_size for path in WRITTEN.rglob("*") if path.is_file()]
    assert sum(sizes) < 200_000 * len(list(WRITTEN.iterdir()))


# Files beside the models


def test_notes_of_another_version_are_read_as_far_as_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with instances.announce(instances.Instance(pid=1, url="http://127.0.0.1:1")):
        (file,) = (tmp_path / "kvq/servers").glob("*.json")
        with file.open("r+") as stream:
            stream.write(json.dumps({"pid": 1, "url": "http://127.0.0.1:9", "moons": 2}))
            stream.truncate()
        (instance,) = instances.running()
        assert (instance.url, instance.version, instance.protocol) == ("http://127.0.0.1:9", "?", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "kvq.json").touch()
    record = {"source": "the hub", "license": "MIT", "pulled_s": 5, "stars": 3}
    (folder / "pulled.json").write_text(json.dumps(record))
    assert pull_records.record_of(folder) == pull_records.PullRecord(
        source="the hub", license="MIT", pulled_s=5.0
    )


def write(folder: Path) -> None:
    """Writes what this version writes."""
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    small = {"num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 256}
    checkpoint = make_llama_checkpoint(folder / "checkpoint", **tiny, **small)
    export_model(checkpoint, folder / "bundle", ExportOptions(quality=False, name="tiny"))
    shutil.rmtree(checkpoint)
    with Engine.open(folder / "bundle", threads=1) as engine:
        with engine.session(kv="fp") as session:
            plain = after(session, TEXT)
        with engine.session(**SESSION) as session:
            session.prefill(TEXT)
            session.save(folder / "session.kvq")
            logits = np.concatenate([plain, after(session, [7])])
    np.save(folder / "logits.npy", logits.astype(np.float32))


if __name__ == "__main__":
    place = WRITTEN / f"{manifest.VERSION}-{snapshot.VERSION}"
    write(place)
    sys.stdout.write(f"{place}\n")
