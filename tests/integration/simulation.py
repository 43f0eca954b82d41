"""Flower's simulation in a SuperLink of its own, for tests."""

import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from loopback import CONNECTION, RUN_SECONDS, FlowerProcesses, free_port


def simulate(app: Path, home: Path, devices: int) -> str:
    """Run an app in the simulation and return the log.

    Parameters
    ----------
    app : Path
        Folder of the app.
    home : Path
        Flower's home of this run.
    devices : int
        Number of simulated SuperNodes; two of them work at a time.
    """
    with FlowerProcesses(home) as flower:
        port = free_port()
        flower.start_superlink(port, "--insecure", "--simulation")
        flower.add_connection(CONNECTION, port, "insecure = true")
        configured = flower.run(
            [
                *("flwr", "federation", "simulation-config", "@none/default", CONNECTION),
                *("--num-supernodes", str(devices), "--client-resources-num-cpus", "1"),
                *("--init-args-num-cpus", "2"),
            ],
            timeout=120,
        )
        assert configured.returncode == 0, configured.stdout + configured.stderr
        finished = flower.run(["flwr", "run", str(app), CONNECTION, "--stream"], timeout=RUN_SECONDS)
    return finished.stdout + finished.stderr


def processes_of(home: Path) -> list[psutil.Process]:
    """Programs that still run with this Flower home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(home):
                found.append(process)
        except psutil.Error:  # another user's process, or one that has just ended
            continue
    return found
