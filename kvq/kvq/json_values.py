"""Tests of the kind of a JSON or TOML value that a type checker understands."""

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Returns whether a JSON value is an object (a TOML table), whose keys are always texts."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Returns whether a JSON or TOML value is an array."""
    return isinstance(value, list)
