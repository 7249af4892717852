"""Finds the value of each flag.

A value comes from the command line, else from the flag's environment variable, else from its
`setting` in the user's file (`configuration`). Without any it stays None, and the component that
uses it has a default.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.errors import UsageError
from kvq.settings import environment, environment_name
from kvq_apps.settings import options
from kvq_apps.settings.flags import FLAGS, KV_WIDTHS, field


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagValue:
    """Holds a flag's value and its origin: a variable, or the user's file and its line."""

    value: Any
    origin: str


# Returns the value of a flag that is not on the command line, or None.
FlagSource = Callable[[str], FlagValue | None]


def environment_source(name: str) -> FlagValue | None:
    """Returns the value of a flag's environment variable. Raises `UsageError` for a bad one."""
    text = environment(name)
    if text is None:
        return None
    variable = environment_name(name)
    value = read_value(name, text, variable)
    return FlagValue(value=[value] if FLAGS[name].repeats else value, origin=variable)


def fill(arguments: Namespace, *sources: FlagSource) -> None:
    """Fills every flag that is not on the command line from the first source that has it.

    The single widths of keys and values replace a half of `--kv` from the same or a later source,
    never from an earlier one.
    """
    arguments.command_line = {
        name for name in FLAGS if getattr(arguments, field(name), None) is not None
    }
    for source in sources:
        skipped = KV_WIDTHS if getattr(arguments, "kv", None) is not None else ()
        for name in FLAGS:
            if name not in skipped and getattr(arguments, field(name), "absent") is None:
                flag_value = source(name)
                setattr(arguments, field(name), None if flag_value is None else flag_value.value)
    for name, flag in FLAGS.items():
        if flag.switch and getattr(arguments, field(name), "absent") is None:
            setattr(arguments, field(name), False)


_YES_NO = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def read_value(name: str, text: str, origin: str) -> Any:
    """Reads `text` as a value of flag `name`; of a flag that repeats it is one value.

    Raises a `UsageError` that names `origin`.
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


def checked_value(name: str, value: Any, origin: str) -> Any:
    """Reads a TOML or JSON value as a value of flag `name`; of a flag that repeats it is one value.

    Raises a `UsageError` that names `origin`, also for what the flag's component would refuse.
    """
    switch = FLAGS[name].switch
    if switch != isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{origin} needs {'true or false' if switch else 'text or a number'}")
    try:
        text = str(value)
    except ValueError:
        raise UsageError(f"{origin} has more digits than any number needs") from None
    flag_value = read_value(name, text, origin)
    options.check(name, flag_value)
    return flag_value
