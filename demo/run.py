"""The main job on real input: four simulated phones, BBC News articles, MiniLM as the backbone.

``make demo`` runs it. It starts a SuperLink of its own for Flower's simulation and ends it afterwards.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from processes import FlowerProcesses, free_port

ROOT = Path(__file__).parents[1]
PHONES = 4
NAME = "demo"


def main() -> int:
    """Run the demo; return the exit status of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a run-config value")
    options = parser.parse_args()
    output: Path = options.output.absolute()
    settings = {"output-dir": f'"{output}"', "cache-dir": f'"{output / "cache"}"'}
    settings |= dict(setting.split("=", 1) for setting in options.set)
    with FlowerProcesses(output / "flower") as flower:
        # Simulated phones keep their identity and held-out activations here, not in the user's home.
        os.environ["FLOWER_PLUGIN_HOME"] = str(output / "phones")
        port = free_port()
        flower.start_superlink(port, "--insecure", "--simulation")
        flower.add_connection(NAME, port, "insecure = true")
        status = simulate(flower, settings)
    report(output)
    return status


def simulate(flower: FlowerProcesses, settings: dict[str, str]) -> int:
    """Configure the simulation and run the app in it, its log on this terminal."""
    cpus = os.cpu_count() or 1
    flower.run(
        [
            *("flwr", "federation", "simulation-config", "@none/default", NAME),
            *("--num-supernodes", str(PHONES), "--client-resources-num-cpus", "1"),
            *("--init-args-num-cpus", str(min(PHONES, cpus))),
        ],
        timeout=60,
    )
    command = ["flwr", "run", str(ROOT), NAME, "--stream"]
    command += ["--run-config", " ".join(f"{key}={value}" for key, value in settings.items())]
    return subprocess.run(command, env=flower.environment, check=False).returncode


def report(output: Path) -> None:
    """Say where the results are."""
    for summary in sorted(output.glob("*/summary.json")):
        print(f"\nResults in {summary.parent}:")
        for path in sorted(summary.parent.rglob("*")):
            if path.is_file() and "checkpoint" not in path.parts:
                print(f"  {path.relative_to(summary.parent)}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
