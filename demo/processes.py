"""Flower's own programs as child processes: started on free ports, and always ended again."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 10.0
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "120",
}


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class FlowerProcesses:
    """Programs that belong together and share a Flower home; leaving the context ends them all.

    Parameters
    ----------
    home : Path
        Folder for Flower's configuration and for a log file of each program.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        # A termination request must end the programs too: they run in process groups of their own.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._running)):
            self.stop(name)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the programs: this interpreter's tools first, Flower's home here."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**os.environ, **SETTINGS, "PATH": path, "FLWR_HOME": str(self.home)}

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program in a process group of its own, its output in ``NAME.log``."""
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self._running[name] = process
        return process

    def start_superlink(self, port: int, *options: str) -> None:
        """Start a SuperLink on loopback and wait until it listens.

        Raises
        ------
        RuntimeError
            It ended, or did not listen within a minute.
        """
        command = ["flower-superlink", "--host", LOOPBACK, "--port", str(port), *options]
        process = self.start("superlink", [*command, "--disable-runtime-dependency-installation"])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the SuperLink does not listen on port {port}; see {self.home / 'superlink.log'}")

    def run(self, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a program to its end and return its output."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def stop(self, name: str) -> None:
        """End a program with all that it started; what does not end in time is killed."""
        self._end(name, psutil.Process.terminate, STOP_SECONDS)

    def kill(self, name: str) -> None:
        """Kill a program and all that it started, as a power cut would."""
        self._end(name, psutil.Process.kill, STOP_SECONDS)

    def _end(self, name: str, how: Callable[[psutil.Process], None], seconds: float) -> None:
        process = self._running.pop(name)
        # Flower's programs start others in sessions of their own: the process group does not hold them all.
        family = _family(process.pid)
        _apply(how, family)
        _, alive = psutil.wait_procs(family, timeout=seconds)
        _apply(psutil.Process.kill, alive)
        process.wait()

    def add_connection(self, name: str, port: int, *lines: str) -> None:
        """Tell `flwr run` about a SuperLink; ``lines`` are further TOML lines such as ``insecure = true``."""
        text = "\n".join([f"[superlink.{name}]", f'address = "{LOOPBACK}:{port}"', *lines, ""])
        with (self.home / "config.toml").open("a", encoding="utf-8") as file:
            file.write(text)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _apply(how: Callable[[psutil.Process], None], processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            how(process)
