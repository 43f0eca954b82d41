"""The README's table of run-config keys, written from the model itself.

``python -m flower_plugin.config_table README.md`` brings the table in the file up to date.
"""

import sys
from pathlib import Path

from .config import RunConfig, known_keys

BEGIN = "<!-- run-config: begin (make docs) -->"
END = "<!-- run-config: end -->"


def config_table() -> str:
    """The Markdown table of all keys: name, default, meaning."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in zip(known_keys(), RunConfig.model_fields.values(), strict=True):
        default = "required" if field.is_required() else f"`{field.default}`" if field.default != "" else "empty"
        choices = getattr(field.annotation, "__args__", None)
        allowed = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
        rows.append(f"| `{key}` | {default} | {field.description}{allowed} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """``text`` with the table between its two markers renewed.

    Raises
    ------
    ValueError
        A marker is missing.
    """
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError(f"the markers {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n{config_table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
