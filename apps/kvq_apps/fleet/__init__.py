"""Replicas of `kvq serve` on Ray; `serve run kvq_apps.fleet:app` deploys them."""

from collections.abc import Mapping
from typing import Any

from kvq.json_values import is_array


def app(args: Mapping[str, Any]) -> Any:
    """Makes the application for `serve run kvq_apps.fleet:app model=nano` or `serve deploy`.

    `args` are flags of `kvq serve` by their names: true for a switch, a list for a flag that may be
    repeated. Raises `KvqError`.
    """
    from kvq_apps.cli import parse
    from kvq_apps.commands.serve import serve_request
    from kvq_apps.fleet.deployments import application
    from kvq_apps.fleet.replicas import Replicas

    words: list[str] = []
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        many = value if is_array(value) else [value]
        words += [flag for item in many if item is True]
        words += [f"{flag}={item}" for item in many if not isinstance(item, bool)]
    arguments = parse(["serve", "--ray", *words])
    return application(serve_request(arguments), Replicas.from_arguments(arguments))
