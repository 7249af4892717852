from collections.abc import Mapping
from typing import Any

class RequestRouter:
    @property
    def replica_queue_len_cache(self) -> Mapping[Any, int]: ...
    def update_replicas(self, replicas: list[Any]) -> None: ...
