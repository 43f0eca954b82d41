"""Partitions: every index exactly once, nobody empty where avoidable, the same for the same seed."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_plugin.data.partition import dirichlet, iid, largest_remainder, natural, stratified_choice

LABELS = st.lists(st.sampled_from("abcd"), max_size=80)
SEEDS = st.integers(0, 2**32)
DEVICES = st.integers(1, 12)


def check_law(parts, count):
    """Each index once, in sorted arrays."""
    assert sorted(index for part in parts for index in part) == list(range(count))
    assert all((np.diff(part) > 0).all() for part in parts)


@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=20), total=st.integers(0, 10_000))
def test_shares_sum_to_the_total_and_stay_near_their_quota(weights, total):
    shares = largest_remainder(weights, total)
    assert sum(shares) == total
    assert min(shares) >= 0
    if sum(weights) > 0:
        quotas = np.asarray(weights) / sum(weights) * total
        assert (np.abs(quotas - shares) < 1 + 1e-6).all()


@given(count=st.integers(0, 200), devices=DEVICES, seed=SEEDS)
def test_iid(count, devices, seed):
    parts = iid(count, devices, seed)
    check_law(parts, count)
    sizes = [len(part) for part in parts]
    assert len(parts) == devices
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(labels=LABELS, devices=DEVICES, alpha=st.floats(0.001, 1000), seed=SEEDS)
def test_dirichlet(labels, devices, alpha, seed):
    parts = dirichlet(labels, devices, alpha, seed)
    check_law(parts, len(labels))
    assert sum(len(part) > 0 for part in parts) == min(devices, len(labels))
    again = dirichlet(labels, devices, alpha, seed)
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))


def test_a_small_alpha_gives_unlike_devices_and_a_large_one_like_devices():
    labels = ["a", "b"] * 500

    def share_spread(alpha: float) -> float:
        parts = [part for part in dirichlet(labels, 5, alpha, 1) if len(part)]
        return float(np.std([np.mean([labels[i] == "a" for i in part]) for part in parts]))

    assert share_spread(0.05) > 0.25
    assert share_spread(1000) < 0.05


@given(groups=LABELS, devices=DEVICES, seed=SEEDS)
def test_natural_never_splits_a_group(groups, devices, seed):
    parts = natural(groups, devices, seed)
    check_law(parts, len(groups))
    owners = Counter(group for part in parts for group in {groups[i] for i in part})
    assert all(count == 1 for count in owners.values())
    assert sum(len(part) > 0 for part in parts) == min(devices, len(set(groups)))


def test_natural_balances_sizes():
    groups = [group for group in range(100) for _ in range(group % 7 + 1)]
    sizes = [len(part) for part in natural(groups, 4, 3)]
    assert max(sizes) - min(sizes) <= 7


@pytest.mark.parametrize("make", [lambda s: iid(50, 3, s), lambda s: natural(list(range(50)), 3, s)])
def test_another_seed_gives_another_partition(make):
    assert not all(np.array_equal(a, b) for a, b in zip(make(0), make(1), strict=True))


@given(labels=LABELS, seed=SEEDS, data=st.data())
def test_a_stratified_choice_keeps_the_shares(labels, seed, data):
    count = data.draw(st.integers(0, len(labels)))
    chosen = stratified_choice(labels, count, seed)
    assert len(set(chosen.tolist())) == len(chosen) == count
    got, have = Counter(labels[i] for i in chosen), Counter(labels)
    assert all(abs(got[name] - have[name] * count / len(labels)) < 1 for name in have)
