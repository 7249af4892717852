from collections.abc import Iterator, Mapping, Sequence
from typing import Any

class DataContext:
    enable_progress_bars: bool

    @staticmethod
    def get_current() -> DataContext: ...

class Dataset:
    def map(
        self,
        fn: type,
        *,
        fn_constructor_args: Sequence[object],
        concurrency: int | tuple[int, int],
        num_cpus: float,
    ) -> Dataset: ...
    def iter_rows(self) -> Iterator[dict[str, Any]]: ...

def from_items(items: Sequence[Mapping[str, Any]], *, override_num_blocks: int) -> Dataset: ...
