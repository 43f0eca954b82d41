"""Events of a run: a name and fields that JSON can hold."""

from collections.abc import Callable, Mapping
from typing import Any

Observe = Callable[[str, Mapping[str, Any]], None]


def ignore(event: str, fields: Mapping[str, Any]) -> None:
    """Observe nothing."""
