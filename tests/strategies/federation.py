"""A whole federation in one process, with faults to order."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_plugin.clients import app
from flower_plugin.server_app.local_grid import LocalGrid
from flwr.app import Message
from flwr.serverapp import Grid

from flower_plugin.config import RunConfig, parse_run_config

Fault = Callable[[Message, int], Message | None]


class FaultyGrid(LocalGrid):
    """A LocalGrid on which replies of chosen message types pass through a fault."""

    def __init__(self, *args: Any, fault: Fault | None = None) -> None:
        super().__init__(*args)
        self.fault = fault

    def _answer(self, message: Message) -> Message | None:
        reply = super()._answer(message)
        if self.fault is None or reply is None:
            return reply
        return self.fault(reply, message.metadata.dst_node_id)


def run_config(tmp_path: Path, backbone: Path, **changes: Any) -> RunConfig:
    """A small run on tiny models."""
    values = {
        "backbone": str(backbone),
        "data": "data.jsonl",
        "max-length": 24,
        "taps": "3",
        "num-rounds": 4,
        "device-batch-size": 4,
        "batch-size": 8,
        "cache-dir": str(tmp_path / "cache"),
        "cache-quota-gb": 0.05,
        "output-dir": str(tmp_path / "runs"),
        "wait-for-devices": 0.2,
        "query-timeout": 60,
        "shift-timeout": 60,
        "evaluate-timeout": 60,
    }
    return parse_run_config(values | {key.replace("_", "-"): value for key, value in changes.items()})


def make_grid(
    tmp_path: Path,
    files: Mapping[int, Path],
    config: RunConfig,
    fault: Fault | None = None,
    first_node: int = 100,
) -> Grid:
    """Devices numbered from 0, each with a data file and a folder of its own; node ids start at ``first_node``."""
    nodes = {
        first_node + device: {
            "data-path": str(path),
            "device-dir": str(tmp_path / f"device-{device}"),
            "partition-id": device,
            "num-partitions": len(files),
        }
        for device, path in files.items()
    }
    return FaultyGrid(app, nodes, config.model_dump(by_alias=True), fault=fault)
