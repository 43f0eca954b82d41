"""Transactions on the tables of the activation cache: a quota, eviction, and errors that name the folder."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import lmdb

from ..errors import CacheError
from .cache_index import Tables, Writer, open_tables, stored_size

MIN_QUOTA_BYTES = 1 << 20
_ATTEMPTS = 6


class Store:
    """An open environment, its lock and its quota.

    Transactions run under the lock, since LMDB's memory map must not be moved while another thread reads it.

    Attributes
    ----------
    tables : Tables
        The handles.
    lock : RLock
        Held by each transaction.
    touched : dict of bytes
        Keys read since the last write, the latest last; the next write stores their order.
    capacity_bytes : int
        Space for samples.
    evictions : int
        Samples that made room for others.
    """

    def __init__(self, tables: Tables, path: Path, quota_bytes: int) -> None:
        self.tables = tables
        self.lock = threading.RLock()
        self.touched: dict[bytes, None] = {}
        self.evictions = 0
        # LMDB never changes a page in place: a transaction needs room for copies of what it touches.
        reserve = quota_bytes // 8
        self.capacity_bytes = quota_bytes - reserve
        self._chunk = max(64, min(4096, reserve // 8192))
        self._path = path

    @classmethod
    def open(cls, path: Path, quota_bytes: int) -> Self:
        """Open or create the store in a folder; the file never grows beyond the quota.

        Raises
        ------
        CacheError
            The quota is too small, or the folder cannot be opened or is of another version.
        """
        if quota_bytes < MIN_QUOTA_BYTES:
            raise CacheError(f"a quota of {quota_bytes} bytes is too small; give {MIN_QUOTA_BYTES} or more")
        try:
            return cls(open_tables(path, quota_bytes // 4096 * 4096), path, quota_bytes)
        except (lmdb.Error, OSError) as error:
            raise CacheError(
                f"the cache {path} cannot be opened: {error}; close it elsewhere in this process, "
                "check the disk, or delete the folder"
            ) from error

    @contextmanager
    def named(self, action: str) -> Iterator[None]:
        """Hold the lock and turn LMDB's errors into ours."""
        try:
            with self.lock:
                yield
        except lmdb.Error as error:
            raise CacheError(
                f"the cache {self._path} could not {action}: {error}; what was stored before is still there. "
                "Free disk space or raise the quota, and try again"
            ) from error

    def reading(self) -> "lmdb.Transaction[memoryview]":
        """A read transaction; what it gives is LMDB's memory and ends with it. Only inside :meth:`named`."""
        try:
            return self.tables.env.begin(buffers=True)
        except lmdb.MapResizedError:
            self.tables.env.set_mapsize(0)  # Another process has a larger quota.
            return self.tables.env.begin(buffers=True)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """A write transaction, durable once it ends without an error. Only inside :meth:`named`."""
        with self._begin_write() as txn:
            writer = Writer(self.tables, txn)
            writer.touch(self.touched)
            yield writer
            writer.finish()
        self.touched.clear()

    def insert(self, records: Sequence[tuple[bytes, bytes]], namespace: bytes, description: bytes) -> int:
        """Store records of a namespace in one transaction, others make room; how many keys are new.

        Raises
        ------
        CacheError
            They do not fit.
        """
        need = sum(stored_size(len(record)) for _, record in records)
        if need > self.capacity_bytes:
            raise CacheError(
                f"a shipment needs {need} bytes of the cache {self._path}; it holds {self.capacity_bytes}; "
                "raise the quota, or lower the byte budget of a message"
            )
        for attempt in range(_ATTEMPTS):
            self._make_room(need, need * attempt)
            try:
                with self.writing() as writer:
                    writer.describe(namespace, description)
                    return sum([writer.insert(key, record) for key, record in records])
            except lmdb.MapFullError:
                # Pages in use by a reader, or free ones too scattered for a large record: free some more.
                self.tables.env.reader_check()
        raise CacheError(f"the cache {self._path} is full and cannot make room for {need} bytes; raise its quota")

    def remove(self, pick: Callable[[Writer, int], list[bytes]]) -> int:
        """Remove what ``pick`` names, in transactions of few samples, until it names none; how many."""
        removed, chunk = 0, self._chunk
        while True:
            try:
                with self.writing() as writer:
                    keys = pick(writer, chunk)
                    for key in keys:
                        writer.remove(key)
            except lmdb.MapFullError:
                if chunk == 1 and not self.touched:
                    raise
                if chunk == 1:
                    self.touched.clear()  # Hints, and they need room as well.
                chunk = max(1, chunk // 4)
                continue
            removed += len(keys)
            if not keys:
                return removed

    def _make_room(self, need: int, extra: int) -> None:
        with self.reading() as txn:
            used = self.tables.used_bytes(txn)
        if used + need <= self.capacity_bytes and not extra:
            return
        # A little more than needed, so that a full cache does not evict at each shipment.
        target = max(0, self.capacity_bytes - need - extra - self.capacity_bytes // 32)

        def oldest(writer: Writer, limit: int) -> list[bytes]:
            return writer.oldest(limit, self.tables.used_bytes(writer.txn) - target)

        self.evictions += self.remove(oldest)

    def _begin_write(self) -> "lmdb.Transaction[bytes]":
        try:
            return self.tables.env.begin(write=True)
        except lmdb.MapResizedError:
            self.tables.env.set_mapsize(0)
            return self.tables.env.begin(write=True)
