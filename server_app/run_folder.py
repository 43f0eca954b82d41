"""The folder of one run: what a run writes, and where a stopped run is found again."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from flower_plugin.config import RunConfig, expand
from flower_plugin.errors import ConfigError

METRICS = "metrics.jsonl"
CONFIG = "run_config.json"
SUMMARY = "summary.json"

# A resumed run may change these; everything else must be as it was, or its results would mean nothing.
MAY_CHANGE = frozenset(
    {
        "num_rounds",
        "resume",
        "output_dir",
        "cache_quota_gb",
        "cache_dir",
        "evaluate_every",
        "min_devices",
        "wait_for_devices",
        "query_timeout",
        "shift_timeout",
        "evaluate_timeout",
        "device_batch_size",
        "byte_budget_mb",
        "patience",
    }
)


class RunFolder:
    """One run's folder. Every event becomes a line of ``metrics.jsonl`` at once, so a killed run keeps it.

    Parameters
    ----------
    path : Path
        The folder; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one event with the current time (seconds since 1970)."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        with (self.path / METRICS).open("a+b") as file:
            # A kill may have cut the last line short: do not let it spoil this one.
            broken = file.tell() and _last_byte(file) != b"\n"
            file.write((b"\n" if broken else b"") + line.encode() + b"\n")

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first; a last line that a kill cut short is left out."""
        events = []
        for line in (self.path / METRICS).read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return events

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, which also marks the run as finished."""
        (self.path / SUMMARY).write_text(json.dumps(dict(summary), indent=2) + "\n", encoding="utf-8")


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def open_run_folder(config: RunConfig, run_id: int) -> RunFolder:
    """Make the folder of a new run, or find that of the stopped run which ``resume`` continues.

    Raises
    ------
    ConfigError
        There is nothing to resume, the stopped run had another config, or the folder cannot be written.
    """
    parent = expand(config.output_dir)
    try:
        if config.resume:
            return _stopped_run(parent, config)
        path = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}"
        path.mkdir(parents=True)
        (path / CONFIG).write_text(config.model_dump_json(indent=2), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'output-dir' = {config.output_dir!r} cannot be written: {error}") from error
    return RunFolder(path)


def _stopped_run(parent: Path, config: RunConfig) -> RunFolder:
    runs = sorted(path.parent for path in parent.glob(f"*/{CONFIG}") if not (path.parent / SUMMARY).exists())
    if not runs:
        raise ConfigError(f"'resume' is set, but {parent} holds no unfinished run; check 'output-dir'")
    try:
        before = json.loads((runs[-1] / CONFIG).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{runs[-1] / CONFIG} is damaged: {error}; start a new run") from error
    now = config.model_dump(mode="json")
    changed = [key for key in now if key not in MAY_CHANGE and before.get(key) != now[key]]
    if changed:
        listing = ", ".join(f"{key.replace('_', '-')}: {before.get(key)!r} -> {now[key]!r}" for key in changed)
        raise ConfigError(f"{runs[-1].name} cannot be resumed with another config ({listing})")
    return RunFolder(runs[-1])
