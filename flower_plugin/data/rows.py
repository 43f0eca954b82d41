"""From a row (a mapping of columns) to a Sample."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flower_plugin.errors import DataError

from .options import read_text
from .sample import Options, Sample


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns to read; None: the sample does not have that part."""

    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    label: str | None = None
    group: str | None = None
    split: str | None = None


def find_columns(options: Options, present: Collection[str], where: str) -> Columns:
    """Choose the columns: those that the options name, else the usual names that are present.

    Options: ``text-column``, ``prompt-column``, ``response-column``, ``messages-column``, ``label-column``,
    ``group-column``, ``split-column``.

    Raises
    ------
    DataError
        If a named column is missing, or no sample can be made of the columns; it names those that exist.
    """
    exist = f"{where} has the columns: {', '.join(sorted(present)) or '(none)'}"
    named = {part: read_text(options, f"{part}-column") for part in Columns.__dataclass_fields__}
    for part, column in named.items():
        if column and column not in present:
            raise DataError(f"{part}-column = {column!r} does not exist; {exist}")
    content = [part for part in ("text", "prompt", "response", "messages") if named[part]]
    if not content:
        usual = (("messages",), ("prompt", "response"), ("text",))
        content = list(next((parts for parts in usual if set(parts) <= set(present)), ()))
    if content not in (["text"], ["prompt", "response"], ["messages"]):
        raise DataError(
            "name a text-column, a prompt-column with a response-column, or a messages-column "
            f"(named or found now: {', '.join(content) or 'none'}); {exist}"
        )
    chosen = {part: named[part] or part for part in content}
    for part in ("label", "group", "split"):
        if named[part] or part in present:
            chosen[part] = named[part] or part
    return Columns(**chosen)


def row_to_sample(row: Mapping[str, Any], columns: Columns, where: str) -> Sample:
    """Make a sample of a row; an empty cell gives an empty text or no label.

    Raises
    ------
    DataError
        Naming ``where`` ("file, line 7"), the column, and what it holds instead.
    """
    try:
        label = label_text(row.get(columns.label)) if columns.label else None
        if columns.messages:
            return Sample(messages=_messages(_cell(row, columns.messages)), label=label)
        if columns.prompt and columns.response:
            prompt, response = _text(row, columns.prompt), _text(row, columns.response)
            return Sample(prompt=prompt, response=response, label=label)
        return Sample(text=_text(row, columns.text or "text"), label=label)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def label_text(value: object) -> str | None:
    """Return a label as a string (1 and 1.0 are "1", True is "true"); None for an empty cell.

    Raises
    ------
    DataError
        If the value is not a scalar.
    """
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if not isinstance(value, str | int | float):
        raise DataError(f"the label must be a string or a number, not {type(value).__name__}")
    return str(value)


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise DataError(f"column {column!r} is missing; the row has: {', '.join(row) or '(nothing)'}")
    return row[column]


def _text(row: Mapping[str, Any], column: str) -> str:
    value = _cell(row, column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"column {column!r} must hold a string, not {type(value).__name__}")
    return value


def _messages(value: object) -> tuple[tuple[str, str], ...]:
    """Read ``[{"role": ..., "content": ...}, ...]``, given as a list or as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise DataError(f"the messages are not JSON: {error}") from None
    messages: list[tuple[str, str]] = []
    for number, item in enumerate(_as_list(value)):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f'message {number} must be an object with the strings "role" and "content"')
        messages.append((role, content))
    return tuple(messages)


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise DataError(f"the messages must be a list, not {type(value).__name__}")
    return list(value)
