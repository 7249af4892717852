"""`kvq batch --ray`: answers a batch with Ray Data, by replicas that each have a pool."""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import ray.data
from ray.exceptions import RayError

from kvq.errors import BackendError
from kvq_apps import batch
from kvq_apps.fleet.replicas import Replicas, share_of
from kvq_apps.serve.hosted_app import HostedApp
from kvq_apps.serve.loading import ServeRequest

# A replica gets and returns so many lines at once, so that a crash repeats few of them.
_LINES_PER_BLOCK = 16


class _Replica:
    """Holds a pool in a process of Ray Data and uses it from this process's event loop."""

    def __init__(self, request: ServeRequest, defaults: batch.LineDefaults) -> None:
        self._defaults = defaults
        self._hosted = HostedApp(request.load, request.config)
        self._started = False

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns a line with its answer as JSON. Raises what loading the model raised."""
        if not self._started:
            self._started = True
            self._hosted.start()
        await self._hosted.ready()
        answer = await batch.answer(self._hosted, self._defaults, row["text"])
        if answer is None:
            raise BackendError("the engine's thread has ended")
        return {**row, "answer": json.dumps(answer)}


def answer_all(
    request: ServeRequest,
    defaults: batch.LineDefaults,
    prompts: Iterable[batch.BatchPrompt],
    arguments: Namespace,
    keep: Callable[[batch.BatchPrompt, batch.Row], None],
) -> None:
    """Answers `prompts` and passes each answer to `keep` when it is there. Raises `KvqError`."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [
        {"line": prompt.line, "text": prompt.text, "digest": prompt.digest} for prompt in prompts
    ]
    replicas = Replicas.from_arguments(arguments)
    cpus, threads = share_of(request.engine_options.get("threads"), replicas.most)
    answers = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // _LINES_PER_BLOCK)).map(
        _Replica,
        fn_constructor_args=[request.with_threads(threads), defaults],
        concurrency=replicas.most if replicas.least == replicas.most else (
            replicas.least, replicas.most,
        ),
        num_cpus=cpus,
    )  # fmt: skip
    try:
        for row in answers.iter_rows():
            answer = json.loads(row.pop("answer"))
            keep(batch.BatchPrompt(**row), answer)
    except RayError as error:
        raise BackendError(f"Ray could not answer the batch: {error}") from error
