"""Where a flag's value comes from: the command line, the environment, then the files, in layers.

A value comes from the flag, else from its environment twin, else from its `setting` in a
configuration file, else from the component that owns the default (left None here).
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError
from kvq.settings import environment, environment_name
from kvq_apps.flags import FLAGS, KV_WIDTHS, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A flag's value and where it stands: a variable, or a file and its line."""

    value: Any
    origin: str


# What gives a flag's value where the command line does not; None: it says nothing.
Layer = Callable[[str], Found | None]


def environment_layer(name: str) -> Found | None:
    """The value of flag `name`'s environment twin. Raises `UsageError` for a bad one."""
    text = environment(name)
    if text is None:
        return None
    variable = environment_name(name)
    value = read_value(name, text, variable)
    return Found(value=[value] if FLAGS[name].repeats else value, origin=variable)


def fill(arguments: Namespace, *layers: Layer) -> None:
    """Gives every flag that was not written what the first layer that has it says.

    Widths of K and V refine `--kv` of their own layer or of a later one, never of an earlier.
    """
    arguments.written = {
        name for name in FLAGS if getattr(arguments, field(name), None) is not None
    }
    for layer in layers:
        settled = KV_WIDTHS if getattr(arguments, "kv", None) is not None else ()
        for name in FLAGS:
            if name not in settled and getattr(arguments, field(name), "absent") is None:
                found = layer(name)
                setattr(arguments, field(name), None if found is None else found.value)
    for name, flag in FLAGS.items():
        if flag.switch and getattr(arguments, field(name), "absent") is None:
            setattr(arguments, field(name), False)


_YES_NO = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def read_value(name: str, text: str, origin: str) -> Any:
    """`text` as flag `name` reads it, one of several that `repeats`.

    Raises `UsageError`, naming `origin`.
    """
    flag = FLAGS[name]
    origin = f"{origin}={text}"
    if flag.switch:
        if text.lower() not in _YES_NO:
            raise UsageError(f"{origin} is not possible: give 1 or 0")
        return _YES_NO[text.lower()]
    if flag.choices is not None and text not in flag.choices:
        raise UsageError(f"{origin} is not possible: choose {', '.join(flag.choices)}")
    try:
        return flag.read(text)
    except ArgumentTypeError as error:
        raise UsageError(f"{origin} is not possible: {error}") from None
