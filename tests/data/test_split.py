"""Splits: exact totals, disjoint and stratified held-out samples, limits for each device."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_plugin.data import ClientData, Sample
from flower_plugin.data.options import SplitOptions, read_split_options
from flower_plugin.data.split import plan_totals, split_by_flag, split_for_device
from flower_plugin.errors import ConfigError, DataError

POOL = [Sample(text=f"text {i}", label="ab"[i % 3 == 0]) for i in range(90)]


def devices(count: int, pool=POOL, groups=None, **options) -> list[ClientData]:
    chosen = SplitOptions(**options)
    return [split_for_device(pool, groups, i, count, chosen, ("a", "b")) for i in range(count)]


def everything(parts: list[ClientData]) -> list[Sample]:
    return [sample for part in parts for sample in (*part.train, *part.test)]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 90),
    count=st.integers(1, 9),
    partition=st.sampled_from(["iid", "dirichlet", "natural"]),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_all_samples_are_dealt_once_train_or_test(size, count, partition, fraction, seed):
    groups = [f"movie {i % 11}" for i in range(size)]
    parts = devices(count, POOL[:size], groups, partition=partition, test_fraction=fraction, seed=seed)
    assert sorted(s.text or "" for s in everything(parts)) == sorted(s.text or "" for s in POOL[:size])
    for part in parts:
        if fraction < 0.9 and (part.train or part.test):
            assert part.train


def test_totals_over_all_devices_are_exact():
    for partition in ("iid", "dirichlet", "natural"):
        parts = devices(4, groups=list(range(90)), partition=partition, train_samples=41, test_samples=22)
        assert sum(len(part.train) for part in parts) == 41
        assert sum(len(part.test) for part in parts) == 22
        assert len(set(everything(parts))) == 63


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (80, 20)),
        ({"train_samples": 40}, (40, 10)),
        ({"test_samples": 30}, (70, 30)),
        ({"train_samples": 90}, (90, 10)),
        ({"test_fraction": 0.0}, (100, 0)),
        ({"test_fraction": 1.0}, (0, 100)),
        ({"test_fraction": 1.0, "train_samples": 30}, (30, 0)),
    ],
)
def test_totals_that_are_not_given_follow_the_fraction(options, expected):
    assert plan_totals(100, SplitOptions(**options)) == expected


def test_more_than_there_is_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="ask for 91 samples, but the source has 90"):
        devices(2, train_samples=60, test_samples=31)


def test_held_out_samples_are_stratified():
    for part in devices(3):
        shares = [Counter(s.label for s in side)["b"] / len(side) for side in (part.train, part.test)]
        assert shares[0] == pytest.approx(shares[1], abs=0.1)


def test_limits_for_each_device():
    for part in devices(3, samples_per_device=5, test_samples_per_device=2):
        assert (len(part.train), len(part.test)) == (5, 2)


def test_the_same_seed_gives_the_same_and_another_seed_does_not():
    assert devices(3, seed=4) == devices(3, seed=4) != devices(3, seed=5)


def test_without_a_partition_each_device_has_the_pool_and_a_share_of_the_totals():
    parts = devices(2, partition="none")
    assert set(everything(parts[:1])) == set(everything(parts[1:])) == set(POOL)
    parts = devices(2, partition="none", train_samples=1000, test_samples=10)
    assert [(len(part.train), len(part.test)) for part in parts] == [(72, 5), (72, 5)]


def test_natural_needs_groups():
    with pytest.raises(ConfigError, match="group-column"):
        devices(2, partition="natural")


@pytest.mark.parametrize(("partition_id", "count"), [(-1, 3), (3, 3), (0, 0)])
def test_a_partition_id_out_of_range_is_refused(partition_id, count):
    with pytest.raises(ConfigError, match=f"partition-id = {partition_id}"):
        split_for_device(POOL, None, partition_id, count, SplitOptions(), None)


def test_flags_decide_what_is_held_out():
    flags = [i % 5 == 0 for i in range(90)]
    parts = [split_by_flag(POOL, flags, None, i, 3, SplitOptions(), None) for i in range(3)]
    assert set(everything(parts)) == set(POOL)
    held_out = {sample for sample, flag in zip(POOL, flags, strict=True) if flag}
    assert {sample for part in parts for sample in part.test} == held_out
    with pytest.raises(DataError, match="90 samples but 1"):
        split_by_flag(POOL, [True], None, 0, 1, SplitOptions(), None)


def test_options_are_read_by_their_keys():
    options = {
        "partition": "dirichlet",
        "partition-alpha": 1,
        "partition-seed": 7,
        "test-fraction": 0.5,
        "train-samples": 10,
        "test-samples": "",
        "samples-per-device": 3,
        "unknown": "left alone",
    }
    assert read_split_options(options, "iid") == SplitOptions("dirichlet", 1, 7, 0.5, 10, 0, 3, 0)
    assert read_split_options({"partition": ""}, "none").partition == "none"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "sorted"),
        ("partition", 3),
        ("partition-alpha", 0),
        ("partition-alpha", "much"),
        ("partition-alpha", float("nan")),
        ("partition-seed", -1),
        ("partition-seed", 0.5),
        ("test-fraction", 1.5),
        ("test-fraction", True),
        ("train-samples", -5),
        ("samples-per-device", float("inf")),
    ],
)
def test_a_bad_option_is_named_with_its_value(key, value):
    with pytest.raises(ConfigError, match=f"{key} = {value!r}"):
        read_split_options({key: value}, "iid")


@pytest.mark.parametrize(
    "parts", [{}, {"prompt": "a"}, {"response": "a"}, {"text": "a", "prompt": "b", "response": "c"}]
)
def test_a_sample_has_exactly_one_form(parts):
    with pytest.raises(DataError, match="a sample"):
        Sample(**parts)
