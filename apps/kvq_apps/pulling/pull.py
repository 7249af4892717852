"""The pull itself: the first source that gives the model, and a bundle made of it."""

import sys
import threading
import time
from pathlib import Path

from kvq.errors import BackendError, BundleError, ModelError, argument
from kvq.settings import agreed, is_offline
from kvq_apps import known_models, output
from kvq_apps.flags import told
from kvq_apps.output import TERMINAL, Teller
from kvq_apps.pulling import pulled
from kvq_apps.pulling.fetching import Checkpoint, discard, fetch
from kvq_apps.pulling.wanted import Wanted
from kvq_models.embedded import installed_names
from kvq_runtime.bundle import Bundle
from kvq_runtime.tuning import default_threads

_YES = ("y", "yes")


def pull(wanted: Wanted, tell: Teller = TERMINAL, *, anew: bool = False) -> Bundle:
    """The bundle of what is wanted, fetched and exported now unless one that can be used is here.

    The sources are tried in their order, and a note names the next one. `anew` replaces
    what is here. Raises `ModelError` when no source gives the model, with each one's reason, and
    when another model has that name; else what `export_model` raises.
    """
    folder = known_models.pulled_folder(wanted.name)
    record = pulled.record_of(folder)
    if (
        record is not None
        and not anew
        and (kept := _kept(wanted, folder, record, tell)) is not None
    ):
        return kept
    reasons: list[str] = []
    for source, following in zip(wanted.sources, (*wanted.sources[1:], None), strict=True):
        tell.note(f"pulling {wanted.name} from {source}")
        try:
            with tell.progress() as progress:
                checkpoint = fetch(source, progress)
        except (ModelError, BackendError) as error:
            reasons.append(f"from {source}: {told(error)}")
            if following is not None:
                tell.note(f"{told(error)}; now from {following}")
        else:
            bundle = _exported(checkpoint, wanted, folder, tell)
            _record(wanted, str(source), bundle)
            discard(checkpoint)
            return bundle
    raise ModelError(f"{wanted.name} cannot be pulled {'; '.join(reasons)}{_what_is_here()}")


def pull_asked(wanted: Wanted, tell: Teller) -> Bundle:
    """As `pull`, once the person at the terminal or `--yes` agrees. Raises `ModelError` if not."""
    if not (agreed() or (tell.asks and _agrees(wanted))):
        raise ModelError(
            f"{wanted.name} is not here yet; pull it with `kvq pull {wanted.name}`, or give "
            f"{argument('--yes')} and it is pulled when it is needed"
        )
    return pull(wanted, tell)


def _agrees(wanted: Wanted) -> bool:
    """What a person says, who is asked only before a screen hides the question."""
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    output.print_note(
        f"{wanted.name} is not here yet. Pull it from {wanted.sources[0]}, licence "
        f"{wanted.license or 'unknown'}? [y/N]"
    )
    return sys.stdin.readline().strip().lower() in _YES


def _kept(wanted: Wanted, folder: Path, record: pulled.Record, tell: Teller) -> Bundle | None:
    """The bundle that is here, which counts as pulled now; None if it cannot be used.

    Raises `ModelError` for another's.
    """
    if record.source not in map(str, wanted.sources):
        raise ModelError(
            f"a model called {wanted.name} is here already, from {record.source}; delete it with "
            f"`kvq models rm {wanted.name}`, or replace it with {argument('--force')}"
        )
    try:
        bundle = Bundle.open(folder, verify="size")
    except BundleError as error:
        # Of another version, or damaged: whoever asks for it wants one that runs.
        tell.note(f"it is pulled again: {told(error)}")
        return None
    tell.note(f"{wanted.name} is here already, from {record.source}")
    _record(wanted, record.source, bundle)
    return bundle


def _exported(checkpoint: Checkpoint, wanted: Wanted, folder: Path, tell: Teller) -> Bundle:
    from kvq_export.config import ExportOptions
    from kvq_export.export import export_model

    # What is there without a record is what an interrupted pull left.
    options = ExportOptions(
        name=wanted.name, quality=False, force=True, threads=default_threads()
    )  # fmt: skip
    with tell.progress() as progress:
        return export_model(checkpoint, folder, options, progress)


def _record(wanted: Wanted, source: str, bundle: Bundle) -> None:
    license = wanted.license or str(bundle.manifest.source.get("license", "unknown"))
    pulled.write_record(
        bundle.path, pulled.Record(source=source, license=license, pulled_s=time.time())
    )


def _what_is_here() -> str:
    """Offline, the models that can be run instead."""
    if not is_offline():
        return ""
    here = sorted({name for name, _ in known_models.named()}) or installed_names()
    return f"; here are: {', '.join(here)}" if here else ""
