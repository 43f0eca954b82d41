"""What a partition is planned from: the work, the phones, and the links between them."""

from dataclasses import dataclass

from flower_plugin.errors import FlowerPluginError


class InfeasiblePlan(FlowerPluginError):  # noqa: N818
    """No partition fits the phones' memory; the message says what is short and what would fit."""


@dataclass(frozen=True)
class BlockCost:
    """One block: bytes of its weights, of what trains in it, and of one micro-batch kept for its backward pass.

    ``state_bytes`` are trainable parameters, gradients and optimizer moments. ``work`` is relative to a block that
    takes a phone's ``forward_seconds`` and ``backward_seconds``.
    """

    weight_bytes: int
    state_bytes: int = 0
    stash_bytes: int = 0
    work: float = 1.0


@dataclass(frozen=True)
class Job:
    """A model and how it is trained.

    Attributes
    ----------
    blocks
        The costs of the blocks, in order.
    boundary_bytes
        Hidden states of one micro-batch on the wire.
    owner_bytes
        Embedding and head with their state, and the logits of a micro-batch: on every phone that has texts.
    base_bytes
        What every phone needs beside: the runtime, and the largest transient of a block.
    micro_batches, schedule
        Micro-batches a step, and ``"gpipe"`` or ``"1f1b"``.
    """

    blocks: tuple[BlockCost, ...]
    boundary_bytes: int = 0
    owner_bytes: int = 0
    base_bytes: int = 0
    micro_batches: int = 8
    schedule: str = "1f1b"


@dataclass(frozen=True)
class Phone:
    """One phone: its limit, and its seconds for a micro-batch.

    Attributes
    ----------
    memory_bytes
        What it may use.
    forward_seconds, backward_seconds
        Of one block of work 1.
    text_seconds
        Embedding, head and loss with their backward pass, of one micro-batch of its own.
    share
        Share of the micro-batches whose texts it has; 0: it has none.
    """

    name: str
    memory_bytes: int
    forward_seconds: float
    backward_seconds: float
    text_seconds: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class Links:
    """Bytes a second [from][to] between the phones, in the order of the phones. Links are full duplex."""

    bandwidth: tuple[tuple[float, ...], ...]


def uniform_links(num_phones: int, bandwidth: float) -> Links:
    """Return links that are all equally fast, in bytes a second."""
    return Links(((bandwidth,) * num_phones,) * num_phones)


@dataclass(frozen=True)
class StagePlan:
    """Blocks [lo, hi) on a phone (its index), with the seconds of a micro-batch and the phone's peak bytes."""

    phone: int
    lo: int
    hi: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """The stages in order, and the seconds between two micro-batches that the slowest phone or link allows."""

    stages: tuple[StagePlan, ...]
    bottleneck_seconds: float
