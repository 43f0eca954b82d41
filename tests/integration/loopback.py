"""A federation of Flower's own programs on loopback, for tests: three SuperNodes, each with a data file."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "demo"))
from processes import LOOPBACK, FlowerProcesses, free_port  # noqa: E402

DEVICES = 3
CONNECTION = "loopback"
RUN_SECONDS = 400.0
"""Bound of every wait. A run takes a fraction of it, even where the processors are busy with other work."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def wait_until(found: Callable[[], Any], what: str, seconds: float = RUN_SECONDS) -> Any:
    """Return the first true value of ``found()``; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


@dataclass(frozen=True)
class Wiring:
    """Options that say how SuperLink, connection and SuperNodes trust each other."""

    superlink: Sequence[str] = ("--insecure",)
    connection: Sequence[str] = ("insecure = true",)
    device: Callable[[int], Sequence[str]] = lambda device: ("--insecure",)


class Loopback:
    """A SuperLink, and SuperNodes to start; what devices hold can be changed while they run.

    Parameters
    ----------
    flower : FlowerProcesses
        Starts and ends the programs.
    folder : Path
        The devices' files.
    wiring : Wiring
        How they trust each other.
    """

    def __init__(self, flower: FlowerProcesses, folder: Path, wiring: Wiring | None = None) -> None:
        self.flower = flower
        self.folder = folder
        self.wiring = wiring or Wiring()
        self.port = free_port()
        self._runs: dict[str, subprocess.Popen[bytes]] = {}
        flower.start_superlink(self.port, *self.wiring.superlink)
        flower.add_connection(CONNECTION, self.port, *self.wiring.connection)

    def data_file(self, device: int) -> Path:
        """The JSONL file that a device reads its samples from."""
        return self.folder / f"device-{device}.jsonl"

    def start_device(self, device: int) -> None:
        """Start a SuperNode."""
        config = {
            "partition-id": device,
            "num-partitions": DEVICES,
            "data-path": f'"{self.data_file(device)}"',
            "device-dir": f'"{self.folder / f"device-{device}"}"',
        }
        self.flower.start(
            f"device-{device}",
            [
                *("flower-supernode", "--superlink", f"{LOOPBACK}:{self.port}"),
                *self.wiring.device(device),
                *("--port", str(free_port())),
                *("--node-config", " ".join(f"{key}={value}" for key, value in config.items())),
            ],
        )

    def kill_devices(self) -> None:
        """End all SuperNodes without a goodbye, which takes three of them a while."""
        for device in range(DEVICES):
            self.flower.kill(f"device-{device}")

    def start_run(self, name: str, settings: dict[str, str]) -> None:
        """Start ``flwr run`` in the background, under a name for its log."""
        self._runs[name] = self.flower.start(name, run_command(CONNECTION, settings))

    def finish_run(self, name: str) -> str:
        """Wait for a run's log stream to end and return it."""
        wait_until(lambda: self._runs[name].poll() is not None, f"the end of {name}")
        return self.log(name)

    def log(self, name: str) -> str:
        """What a program has written so far."""
        return (self.flower.home / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def server_app(self) -> psutil.Process:
        """The process in which the one running server app lives."""
        ours = psutil.Process().children(recursive=True)
        (found,) = [child for child in ours if not is_dead(child) and "flwr-serverapp" in _command_line(child)]
        return found


def is_dead(process: psutil.Process) -> bool:
    """Whether a process has ended; its parent may not have noticed yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def run_command(connection: str, settings: dict[str, str], app: Path = ROOT) -> Sequence[str]:
    """``flwr run`` with run-config values, which are TOML: strings carry their quotes."""
    values = " ".join(f"{key}={value}" for key, value in settings.items())
    return ["flwr", "run", str(app), connection, "--stream", "--run-config", values]


def small_run(folder: Path, backbone: Path, **changes: str) -> dict[str, str]:
    """Run-config values of a run on tiny models that writes to ``folder``."""
    values = {
        "backbone": f'"{backbone}"',
        "data": '"data.jsonl"',
        "max-length": "24",
        "taps": '"3"',
        "num-rounds": "4",
        "min-devices": str(DEVICES),
        "wait-for-devices": "120.0",
        "cache-dir": f'"{folder / "cache"}"',
        "cache-quota-gb": "0.05",
        "output-dir": f'"{folder / "runs"}"',
    }
    return values | {key.replace("_", "-"): value for key, value in changes.items()}


def events(folder: Path) -> list[dict[str, Any]]:
    """The events that the run in ``folder`` has written so far."""
    lines = [line for path in folder.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # the line that is being written
            continue
    return found


def rounds(found: Iterable[dict[str, Any]]) -> list[int]:
    """The rounds of the epochs among events."""
    return [event["round"] for event in found if event["event"] == "epoch"]


def copy_training_rows(source: Path, target: Path) -> None:
    """Copy a file of reviews without its held-out rows: a device that has none is not asked to evaluate."""
    lines = [line for line in source.read_text().splitlines() if json.loads(line)["split"] == "train"]
    target.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
