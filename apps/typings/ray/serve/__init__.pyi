from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ray.serve import exceptions as exceptions
from ray.serve import request_router as request_router

T = TypeVar("T", bound=type)

class Application: ...

class Deployment:
    def bind(self, *args: object) -> Application: ...

class _DeploymentStatus:
    message: str

class _ApplicationStatus:
    deployments: Mapping[str, _DeploymentStatus]

class _Status:
    applications: Mapping[str, _ApplicationStatus]

def start(*, http_options: Mapping[str, Any]) -> None: ...
def run(target: Application, *, name: str) -> object: ...
def status() -> _Status: ...
def shutdown() -> None: ...
def ingress() -> Callable[[T], T]: ...
def deployment(
    _func_or_class: type,
    *,
    name: str,
    max_ongoing_requests: int,
    max_queued_requests: int = ...,
    graceful_shutdown_wait_loop_s: float,
    graceful_shutdown_timeout_s: float,
    ray_actor_options: Mapping[str, Any] = ...,
    health_check_period_s: float = ...,
    max_constructor_retry_count: int = ...,
    request_router_config: Mapping[str, Any] = ...,
    **scaling: Any,
) -> Deployment: ...

# Its methods are those of the class that was deployed.
def get_deployment_handle(deployment_name: str, app_name: str) -> Any: ...
