"""The tables of the activation cache in LMDB, and what one transaction does to them.

``index``       key -> record id, stamp of the last use, size of the record
``records``     record id -> record; ids only grow, so that records fill page after page
``order``       stamp -> key: the least recently used sample is the first
``namespaces``  namespace id -> canonical JSON
``totals``      namespace id -> samples, bytes
``meta``        the clock that gives ids and stamps, and the version of this layout
"""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from ..errors import CacheError

_VERSION = b"1"
_STAMP = struct.Struct(">Q")
_ENTRY = struct.Struct(">QQQ")
_TOTALS = struct.Struct("<QQ")
_NAMES = (b"index", b"records", b"order", b"namespaces", b"totals", b"meta")
_INDEX_BYTES = 200
"""Room that a sample's entries take in the tables besides its record, half-filled pages counted."""

ReadTxn = Any
"""An LMDB transaction."""


@dataclass(frozen=True)
class Tables:
    """An open environment and the handles of its tables."""

    env: lmdb.Environment
    index: Any
    records: Any
    order: Any
    namespaces: Any
    totals: Any
    meta: Any

    def used_bytes(self, txn: ReadTxn) -> int:
        """Space that the tables take, in whole pages."""
        stats = [txn.stat(getattr(self, name.decode())) for name in _NAMES]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int(pages * stats[0]["psize"])

    def record(self, txn: ReadTxn, key: bytes) -> memoryview | None:
        """The record of a key, or None; valid while the transaction lasts."""
        entry = txn.get(key, db=self.index)
        return None if entry is None else txn.get(entry[:8], db=self.records)

    def keys(self, txn: ReadTxn, prefix: bytes, after: bytes = b"") -> Iterator[bytes]:
        """Keys that start with ``prefix``, in order, from ``after`` on."""
        cursor = txn.cursor(self.index)
        if not cursor.set_range(max(prefix, after) or b"\0"):
            return
        for key in cursor.iternext(keys=True, values=False):
            key = bytes(key)
            if not key.startswith(prefix):
                return
            yield key

    def tenants(self, txn: ReadTxn) -> dict[bytes, str]:
        """Namespace id -> tenant."""
        rows = txn.cursor(self.namespaces)
        return {bytes(name): str(json.loads(bytes(text))["tenant"]) for name, text in rows}

    def total(self, txn: ReadTxn, namespace: bytes) -> tuple[int, int]:
        """Samples and record bytes of a namespace."""
        value = txn.get(namespace, db=self.totals)
        samples, size = _TOTALS.unpack(value) if value is not None else (0, 0)
        return samples, size

    def entries(self, txn: ReadTxn) -> tuple[int, int, int, int]:
        """Entries of index, records and order, and the sum of the totals: four times the same number."""
        counts = [int(txn.stat(table)["entries"]) for table in (self.index, self.records, self.order)]
        total = sum(_TOTALS.unpack(value)[0] for _, value in txn.cursor(self.totals))
        return counts[0], counts[1], counts[2], total


def open_tables(path: Path, map_size: int) -> Tables:
    """Open, or create, the tables in a folder.

    Raises
    ------
    lmdb.Error
        LMDB cannot open it.
    CacheError
        It was written by another version.
    """
    path.mkdir(parents=True, exist_ok=True)
    # No read-ahead: batches are drawn at random. Every commit is synced, data and meta page.
    env = lmdb.open(str(path), map_size=map_size, max_dbs=len(_NAMES), max_readers=1024, readahead=False)
    try:
        tables = Tables(env, *(env.open_db(name) for name in _NAMES))
        with env.begin(write=True) as txn:
            found = txn.get(b"version", db=tables.meta)
            if found is None:
                txn.put(b"version", _VERSION, db=tables.meta)
            elif found != _VERSION:
                raise CacheError(f"the cache {path} has layout {found!r}, not {_VERSION!r}; delete the folder")
        # A reader that was killed would otherwise keep freed pages from being used again.
        env.reader_check()
    except BaseException:
        env.close()
        raise
    return tables


def stored_size(record_bytes: int, page: int = 4096) -> int:
    """Space that a record of a size takes in the store, an estimate from LMDB's page layout."""
    if record_bytes > page // 2 - 32:
        return -(-(record_bytes + 16) // page) * page + _INDEX_BYTES
    return page // ((page - 16) // (record_bytes + 26)) + _INDEX_BYTES


class Writer:
    """What one write transaction does; nothing counts until it is committed, after :meth:`finish`."""

    def __init__(self, tables: Tables, txn: ReadTxn) -> None:
        self.tables = tables
        self.txn = txn
        clock = txn.get(b"clock", db=tables.meta)
        self._clock = int(_STAMP.unpack(clock)[0]) if clock is not None else 0
        self._changes: dict[bytes, list[int]] = {}

    def insert(self, key: bytes, record: bytes) -> bool:
        """Store a record as the most recently used; whether the key is new."""
        is_new = self.remove(key) == 0
        stamp = self._tick()
        packed = _STAMP.pack(stamp)
        self.txn.put(packed, record, append=True, db=self.tables.records)
        self.txn.put(packed, key, append=True, db=self.tables.order)
        self.txn.put(key, _ENTRY.pack(stamp, stamp, len(record)), db=self.tables.index)
        self._count(key, 1, len(record))
        return is_new

    def remove(self, key: bytes) -> int:
        """Remove a sample; the size of its record, 0 if there is none."""
        entry = self.txn.pop(key, db=self.tables.index)
        if entry is None:
            return 0
        record, stamp, size = _ENTRY.unpack(entry)
        self.txn.delete(_STAMP.pack(record), db=self.tables.records)
        self.txn.delete(_STAMP.pack(stamp), db=self.tables.order)
        self._count(key, -1, -size)
        return int(size)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make samples the most recently used, the last of them most of all."""
        for key in keys:
            entry = self.txn.get(key, db=self.tables.index)
            if entry is None:
                continue
            record, stamp, size = _ENTRY.unpack(entry)
            now = self._tick()
            self.txn.delete(_STAMP.pack(stamp), db=self.tables.order)
            self.txn.put(_STAMP.pack(now), key, append=True, db=self.tables.order)
            self.txn.put(key, _ENTRY.pack(record, now, size), db=self.tables.index)

    def oldest(self, limit: int, room: int) -> list[bytes]:
        """Least recently used keys, at most ``limit``, that take about ``room`` bytes of the store."""
        found: list[bytes] = []
        for _, key in self.txn.cursor(self.tables.order):
            if room <= 0 or len(found) == limit:
                break
            found.append(key)
            room -= stored_size(_ENTRY.unpack(self.txn.get(key, db=self.tables.index))[2])
        return found

    def describe(self, namespace: bytes, description: bytes) -> None:
        """Remember what a namespace id stands for."""
        self.txn.put(namespace, description, overwrite=False, db=self.tables.namespaces)

    def forget_namespace(self, namespace: bytes) -> None:
        """Remove what is known of an empty namespace."""
        self.txn.delete(namespace, db=self.tables.namespaces)
        self.txn.delete(namespace, db=self.tables.totals)
        self._changes.pop(namespace, None)

    def finish(self) -> None:
        """Write clock and totals; to be called last.

        The clock moves on even if nothing else did: freed pages can be used from the second transaction after
        the one that freed them on, and LMDB drops transactions that change nothing.
        """
        for namespace, (samples, size) in self._changes.items():
            old = self.tables.total(self.txn, namespace)
            self.txn.put(namespace, _TOTALS.pack(old[0] + samples, old[1] + size), db=self.tables.totals)
        self.txn.put(b"clock", _STAMP.pack(self._clock + 1), db=self.tables.meta)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _count(self, key: bytes, samples: int, size: int) -> None:
        change = self._changes.setdefault(key[:16], [0, 0])
        change[0] += samples
        change[1] += size
