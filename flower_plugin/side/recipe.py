"""The training recipe as pure values: settings, learning rate, held-out samples and the order of an epoch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from flower_plugin.errors import ConfigError


class SampleKey(NamedTuple):
    """Name of a cached sample: whose it is, and its content hash (16 bytes)."""

    tenant: str
    digest: bytes


@dataclass(frozen=True)
class TrainConfig:
    """How a side network is trained.

    The defaults are for a classifier with one cached vector a sample and tap: some thousand samples are soon
    known by heart, so the rate is low and samples are mixed. A causal LM, which adds a small change to a head
    that knows its work, wants more and larger steps: 3e-3 with batches of 16 did best on chats.

    Parameters
    ----------
    epochs : int
        Passes over the cache that the learning-rate schedule is laid out for.
    batch_size : int
        Samples a step; an epoch is cut into even batches of at most this size.
    learning_rate, weight_decay, clip_norm : float
        Of AdamW (weight decay on matrices only) and of gradient clipping.
    schedule : "cosine" or "constant"
        After `warmup`, a fraction of all steps with linearly growing rate.
    holdout : float
        Fraction of the training samples that choose the best epoch; 0 for none.
    patience : int or None
        Epochs without a better held-out loss after which `Trainer.exhausted` turns true; None for never.
    mixup : float
        Classification only: parameter of Beta(mixup, mixup), from which the shares of two mixed samples are
        drawn; 0 for no mixing.
    label_smoothing : float
        Of the cross entropy, classification only.
    average : float
        Decay a step of the moving average of the weights that is evaluated and kept; 0 for the last weights.
    head_chunk : int
        Tokens whose logits exist at once (causal LM): bounds memory to `head_chunk` x vocabulary.
    seed : int
        Fixes order, dropout and held-out samples.
    """

    epochs: int = 40
    batch_size: int = 64
    learning_rate: float = 2e-4
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.05
    holdout: float = 0.1
    patience: int | None = None
    mixup: float = 3.0
    label_smoothing: float = 0.0
    average: float = 0.0
    head_chunk: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "epochs": self.epochs >= 1,
            "batch_size": self.batch_size >= 1,
            "learning_rate": 0 < self.learning_rate < math.inf,
            "weight_decay": 0 <= self.weight_decay < math.inf,
            "clip_norm": self.clip_norm > 0,
            "schedule": self.schedule in ("cosine", "constant"),
            "warmup": 0 <= self.warmup < 1,
            "holdout": 0 <= self.holdout < 1,
            "patience": self.patience is None or self.patience >= 1,
            "mixup": 0 <= self.mixup < math.inf,
            "label_smoothing": 0 <= self.label_smoothing < 1,
            "average": 0 <= self.average < 1,
            "head_chunk": self.head_chunk >= 1,
            "seed": 0 <= self.seed < 2**63,
        }
        for name, fits in checks.items():
            if not fits:
                raise ConfigError(f"Training: {name} = {getattr(self, name)!r} is not allowed.")


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from any parts: equal parts give equal seeds on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def is_held_out(key: SampleKey, fraction: float, seed: int) -> bool:
    """Decide whether a sample is held out, by its hash alone: later arrivals never change the answer."""
    digest = blake2b(key.digest, key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def group_by_tenant(keys: Sequence[SampleKey]) -> dict[str, list[SampleKey]]:
    """Group keys by tenant, in their order."""
    grouped: dict[str, list[SampleKey]] = {}
    for key in keys:
        grouped.setdefault(key.tenant, []).append(key)
    return grouped


def name_samples(keys: Sequence[SampleKey], found: int) -> str:
    """Return a name, 32 hex digits, for the content and the order of samples of which so many were found."""
    state = blake2b(found.to_bytes(8, "little"), digest_size=16)
    for key in keys:
        state.update(key.digest)
    return state.hexdigest()


def split_held_out(
    keys_by_tenant: Mapping[str, Sequence[SampleKey]], fraction: float, seed: int
) -> tuple[dict[str, list[SampleKey]], list[SampleKey]]:
    """Split samples in those that train, by tenant, and those that are held out."""
    train: dict[str, list[SampleKey]] = {}
    held: list[SampleKey] = []
    for tenant, keys in keys_by_tenant.items():
        flags = [is_held_out(key, fraction, seed) for key in keys]
        train[tenant] = [key for key, out in zip(keys, flags, strict=True) if not out]
        held += [key for key, out in zip(keys, flags, strict=True) if out]
    return train, held


def interleave(counts: Sequence[int], priority: Sequence[int]) -> list[int]:
    """Return an order of owners in which every prefix holds each owner's share within one.

    Earliest deadline first over the windows of proportional-fair scheduling (Baruah et al. 1996): the k-th
    item of an owner with n of N items has its place in slots [floor(k N/n), ceil((k+1) N/n)).

    Parameters
    ----------
    counts : sequence of int
        Items of each owner; N is their sum.
    priority : sequence of int
        Rank of each owner among equal deadlines.

    Returns
    -------
    list of int
        N owner indices; owner i occurs counts[i] times.
    """
    total = sum(counts)
    waiting = [(0, priority[i], i, 0) for i, count in enumerate(counts) if count]
    heapify(waiting)
    ready: list[tuple[int, int, int, int]] = []
    order: list[int] = []
    for slot in range(total):
        while waiting and waiting[0][0] <= slot:
            _, rank, owner, item = heappop(waiting)
            heappush(ready, (-(-(item + 1) * total // counts[owner]), rank, owner, item))
        _, rank, owner, item = heappop(ready)
        order.append(owner)
        if item + 1 < counts[owner]:
            heappush(waiting, ((item + 1) * total // counts[owner], rank, owner, item + 1))
    return order


def epoch_order(keys_by_tenant: Mapping[str, Sequence[SampleKey]], seed: int, epoch: int) -> list[SampleKey]:
    """Return each sample once, shuffled, with every tenant's proportional share in every batch.

    Tenants are taken in the order of the mapping, whose names may differ from run to run; the keys of each by
    their content. So the result does not depend on the order in which keys arrived.
    """
    tenants = [tenant for tenant, keys in keys_by_tenant.items() if keys]
    random = np.random.default_rng(derive_seed("order", seed, epoch))
    ranks = [int(rank) for rank in random.permutation(len(tenants))]
    queues = []
    for tenant in tenants:
        keys = sorted(keys_by_tenant[tenant], key=lambda key: key.digest)
        queues.append(iter([keys[i] for i in random.permutation(len(keys))]))
    owners = interleave([len(keys_by_tenant[tenant]) for tenant in tenants], ranks)
    return [next(queues[owner]) for owner in owners]


def even_batches(keys: Sequence[SampleKey], batch_size: int) -> list[Sequence[SampleKey]]:
    """Cut keys in ceil(n / batch_size) runs of sizes that differ by one at most: no tiny rest."""
    count = -(-len(keys) // batch_size)
    edges = [len(keys) * i // count for i in range(count + 1)] if count else [0]
    return [keys[low:high] for low, high in pairwise(edges)]


def learning_rate_at(config: TrainConfig, progress: float) -> float:
    """Return the learning rate at a progress from 0 (start) to 1 (end of the last epoch)."""
    if progress < config.warmup:
        return config.learning_rate * progress / config.warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (progress - config.warmup) / (1 - config.warmup))
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
