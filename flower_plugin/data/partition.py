"""Dealing samples to devices: pure functions from labels or groups to lists of index arrays.

Every function returns ``num_partitions`` sorted int64 arrays in which each index occurs exactly once, and
leaves nobody empty where that can be avoided. They depend on their arguments alone, so every device that
computes them (with the same numpy) comes to the same result.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Share ``total`` in whole numbers proportionally to ``weights`` (Hamilton's method).

    The result sums to ``total``, and each share is within 1 of its exact quota. Equal if all weights are 0.
    """
    quotas = np.asarray(weights, dtype=np.float64)
    quotas = quotas if quotas.sum() > 0 else np.ones_like(quotas)
    quotas = quotas / quotas.sum() * total
    shares = np.floor(quotas).astype(np.int64)
    missing = total - int(shares.sum())
    shares[np.argsort(shares - quotas, kind="stable")[:missing]] += 1
    return [int(share) for share in shares]


def iid(count: int, num_partitions: int, seed: int) -> list[Indices]:
    """Deal ``count`` shuffled samples evenly: sizes differ by one at most."""
    order = np.random.default_rng(seed).permutation(count)
    return [np.sort(part) for part in np.array_split(order, num_partitions)]


def dirichlet(labels: Sequence[Hashable], num_partitions: int, alpha: float, seed: int) -> list[Indices]:
    """Deal each label in proportions drawn from Dirichlet(alpha): a small alpha gives unlike devices.

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution" (2019).
    """
    rng = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(num_partitions)]
    for indices in _by_group(labels).values():
        shares = largest_remainder(rng.dirichlet(np.full(num_partitions, alpha)).tolist(), len(indices))
        pieces = np.split(rng.permutation(indices), np.cumsum(shares)[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.extend(int(index) for index in piece)
    _fill_empty(parts)
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def natural(groups: Sequence[Hashable], num_partitions: int, seed: int) -> list[Indices]:
    """Deal whole groups (a movie, a sender), balanced by size: no group is ever split.

    Largest group first to the smallest partition; ties in seeded order. With fewer groups than partitions
    some partitions are empty.
    """
    found = list(_by_group(groups).values())
    order = np.random.default_rng(seed).permutation(len(found))
    parts: list[list[int]] = [[] for _ in range(num_partitions)]
    for position in sorted(order.tolist(), key=lambda g: -len(found[g])):
        min(parts, key=len).extend(found[position])
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def stratified_choice(labels: Sequence[Hashable], count: int, seed: int | Sequence[int]) -> Indices:
    """Choose ``count`` of the indices so that each label keeps its share (within one sample).

    Returns the chosen indices in seeded random order. ``count`` may not exceed ``len(labels)``.
    """
    rng = np.random.default_rng(seed)
    groups = list(_by_group(labels).values())
    shares = largest_remainder([len(group) for group in groups], count) if groups else []
    chosen = [rng.permutation(group)[:share] for group, share in zip(groups, shares, strict=True)]
    return rng.permutation(np.concatenate(chosen).astype(np.int64)) if chosen else np.zeros(0, dtype=np.int64)


def _by_group(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Indices of each distinct key, keys in the order of their first occurrence."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    return groups


def _fill_empty(parts: list[list[int]]) -> None:
    """Give each empty part one sample of the largest part, as long as that has two."""
    for part in parts:
        largest = max(parts, key=len)
        if not part and len(largest) > 1:
            part.append(largest.pop())
