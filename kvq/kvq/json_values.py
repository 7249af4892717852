"""Which kind a value of JSON or TOML is, in words that a type checker follows into the value."""

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value read of JSON is an object (of TOML a table), whose keys are always texts."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Whether a value read of JSON or TOML is an array."""
    return isinstance(value, list)
