"""Counting what a run costs and what it gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counters of a run, filled from its events.

    Attributes
    ----------
    train_messages : dict
        Round -> messages that asked a device to work.
    device_seconds : dict
        Round -> seconds that all devices together spent on forward passes.
    evaluations : dict
        Round -> mean figures over the devices.
    """

    train_messages: dict[int, int] = field(default_factory=dict)
    device_seconds: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    server_seconds: float = 0.0
    read_seconds: float = 0.0
    bytes_received: int = 0
    samples: int = 0
    sent_tokens: float = 0.0
    forwarded_tokens: float = 0.0
    faults: int = 0
    refused_nodes: set[int] = field(default_factory=set)
    skipped_steps: int = 0

    @property
    def refused_devices(self) -> int:
        """Nodes that took no part."""
        return len(self.refused_nodes)

    @property
    def stage_two_messages(self) -> int:
        """Messages that asked a device to work after round 1."""
        return sum(count for server_round, count in self.train_messages.items() if server_round > 1)

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event."""
        if event == "request":
            self.train_messages[fields["round"]] = self.train_messages.get(fields["round"], 0) + 1
        elif event == "shift":
            self._note_shift(fields)
        elif event == "epoch":
            self.server_seconds += fields["seconds"]
            self.read_seconds += fields["read_seconds"]
            self.skipped_steps += fields["skipped_steps"]
        elif event == "evaluation":
            self.evaluations[fields["round"]] = {k: v for k, v in fields.items() if isinstance(v, float)}
        elif event == "fault":
            self.faults += 1
        elif event == "refused":
            self.refused_nodes.add(fields["node"])

    def _note_shift(self, fields: Mapping[str, Any]) -> None:
        server_round = fields["round"]
        seconds = self.device_seconds.get(server_round, 0.0) + _cost(fields, "device_seconds")
        self.device_seconds[server_round] = seconds
        self.bytes_received += int(fields["bytes"])
        self.samples += int(fields["samples"])
        self.sent_tokens += _cost(fields, "sent_tokens")
        self.forwarded_tokens += _cost(fields, "forwarded_tokens")


def _cost(fields: Mapping[str, Any], name: str) -> float:
    # What a device says of its costs is its own word: keep nonsense out of the sums.
    value = float(fields.get(name, 0.0))
    return value if math.isfinite(value) and value >= 0 else 0.0
