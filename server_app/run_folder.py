"""The folder of one run: what a run writes, and where a stopped run is found again."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from flower_plugin.config import RunConfig, expand
from flower_plugin.errors import CacheError, ConfigError

METRICS = "metrics.jsonl"
CONFIG = "run_config.json"
SUMMARY = "summary.json"
LOCK = "lock"

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
    lock : FileLock
        Held while the run lives: a folder is of one run at a time.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one event with the current time (seconds since 1970)."""
        line = json.dumps({**fields, "event": event, "time": round(time.time(), 3)})
        try:
            with (self.path / METRICS).open("a+b") as file:
                # A kill may have cut the last line short: do not let it spoil this one.
                broken = file.tell() and _last_byte(file) != b"\n"
                file.write((b"\n" if broken else b"") + line.encode() + b"\n")
        except OSError as error:
            raise CacheError(f"{self.path / METRICS} cannot be written: {error}; free disk space and resume") from error

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first; a last line that a kill cut short is left out."""
        events: list[dict[str, Any]] = []
        if not (self.path / METRICS).exists():
            return events
        for line in (self.path / METRICS).read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return events

    def release(self) -> None:
        """Give the folder free for a run that resumes this one."""
        self._lock.release()

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that failed before anything happened, so that nobody resumes it."""
        names = {path.name for path in self.path.iterdir()}
        if names <= {CONFIG, LOCK}:
            for name in names:
                (self.path / name).unlink()
            self.path.rmdir()

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
        return RunFolder(path, _locked(path))
    except OSError as error:
        raise ConfigError(f"'output-dir' = {config.output_dir!r} cannot be written: {error}") from error


def _stopped_run(parent: Path, config: RunConfig) -> RunFolder:
    stopped = sorted(path.parent for path in parent.glob(f"*/{CONFIG}") if not (path.parent / SUMMARY).exists())
    refused = []
    for path in reversed(stopped):
        changed = _changes(path, config)
        if changed:
            refused.append(f"{path.name} had another config ({changed})")
            continue
        try:
            return RunFolder(path, _locked(path))
        except Timeout:
            refused.append(f"{path.name} is still running")
    found = f": {'; '.join(refused)}" if refused else "; check 'output-dir'"
    raise ConfigError(f"'resume' is set, but {parent} holds no unfinished run that can go on{found}")


def _changes(path: Path, config: RunConfig) -> str:
    """What differs from the config of a stopped run, beside what may change; empty: nothing."""
    try:
        before = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        before.keys()
    except (json.JSONDecodeError, AttributeError) as error:
        return f"{CONFIG} is damaged: {error}"
    now = config.model_dump(mode="json")
    changed = [key for key in now if key not in MAY_CHANGE and before.get(key) != now[key]]
    return ", ".join(f"{key.replace('_', '-')}: {before.get(key)!r} -> {now[key]!r}" for key in changed)


def _locked(path: Path) -> FileLock:
    """The folder's lock, taken; the system gives it back however the process ends."""
    lock = FileLock(path / LOCK, timeout=0)
    lock.acquire()
    return lock
