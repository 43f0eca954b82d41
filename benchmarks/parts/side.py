"""Side-tuning by the product's own strategy and ClientApp on an in-process grid, and its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_plugin.clients import app
from flower_plugin.server_app.local_grid import LocalGrid
from flower_plugin.strategies import EcoMobiLLM
from flwr.app import Message

from flower_plugin.messages import ACTIVATIONS

from .settings import Federation


class WireGrid(LocalGrid):
    """A local grid that adds up the bytes of activations in the phones' replies, array headers included."""

    activation_bytes: int = 0

    def _answer(self, message: Message) -> Message | None:
        reply = super()._answer(message)
        if reply is not None and reply.has_error():
            raise RuntimeError(f"a phone failed: {reply.error.reason}")
        if reply is not None and message.metadata.message_type == ACTIVATIONS:
            arrays = reply.content["arrays"]
            self.activation_bytes += sum(len(arrays[name].data) for name in ("payload", "index"))
        return reply


@dataclass
class SideOutcome:
    """What a run of Eco-MobiLLM gave.

    Attributes
    ----------
    report
        The strategy's own summary.
    epochs
        The events of all epochs: ``seconds``, ``read_seconds``, losses. Epoch 1 is stage one.
    wire_bytes
        Bytes of the activations in the phones' replies.
    late_messages
        Messages of training that the phones got after the first epoch.
    """

    report: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    wire_bytes: int = 0
    late_messages: int = 0

    @property
    def cached_epochs(self) -> list[dict[str, Any]]:
        """Epochs of stage two."""
        return [epoch for epoch in self.epochs if epoch["round"] > 1]


def run_side(federation: Federation, folder: Path) -> SideOutcome:
    """Run both stages; caches of phones and server lie in ``folder``, a later run finds its samples there."""
    config = federation.config.model_copy(update={"cache_dir": str(folder / "server")})
    phones = {i + 1: _node_config(i, federation.phones, folder) for i in range(federation.phones)}
    grid = WireGrid(app, phones, config.model_dump(by_alias=True))
    epochs: list[dict[str, Any]] = []

    def listen(event: str, fields: Mapping[str, Any]) -> None:
        if event == "epoch":
            epochs.append({**fields, "messages": _training_messages(grid)})

    strategy = EcoMobiLLM(config, observe=listen)
    strategy.start(grid)
    report = strategy.report()
    if report["faults"] or report["refused_devices"]:
        raise RuntimeError(f"a phone dropped out: {report}")
    late = _training_messages(grid) - epochs[0]["messages"]
    return SideOutcome(report, epochs, grid.activation_bytes, late)


def _node_config(phone: int, phones: int, folder: Path) -> dict[str, Any]:
    return {"partition-id": phone, "num-partitions": phones, "device-dir": str(folder / f"phone-{phone}")}


def _training_messages(grid: LocalGrid) -> int:
    return sum(kind.startswith("train") for kind, _ in grid.log)
