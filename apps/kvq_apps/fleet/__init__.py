"""Many replicas of `kvq serve` on Ray: `app` is what Ray Serve deploys (`kvq_apps.fleet:app`)."""

from collections.abc import Mapping
from typing import Any

from kvq.json_values import is_array


def app(args: Mapping[str, Any]) -> Any:
    """The application for `serve run kvq_apps.fleet:app model=nano replicas=2` or `serve deploy`.

    `args` are flags of `kvq serve` by their names, with a true switch and a list where a flag may
    be repeated. Raises `KvqError`.
    """
    from kvq_apps.cli import parse
    from kvq_apps.fleet.deployments import application, asked_for

    words: list[str] = []
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        many = value if is_array(value) else [value]
        words += [flag for one in many if one is True]
        words += [f"{flag}={one}" for one in many if not isinstance(one, bool)]
    return application(asked_for(parse(["serve", "--ray", *words])))
