"""`kvq run --batch --ray`: a batch through Ray Data, by replicas that each have a pool."""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import ray.data
from ray.exceptions import RayError

from kvq.errors import BackendError
from kvq_apps import batch
from kvq_apps.fleet.placing import Replicas, share_of
from kvq_apps.serve.hosted import Hosted

# Lines that a replica is given, and gives back, together: after a crash few are done again.
_LINES = 16


class _Replica:
    """A pool in a process of Ray Data's, asked from that one's event loop."""

    def __init__(self, asked: batch.BatchRequest) -> None:
        self._asked = asked
        self._hosted = Hosted(asked.load, asked.config)
        self._started = False

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A line with its answer, as JSON. Raises what loading the model raised."""
        if not self._started:
            self._started = True
            self._hosted.start()
        await self._hosted.ready()
        found = await batch.answer(self._hosted, self._asked.wanted, row["text"])
        if found is None:
            raise BackendError("the engine's thread has ended")
        return {**row, "answer": json.dumps(found)}


def answer_all(
    asked: batch.BatchRequest,
    prompts: Iterable[batch.Prompt],
    arguments: Namespace,
    keep: Callable[[batch.Prompt, batch.Row], None],
) -> None:
    """Answers `prompts` and gives each to `keep` when it is there. Raises `KvqError`."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [{"line": one.line, "text": one.text, "digest": one.digest} for one in prompts]
    replicas = Replicas.asked(arguments)
    share = share_of(asked.engine_options.get("threads"), replicas.most)
    found = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // _LINES)).map(
        _Replica,
        fn_constructor_args=[asked.with_threads(share.threads)],
        concurrency=replicas.most if replicas.least == replicas.most else (
            replicas.least, replicas.most,
        ),
        num_cpus=share.cpus,
    )  # fmt: skip
    try:
        for row in found.iter_rows():
            answer = json.loads(row.pop("answer"))
            keep(batch.Prompt(**row), answer)
    except RayError as error:
        raise BackendError(f"Ray could not answer the batch: {error}") from error
