"""The reader of cached activations: what is gone is left out and counted, never the end of a run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from flower_plugin.side.cache import ActivationCache, Namespace
from flower_plugin.side.cache_records import Batch
from flower_plugin.side.codec import get_codec
from flower_plugin.side.reader import CacheReader
from flower_plugin.side.recipe import SampleKey
from flower_plugin.side.shipment import make_shipment

NAMESPACE = Namespace("phone-1", "f00d", "template", 128, (0, 3), "mean", "fp32")
WIDTH = 8
KEYS = [SampleKey("phone-1", number.to_bytes(16, "big")) for number in range(6)]
STATES = torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ActivationCache]:
    with ActivationCache.open(tmp_path / "cache", 1 << 24) as opened:
        codec = get_codec("fp32")
        digests = [key.digest for key in KEYS[:4]]
        targets = [np.array([number], np.int32) for number in range(4)]
        rows = [codec.encode(STATES[number]) for number in range(4)]
        opened.put(NAMESPACE, make_shipment(codec, 2, WIDTH, digests, rows, targets))
        yield opened


def reader_of(cache: ActivationCache) -> CacheReader:
    return CacheReader(cache, lambda tenant: NAMESPACE, WIDTH)


def test_samples_come_in_the_order_asked_for(cache: ActivationCache) -> None:
    reader = reader_of(cache)
    states, targets, tokens = reader.read([KEYS[2], KEYS[0]])
    assert torch.equal(states, STATES[[2, 0]])
    assert (targets.tolist(), tokens.tolist(), reader.lost) == ([2, 0], [1, 1], 0)


def test_samples_that_are_gone_are_left_out_and_counted(cache: ActivationCache) -> None:
    reader = reader_of(cache)
    states, targets, tokens = reader.read([KEYS[4], KEYS[3], KEYS[5], KEYS[1]])
    assert torch.equal(states, STATES[[3, 1]])
    assert (targets.tolist(), tokens.tolist(), reader.lost) == ([3, 1], [1, 1], 2)


def test_a_batch_that_is_gone_as_a_whole_is_empty(cache: ActivationCache) -> None:
    reader = reader_of(cache)
    states, targets, tokens = reader.read(KEYS[4:])
    assert states.shape == (0, 2, WIDTH)
    assert (len(targets), len(tokens), reader.lost) == (0, 0, 2)
    assert (states.dtype, targets.dtype, tokens.dtype) == (torch.float32, torch.int64, torch.int64)


def test_others_may_evict_between_two_reads(cache: ActivationCache, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = cache.fetch
    calls = 0

    def evict_then_fetch(keys: Sequence[bytes]) -> Batch:
        nonlocal calls
        calls += 1
        if calls == 2:
            cache.forget(NAMESPACE.tenant)
        return fetch(keys)

    monkeypatch.setattr(cache, "fetch", evict_then_fetch)
    reader = reader_of(cache)
    states, _, _ = reader.read(KEYS[3:])
    assert (len(states), calls, reader.lost) == (0, 2, 3)
