"""Eco-MobiLLM beside federated LoRA and a linear head: the same backbone, texts, phones and seeds.

``python benchmarks/side_tuning.py --json FILE`` prints a table and writes the figures as one JSON object.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path

# Before torch and transformers are imported: nothing is fetched, and tokenizers start no threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from parts.figures import GROUPS
from parts.table import missed, print_table
from rich.console import Console


def main() -> int:
    """Run the chosen groups; the exit status is the number of targets that are missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="groups to run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1 of the accuracies")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    console = Console()
    begin = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - begin:6.0f} s[/]  {text}", highlight=False)

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="side-tuning-") as folder:
        for group in arguments.only:
            figures |= GROUPS[group](Path(folder), arguments.seeds, say)
            if arguments.json is not None:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    figures["benchmark_seconds"] = time.monotonic() - begin
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    print_table(figures, console)
    for key in missed(figures):
        console.print(f"[red]not met: {key}[/]")
    return len(missed(figures))


if __name__ == "__main__":
    raise SystemExit(main())
