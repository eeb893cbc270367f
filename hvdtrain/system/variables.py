"""Environment variables that set the fields of a dataclass: read, parsed and refused in one way.

Used by `backends.options` (HVDTRAIN_*) and `hvd.engine.settings` (HOROVOD_*). A parser takes the
text of a variable, and raises ValueError with what it wants. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any


def read_variable(
    env: Mapping[str, str], name: str, parse: Callable[[str], Any], default: Any
) -> Any:
    """Return the parsed value of a variable; `default` if it is unset or empty.

    Raises ValueError with name and value if it cannot be parsed.
    """
    text = env.get(name, "").strip()
    try:
        return parse(text) if text else default
    except ValueError as error:
        raise ValueError(f"{name}={text} must be {error}") from None


def one_of(*choices: str) -> Callable[[str], str]:
    """Return the parser of a choice, in upper or lower case."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"one of: {', '.join(choices)}")
        return text.lower()

    return parse


def whole(text: str) -> int:
    """Return a whole number, which is not negative."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("a whole number >= 0")
    return int(text)


def not_negative(text: str) -> float:
    """Return a finite number, which is not negative."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise ValueError("a number >= 0")


def positive(text: str) -> float:
    """Return a finite number greater than zero."""
    with suppress(ValueError):
        if number := not_negative(text):
            return number
    raise ValueError("a number > 0")


def flag(text: str) -> bool:
    """Return what the words of command lines mean, the same as click's."""
    if text.lower() in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text.lower() in ("0", "false", "f", "no", "n", "off"):
        return False
    raise ValueError("true or false")
