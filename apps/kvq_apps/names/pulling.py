"""Pulls a model: fetches it from the first source that works and exports a bundle."""

import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvq.errors import BackendError, BundleError, ModelError, argument
from kvq.settings import assumes_yes, is_offline
from kvq_apps.names import known_models, pull_records
from kvq_apps.names.fetching import Checkpoint, discard, fetch
from kvq_apps.names.model_names import NotPulledError
from kvq_apps.names.pull_request import PullRequest
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal import text_input
from kvq_apps.terminal.output import TERMINAL, Reporter
from kvq_export.phases import FETCH, Phases
from kvq_models.catalogue import installed_names
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import Manifest
from kvq_runtime.machine.tuning import default_threads


def pull(request: PullRequest, reporter: Reporter = TERMINAL, *, replace: bool = False) -> Bundle:
    """Returns the bundle of `request`; fetches and exports it unless a usable one is here.

    The sources are tried in their order, and a note names the next one. `replace` fetches also
    where a bundle is here. Raises `ModelError` when every source fails, with all reasons, and when
    another model has the name; else what `export_model` raises.
    """
    folder = known_models.pulled_folder(request.name)
    if not replace:
        _check_name(request.name)
    record = pull_records.record_of(folder)
    if (
        record is not None
        and not replace
        and (existing := _usable_bundle(request, folder, record, reporter)) is not None
    ):
        return existing
    reasons: list[str] = []
    for source, following in zip(request.sources, (*request.sources[1:], None), strict=True):
        reporter.note(f"pulling {request.name} from {source}")
        with reporter.progress() as progress:
            job = Phases.of_making(progress, fetches=source.kind != "path")
            try:
                checkpoint = fetch(source, job.of(FETCH))
            except (ModelError, BackendError) as error:
                progress.clear()
                reasons.append(f"from {source}: {format_error(error)}")
                if following is not None:
                    reporter.note(f"{format_error(error)}; now from {following}")
                continue
            bundle = _export(checkpoint, request, str(source), folder, job)
        discard(checkpoint)
        return bundle
    raise ModelError(f"{request.name} cannot be pulled {'; '.join(reasons)}{_local_models_hint()}")


def pull_with_consent(request: PullRequest, reporter: Reporter) -> Bundle:
    """Pulls a model if the person at the terminal or `--yes` agrees.

    Raises `NotPulledError` if nobody does, else what `pull` raises.
    """
    missing = NotPulledError(request)
    if not (assumes_yes() or (reporter.asks and text_input.agrees(missing.question))):
        raise missing
    return pull(request, reporter)


def _check_name(name: str) -> None:
    """Raises `ModelError` for the name of a model that was exported here."""
    existing = known_models.exported_models().get(name)
    if existing is not None and pull_records.pulled_bundle(name) is None:
        raise ModelError(
            f"a model called {name} is here already, at {existing}; forget it with `kvq models rm "
            f"{name}`, or pull with {argument('--force')}, and that one is used by its path"
        )


def _usable_bundle(
    request: PullRequest, folder: Path, record: pull_records.PullRecord, reporter: Reporter
) -> Bundle | None:
    """Returns the local bundle and renews its record; None if the bundle cannot be used.

    Raises `ModelError` if it came from another source.
    """
    if record.source not in map(str, request.sources):
        raise ModelError(
            f"a model called {request.name} is here already, from {record.source}; delete it with "
            f"`kvq models rm {request.name}`, or replace it with {argument('--force')}"
        )
    try:
        bundle = Bundle.open(folder, verify="size")
    except BundleError as error:
        # It is damaged or of another version, and the user wants one that runs.
        reporter.note(f"it is pulled again: {format_error(error)}")
        return None
    reporter.note(f"{request.name} is here already, from {record.source}")
    with suppress(FileNotFoundError):  # another pull replaces the bundle, with a record of its own
        _write_record(request, record.source, bundle.path, bundle.manifest)
    return bundle


def _export(
    checkpoint: Checkpoint, request: PullRequest, source: str, folder: Path, job: Phases
) -> Bundle:
    from kvq_export.config import ExportOptions
    from kvq_export.export import export_model

    # Other commands may have left a bundle without a record here.
    options = ExportOptions(
        name=request.name, quality=False, force=True, threads=default_threads()
    )  # fmt: skip
    write_record = partial(_write_record, request, source)
    return export_model(checkpoint, folder, options, job, write_record)


def _write_record(request: PullRequest, source: str, folder: Path, manifest: Manifest) -> None:
    license = request.license or str(manifest.source.get("license", "unknown"))
    if (existing := known_models.exported_models().get(request.name)) is not None:
        known_models.unname(existing)
    pull_records.write_record(
        folder, pull_records.PullRecord(source=source, license=license, pulled_s=time.time())
    )


def _local_models_hint() -> str:
    """Returns, offline, a text that names the models that can be run instead."""
    if not is_offline():
        return ""
    names = sorted({name for name, _ in known_models.named_models()}) or installed_names()
    return f"; here are: {', '.join(names)}" if names else ""
