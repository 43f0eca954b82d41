"""The activation cache: exact answers, least recently used out first, nothing acknowledged is lost."""

import ctypes
import dataclasses
import gc
import itertools
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flower_plugin.errors import CacheError, PayloadError
from flower_plugin.side.cache import AbsentSamplesError, ActivationCache, Namespace
from flower_plugin.side.codec import get_codec
from flower_plugin.side.shipment import Shipment

MIB = 1 << 20
TAPS, WIDTH = 2, 60
ROW = TAPS * get_codec("int8").row_bytes(WIDTH)
NAMESPACE = Namespace("phone-1", "f00d", "template", 128, (0, 3), "mean", "int8")
OTHER = dataclasses.replace(NAMESPACE, tenant="phone-2")
PROCESSES = multiprocessing.get_context("fork")


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def shipment(numbers: Sequence[int], tokens: Callable[[int], int] = lambda number: 1) -> Shipment:
    """Samples whose content follows from their number."""
    counts = [tokens(number) for number in numbers]
    states = [
        np.random.default_rng(number).standard_normal((n * TAPS, WIDTH))
        for number, n in zip(numbers, counts, strict=True)
    ]
    encoded = get_codec("int8").encode(torch.from_numpy(np.concatenate([*states, np.zeros((0, WIDTH))])))
    return Shipment(
        codec="int8",
        taps=TAPS,
        width=WIDTH,
        digests=tuple(digest(number) for number in numbers),
        tokens=np.array(counts, np.int32),
        targets=np.repeat(np.array(numbers, np.int32), counts),
        rows=encoded.numpy().reshape(sum(counts), ROW),
    )


def assert_holds(cache: ActivationCache, sent: Shipment, namespace: Namespace = NAMESPACE) -> None:
    got = cache.get(namespace, sent.digests)
    for name in ("rows", "targets", "tokens"):
        assert np.array_equal(getattr(got, name), getattr(sent, name)), name


def damage(path: Path, sent: Shipment, sample: int) -> None:
    """Flip a bit of a one-token sample in the file."""
    data, row = (path / "data.mdb").read_bytes(), sent.rows[sample].tobytes()
    at = data.index(row)
    assert data.count(row) == 1
    with (path / "data.mdb").open("r+b") as file:
        file.seek(at + 20)
        file.write(bytes([row[20] ^ 4]))


def start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    mine, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, mine


# ---------------------------------------------------------------- answers


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(1, 80), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_batches_come_back_in_any_order(counts: list[int], seed: int) -> None:
    sent = shipment(range(len(counts)), counts.__getitem__)
    with TemporaryDirectory() as folder, ActivationCache.open(folder, 8 * MIB) as cache:
        assert cache.put(NAMESPACE, sent) == len(counts)
        assert_holds(cache, sent)
        order = random.Random(seed).choices(range(len(counts)), k=9)
        got = cache.get(NAMESPACE, [digest(number) for number in order])
        states, targets, tokens = got.tensors("int8", TAPS, WIDTH)
        assert tokens.tolist() == [counts[number] for number in order]
        parts = dict(enumerate(sent.decode().split(counts)))
        assert torch.equal(states, torch.cat([parts[number] for number in order]))
        assert targets.dtype == torch.int64
        assert targets.tolist() == [number for number in order for _ in range(counts[number])]


def test_namespaces_are_apart_and_one_read_crosses_them(tmp_path: Path) -> None:
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        cache.put(NAMESPACE, shipment([1, 2]))
        cache.put(OTHER, shipment([2, 3]))
        assert cache.known(NAMESPACE) == {digest(1), digest(2)}
        assert cache.missing(OTHER, [digest(n) for n in (3, 1, 2, 0)]) == [digest(1), digest(0)]
        keys = [OTHER.key(digest(3)), NAMESPACE.key(digest(1)), OTHER.key(digest(2))]
        assert cache.fetch(keys).targets.tolist() == [3, 1, 2]
        for field, value in (("fingerprint", "x"), ("template", "x"), ("max_length", 64), ("taps", (1, 3)),
                             ("token_rule", "cls"), ("codec", "fp32")):  # fmt: skip
            assert cache.known(dataclasses.replace(NAMESPACE, **{field: value})) == set()  # type: ignore[arg-type]


def test_storing_again_replaces_and_counts_once(tmp_path: Path) -> None:
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        assert cache.put(NAMESPACE, shipment([1, 2])) == 2
        longer = shipment([2, 3], lambda number: 5)
        assert cache.put(NAMESPACE, longer) == 1
        assert_holds(cache, longer)
        statistics = cache.statistics()
        assert (statistics.samples, statistics.bytes) == (3, 3 * 16 + 11 * (4 + ROW))
        assert cache.verify().consistent


def test_what_was_stored_survives_a_reopen(tmp_path: Path) -> None:
    sent = shipment(range(50))
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        cache.put(NAMESPACE, sent)
    with ActivationCache.open(str(tmp_path), 4 * MIB) as cache:
        assert_holds(cache, sent)
        assert cache.put(NAMESPACE, shipment([])) == 0


def test_shipments_of_another_kind_are_refused(tmp_path: Path) -> None:
    sent = shipment([1])
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        for namespace in (
            dataclasses.replace(NAMESPACE, codec="fp16"),
            dataclasses.replace(NAMESPACE, taps=(1,)),
        ):
            with pytest.raises(CacheError, match="is not of"):
                cache.put(namespace, sent)
        with pytest.raises(CacheError, match="is not of"):
            cache.put(NAMESPACE, dataclasses.replace(sent, namespace=OTHER.id))
        cache.put(NAMESPACE, dataclasses.replace(sent, namespace=NAMESPACE.id))
        with pytest.raises(PayloadError):
            cache.get(NAMESPACE, sent.digests).tensors("int8", TAPS, WIDTH + 1)


def test_rows_of_unlike_samples_do_not_mix(tmp_path: Path) -> None:
    wide = Shipment("fp32", 2, 9, (digest(7),), np.ones(1, np.int32), np.ones(1, np.int32), np.zeros((1, 72), np.uint8))
    fp32 = dataclasses.replace(NAMESPACE, codec="fp32")
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        cache.put(NAMESPACE, shipment([1]))
        cache.put(fp32, wide)
        with pytest.raises(CacheError, match="different taps"):
            cache.fetch([NAMESPACE.key(digest(1)), fp32.key(digest(7))])


# ---------------------------------------------------------------- damage


def test_a_damaged_record_is_named_dropped_and_asked_for_again(tmp_path: Path) -> None:
    sent = shipment(range(20))
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        cache.put(NAMESPACE, sent)
        damage(tmp_path, sent, 13)
        with pytest.raises(AbsentSamplesError, match=digest(13).hex()) as caught:
            cache.get(NAMESPACE, [*sent.digests, digest(99)])
        assert caught.value.damaged == (NAMESPACE.key(digest(13)),)
        assert caught.value.missing == (NAMESPACE.key(digest(99)),)
        assert cache.missing(NAMESPACE, sent.digests) == [digest(13)]
        assert cache.put(NAMESPACE, shipment([13])) == 1
        assert_holds(cache, sent)


def test_verify_finds_and_drops_what_is_damaged(tmp_path: Path) -> None:
    sent = shipment(range(3000))
    with ActivationCache.open(tmp_path, 16 * MIB) as cache:
        cache.put(NAMESPACE, sent)
        assert cache.verify().dropped == ()
        for sample in (0, 1500, 2999):
            damage(tmp_path, sent, sample)
        found = cache.verify()
        assert (found.samples, found.consistent) == (2997, True)
        assert {key[16:] for key in found.dropped} == {digest(0), digest(1500), digest(2999)}
        assert cache.verify().samples == 2997


def test_a_record_under_another_name_is_found_out(tmp_path: Path) -> None:
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        cache.put(NAMESPACE, shipment([1, 2]))
        tables = cache._store.tables
        with tables.env.begin(write=True) as txn:
            one, two = (txn.get(NAMESPACE.key(digest(number)), db=tables.index) for number in (1, 2))
            txn.put(NAMESPACE.key(digest(1)), two[:8] + one[8:], db=tables.index)
        with pytest.raises(AbsentSamplesError, match="1 damaged"):
            cache.get(NAMESPACE, [digest(1)])


def test_folders_that_are_no_cache_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.mdb").write_bytes(os.urandom(1 << 16))
    for name in ("file", "other"):
        with pytest.raises(CacheError, match="cannot be opened"):
            ActivationCache.open(tmp_path / name, MIB)
    with pytest.raises(CacheError, match="too small"):
        ActivationCache.open(tmp_path / "new", MIB - 1)
    with ActivationCache.open(tmp_path / "new", MIB) as cache:
        with pytest.raises(CacheError, match="cannot be opened"):
            ActivationCache.open(tmp_path / "new", MIB)
        tables = cache._store.tables
        with tables.env.begin(write=True) as txn:
            txn.put(b"version", b"99", db=tables.meta)
    with pytest.raises(CacheError, match="layout"):
        ActivationCache.open(tmp_path / "new", MIB)


# ---------------------------------------------------------------- quota


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "reopen"]),
        st.lists(st.integers(0, 60), max_size=9, unique=True),
    ),
    min_size=5,
    max_size=25,
)


# Without shrinking, which would write to disk for minutes.
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=STEPS)
def test_the_least_recently_used_go_first(steps: list[tuple[str, list[int]]]) -> None:
    """Against a model: what is left is always the most recently used samples."""
    model: list[int] = []  # The most recently used last.
    with TemporaryDirectory() as folder:
        cache = ActivationCache.open(folder, MIB)
        for step, numbers in steps:
            here = [number for number in numbers if number in model] if step == "get" else numbers
            if step == "reopen":
                cache.close()
                cache = ActivationCache.open(folder, MIB)
                continue
            if step == "put":
                cache.put(NAMESPACE, shipment(numbers, lambda number: 200 + number))
            elif here:
                assert_holds(cache, shipment(here, lambda number: 200 + number))
            model = [number for number in model if number not in here] + here
            left = {int.from_bytes(known, "big") for known in cache.known(NAMESPACE)}
            assert left == set(model[len(model) - len(left) :])
            assert step == "get" or set(numbers) <= left
            model = [number for number in model if number in left]
        statistics = cache.statistics()
        assert statistics.samples == len(model)
        assert statistics.used_bytes <= statistics.capacity_bytes
        assert cache.verify().consistent
        cache.close()


def test_records_of_all_sizes_flow_through_a_small_quota(tmp_path: Path) -> None:
    sizes = random.Random(0)
    with ActivationCache.open(tmp_path, 2 * MIB) as cache:
        for first in range(0, 1500, 30):
            numbers = range(first, first + 30)
            sent = shipment(numbers, {number: sizes.choice([1, 1, 3, 20, 90, 300]) for number in numbers}.__getitem__)
            cache.put(NAMESPACE, sent)
            assert_holds(cache, sent)
            used = cache.statistics().used_bytes
            assert used <= cache.capacity_bytes
        assert (tmp_path / "data.mdb").stat().st_size <= 2 * MIB
        assert used > cache.capacity_bytes // 2
        assert cache.statistics().evictions > 500
        assert cache.verify().consistent


def test_a_shipment_larger_than_the_quota_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    sent = shipment(range(20))
    with ActivationCache.open(tmp_path, MIB) as cache:
        cache.put(NAMESPACE, sent)
        with pytest.raises(CacheError, match="raise the quota"):
            cache.put(NAMESPACE, shipment(range(100, 110), lambda number: 1000))
        assert_holds(cache, sent)
        assert cache.statistics().evictions == 0


def test_reads_alone_never_write(tmp_path: Path) -> None:
    sent = shipment(range(20))
    with ActivationCache.open(tmp_path, MIB) as cache:
        cache.put(NAMESPACE, sent)
        before = cache._store.tables.env.info()["last_txnid"]
        for _ in range(50):
            cache.get(NAMESPACE, sent.digests)
        cache.missing(NAMESPACE, sent.digests)
        assert cache._store.tables.env.info()["last_txnid"] == before
        cache.flush()
        assert cache._store.tables.env.info()["last_txnid"] == before + 1


def test_statistics_by_tenant_and_forget(tmp_path: Path) -> None:
    with ActivationCache.open(tmp_path, 4 * MIB) as cache:
        for namespace in (NAMESPACE, dataclasses.replace(NAMESPACE, max_length=64), OTHER):
            cache.put(namespace, shipment(range(100)))
        cache.get(NAMESPACE, [digest(1), digest(2)])
        with pytest.raises(AbsentSamplesError):
            cache.get(OTHER, [digest(1), digest(1000)])
        tenants = cache.statistics().tenants
        first, second = tenants["phone-1"], tenants["phone-2"]
        assert (first.samples, first.hits, first.misses) == (200, 2, 0)
        assert (second.samples, second.hits, second.misses) == (100, 1, 1)
        assert cache.forget("phone-1") == 200
        assert cache.forget("phone-1") == cache.forget("nobody") == 0
        assert cache.known(NAMESPACE) == set()
        assert_holds(cache, shipment(range(100)), OTHER)
        assert list(cache.statistics().tenants) == ["phone-2"]
        assert cache.verify().consistent
        cache.put(NAMESPACE, shipment(range(10)))
        assert cache.statistics().tenants["phone-1"].samples == 10


def test_a_full_cache_can_forget(tmp_path: Path) -> None:
    with ActivationCache.open(tmp_path, MIB) as cache:
        for first in range(0, 5000, 500):
            cache.put(NAMESPACE, shipment(range(first, first + 500)))
        assert cache.statistics().evictions > 0
        assert cache.forget("phone-1") == 5000 - cache.statistics().evictions
        assert cache.statistics().samples == 0


# ---------------------------------------------------------------- crashes, full disks, other processes


def _write_for_ever(pipe: Connection, path: Path, quota: int, first: int) -> None:
    with ActivationCache.open(path, quota) as cache:
        for number in itertools.count(first, 10):
            cache.put(NAMESPACE, shipment(range(number, number + 10), lambda number: 1 + number % 40))
            pipe.send(number)


@pytest.mark.parametrize("quota", [256 * MIB, MIB])
def test_kill_minus_nine_loses_no_acknowledged_sample(tmp_path: Path, quota: int) -> None:
    acknowledged: list[int] = []
    for attempt in range(8):
        process, pipe = start(_write_for_ever, tmp_path, quota, (attempt + 1) * 100_000)
        acknowledged.append(pipe.recv())  # It works; then it is killed anywhere.
        time.sleep(random.Random(attempt).uniform(0, 0.15))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while pipe.poll():
            try:
                acknowledged.append(pipe.recv())
            except EOFError:
                break
        with ActivationCache.open(tmp_path, quota) as cache:
            found = cache.verify()
            assert (found.dropped, found.consistent) == ((), True)
            # The last one at least, where the quota lets older ones go (the writer may have been one ahead).
            must = acknowledged if quota > MIB else acknowledged[-1:]
            for number in must:
                assert_holds(cache, shipment(range(number, number + 10), lambda number: 1 + number % 40))


def _fill_the_disk(pipe: Connection, path: Path) -> None:
    with ActivationCache.open(path, 64 * MIB) as cache:
        cache.put(NAMESPACE, shipment(range(100)))
        size = (path / "data.mdb").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, resource.RLIM_INFINITY))
        try:
            cache.put(NAMESPACE, shipment(range(1000, 3000)))
            pipe.send("no error")
        except CacheError as error:
            pipe.send(str(error))
        assert_holds(cache, shipment(range(100)))
        assert cache.missing(NAMESPACE, [digest(1000)]) == [digest(1000)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        cache.put(NAMESPACE, shipment(range(1000, 3000)))
        assert cache.verify().consistent
        pipe.send("recovered")


def test_a_full_disk_is_an_error_and_the_store_goes_on(tmp_path: Path) -> None:
    process, pipe = start(_fill_the_disk, tmp_path)
    assert "could not store a shipment" in pipe.recv()
    assert pipe.recv() == "recovered"
    process.join()
    assert process.exitcode == 0
    with ActivationCache.open(tmp_path, 64 * MIB) as cache:
        assert_holds(cache, shipment(range(1000, 3000)))


def _write_some(pipe: Connection, path: Path, quota: int, numbers: range, tokens: int) -> None:
    pipe.recv()
    with ActivationCache.open(path, quota) as cache:
        for first in numbers:
            cache.put(NAMESPACE, shipment(range(first, first + 10), lambda number: tokens))
            cache.get(NAMESPACE, [digest(first)])
    pipe.send("done")


def test_two_processes_write_and_read_at_once(tmp_path: Path) -> None:
    others = [start(_write_some, tmp_path, 32 * MIB, range(first, 600, 20), 1) for first in (0, 10)]
    with ActivationCache.open(tmp_path, 32 * MIB) as cache:
        for _, pipe in others:
            pipe.send("go")
        while any(process.is_alive() for process, _ in others):
            known = sorted(cache.known(NAMESPACE))[:32]
            assert len(cache.get(NAMESPACE, known).tokens) == len(known)
            cache.put(OTHER, shipment(range(5)))
        assert [pipe.recv() for _, pipe in others] == ["done", "done"]
        assert_holds(cache, shipment(range(600)))
        assert cache.verify().consistent


def test_another_process_may_have_a_larger_quota(tmp_path: Path) -> None:
    process, pipe = start(_write_some, tmp_path, 64 * MIB, range(1000, 2000, 10), 30)
    with ActivationCache.open(tmp_path, MIB) as cache:
        cache.put(NAMESPACE, shipment(range(10)))
        pipe.send("go")
        assert pipe.recv() == "done"
        process.join()
        assert cache.statistics().used_bytes > MIB
        assert_holds(cache, shipment(range(10)))
        assert_holds(cache, shipment(range(1990, 2000), lambda number: 30))
        cache.put(NAMESPACE, shipment(range(50_000, 50_010)))  # Now the smaller quota holds.
        assert cache.statistics().used_bytes <= cache.capacity_bytes
        assert cache.verify().consistent


def test_threads_share_a_cache(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    with ActivationCache.open(tmp_path, 32 * MIB) as cache:
        cache.put(OTHER, shipment(range(100)))
        stop = threading.Event()

        def read() -> None:
            try:
                while not stop.is_set():
                    assert_holds(cache, shipment(range(0, 100, 7)), OTHER)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for first in range(0, 200, 10):
            cache.put(NAMESPACE, shipment(range(first, first + 10)))
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def _own_memory() -> int:
    """Anonymous memory in use, in bytes; what the allocator holds back for later does not count."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _read_much(pipe: Connection, path: Path) -> None:
    with ActivationCache.open(path, 128 * MIB) as cache:
        wide = lambda number: 60  # noqa: E731
        for first in range(0, 4000, 200):
            cache.put(NAMESPACE, shipment(range(first, first + 200), wide))
            if first == 400:
                start = _own_memory()
        known = sorted(cache.known(NAMESPACE))
        for at in range(0, len(known), 32):
            cache.get(NAMESPACE, known[at : at + 32])
        cache.verify()
        pipe.send((_own_memory() - start, cache.statistics().bytes))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_the_cache(tmp_path: Path) -> None:
    process, pipe = start(_read_much, tmp_path)
    grown, stored = pipe.recv()
    process.join()
    assert stored > 25 * MIB
    assert grown < 8 * MIB
