"""The activation cache: encoded samples in LMDB, durable when stored, least recently used out first.

Several processes of one machine may open a cache on a local disk; each opens a folder once.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..errors import CacheError
from .cache_index import Writer
from .cache_records import (
    Batch,
    Namespace,
    Parts,
    Statistics,
    TenantStatistics,
    Verification,
    join_records,
    make_records,
    split_record,
)
from .cache_store import Store
from .shipment import UNBOUND, Shipment

__all__ = ["AbsentSamplesError", "ActivationCache", "Batch", "Namespace", "Statistics", "Verification"]

_MAX_TOUCHED = 1 << 16
_SCAN = 1024


class AbsentSamplesError(CacheError):
    """Samples are not in the cache: never stored, evicted, or damaged and therefore dropped.

    Attributes
    ----------
    missing, damaged : tuple of bytes
        Keys (namespace id + digest) of the samples. All of them can be asked for and stored again.
    """

    def __init__(self, missing: Sequence[bytes], damaged: Sequence[bytes]) -> None:
        groups = (("not stored (or evicted)", missing), ("damaged and now dropped", damaged))
        found = [f"{len(keys)} {what}: {_names(keys)}" for what, keys in groups if keys]
        super().__init__(f"cached samples are absent; ask their devices again. {'; '.join(found)}")
        self.missing = tuple(missing)
        self.damaged = tuple(damaged)


class ActivationCache:
    """Encoded samples of many tenants; open it with :meth:`open`, close it or use it in a ``with`` block.

    Safe to share between threads. Reads are remembered in memory and written with the next write; a process
    that dies loses only how recently samples were used.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hits: Counter[bytes] = Counter()
        self._misses: Counter[bytes] = Counter()

    @classmethod
    def open(cls, path: str | Path, quota_bytes: int) -> Self:
        """Open the cache in a folder, or create it.

        Parameters
        ----------
        path : str or Path
            Folder on a local disk.
        quota_bytes : int
            Size that the file never grows beyond, at least 1 MiB; 7/8 of it hold samples.

        Raises
        ------
        CacheError
            The quota is too small, or the folder cannot be opened or is of another version.
        """
        return cls(Store.open(Path(path).expanduser(), quota_bytes))

    def close(self) -> None:
        """Write what was read lately and close; the object cannot be used afterwards."""
        with self._store.lock:
            self._flush_if_possible()
            self._store.tables.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity_bytes(self) -> int:
        """Space for samples. Samples in use that need more than that evict each other for ever."""
        return self._store.capacity_bytes

    def put(self, namespace: Namespace, shipment: Shipment) -> int:
        """Store the samples of a shipment in one transaction, durable on return; known ones are replaced.

        Returns
        -------
        int
            Samples that were not there before.

        Raises
        ------
        CacheError
            It does not fit the namespace or the quota, or the disk is full; nothing of it is stored then.
        """
        if (shipment.codec, shipment.taps) != (namespace.codec, len(namespace.taps)):
            raise CacheError(f"a shipment of {shipment.taps} taps in {shipment.codec} is not of {namespace}")
        if shipment.namespace not in (UNBOUND, namespace.id):
            raise CacheError(f"a shipment of namespace {shipment.namespace.hex()} is not of {namespace}")
        if not shipment.digests:
            return 0
        records = list(make_records(namespace.id, shipment))
        with self._store.named("store a shipment"):
            return self._store.insert(records, namespace.id, namespace.description)

    def known(self, namespace: Namespace) -> set[bytes]:
        """Digests of all samples of a namespace."""
        with self._store.named("list samples"), self._store.reading() as txn:
            return {key[16:] for key in self._store.tables.keys(txn, namespace.id)}

    def missing(self, namespace: Namespace, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in their order."""
        prefix, index = namespace.id, self._store.tables.index
        with self._store.named("look samples up"), self._store.reading() as txn:
            return [digest for digest in digests if txn.get(prefix + digest, db=index) is None]

    def get(self, namespace: Namespace, digests: Sequence[bytes]) -> Batch:
        """Samples of one namespace, in the order of ``digests``; see :meth:`fetch`."""
        prefix = namespace.id
        return self.fetch([prefix + digest for digest in digests])

    def fetch(self, keys: Sequence[bytes]) -> Batch:
        """Samples of any namespaces of the same taps, codec and width, in one read transaction.

        Parameters
        ----------
        keys : sequence of bytes
            ``namespace.key(digest)`` of each sample; the batch has their order.

        Raises
        ------
        AbsentSamplesError
            Samples are missing, or damaged; damaged ones are dropped, so that they will be asked for again.
        CacheError
            The store cannot be read, or the samples do not go together.
        """
        parts, missing, damaged = list[Parts](), list[bytes](), list[bytes]()
        record_of = self._store.tables.record
        with self._store.named("read samples"):
            with self._store.reading() as txn:
                for key in keys:
                    record = record_of(txn, key)
                    part = None if record is None else split_record(key, record)
                    if part is not None:
                        parts.append(part)
                    else:
                        (missing if record is None else damaged).append(key)
                batch = join_records(parts) if len(parts) == len(keys) else None
            self._note(keys, [*missing, *damaged])
            if batch is None:
                self._drop_damaged(damaged)
                raise AbsentSamplesError(missing, damaged)
        return batch

    def forget(self, tenant: str) -> int:
        """Remove every sample of a tenant, of all namespaces; the number of samples removed.

        A process that dies meanwhile leaves a part; forget again.
        """
        removed = 0
        with self._store.named(f"forget {tenant!r}"):
            with self._store.reading() as txn:
                owners = self._store.tables.tenants(txn)
            for name in [name for name, owner in owners.items() if owner == tenant]:

                def first(writer: Writer, limit: int, name: bytes = name) -> list[bytes]:
                    return self._first(writer.txn, limit, prefix=name)

                removed += self._store.remove(first)
                with self._store.writing() as writer:
                    writer.forget_namespace(name)
        return removed

    def flush(self) -> None:
        """Write which samples were read lately. Needed only where other processes evict meanwhile."""
        with self._store.named("note what was read"):
            if self._store.touched:
                with self._store.writing():
                    pass

    def statistics(self) -> Statistics:
        """Counts of samples, bytes, hits, misses and evictions, also by tenant."""
        tables = self._store.tables
        with self._store.named("count samples"), self._store.reading() as txn:
            used, owners = tables.used_bytes(txn), tables.tenants(txn)
            totals = {name: tables.total(txn, name) for name in owners}
        tenants: dict[str, TenantStatistics] = {}
        for name, owner in owners.items():
            old, (samples, size) = tenants.get(owner, TenantStatistics()), totals[name]
            reads = old.hits + self._hits[name], old.misses + self._misses[name]
            tenants[owner] = TenantStatistics(old.samples + samples, old.bytes + size, *reads)
        return Statistics(
            samples=sum(samples for samples, _ in totals.values()),
            bytes=sum(size for _, size in totals.values()),
            used_bytes=used,
            capacity_bytes=self.capacity_bytes,
            hits=self._hits.total(),
            misses=self._misses.total(),
            evictions=self._store.evictions,
            tenants=tenants,
        )

    def verify(self) -> Verification:
        """Read every record; damaged ones are dropped, so that they will be asked for again."""
        after, samples, damaged = b"", 0, list[bytes]()
        while True:
            with self._store.named("verify"), self._store.reading() as txn:
                keys = self._first(txn, _SCAN, after=after)
                bad = [key for key in keys if not self._is_intact(txn, key)]
            samples += len(keys) - len(bad)
            damaged += bad
            if len(keys) < _SCAN:
                break
            after = keys[-1] + b"\0"
        with self._store.named("verify"):
            self._drop_damaged(damaged)
            with self._store.reading() as txn:
                consistent = len(set(self._store.tables.entries(txn))) == 1
        return Verification(samples, tuple(damaged), consistent)

    def _drop_damaged(self, keys: Sequence[bytes]) -> None:
        left = list(keys)

        def damaged(writer: Writer, limit: int) -> list[bytes]:
            some = [left.pop() for _ in range(min(limit, len(left)))]
            # Looked at again, since another process may have stored a good record meanwhile.
            return [key for key in some if not self._is_intact(writer.txn, key)]

        if left:
            self._store.remove(damaged)

    def _is_intact(self, txn: Any, key: bytes) -> bool:
        record = self._store.tables.record(txn, key)
        return record is not None and split_record(key, memoryview(record)) is not None

    def _first(self, txn: Any, limit: int, prefix: bytes = b"", after: bytes = b"") -> list[bytes]:
        keys = self._store.tables.keys(txn, prefix, after)
        return [key for _, key in zip(range(limit), keys, strict=False)]

    def _note(self, keys: Sequence[bytes], absent: Sequence[bytes]) -> None:
        self._hits.update([key[:16] for key in keys])
        self._hits.subtract([key[:16] for key in absent])
        self._misses.update([key[:16] for key in absent])
        touched = self._store.touched
        for key in keys:
            touched.pop(key, None)
        touched.update(dict.fromkeys(keys))
        if len(touched) > _MAX_TOUCHED:
            self._flush_if_possible()

    def _flush_if_possible(self) -> None:
        try:
            self.flush()
        except CacheError:
            # How recently samples were used is a hint: a full disk must stop neither reads nor the end.
            self._store.touched.clear()


def _names(keys: Sequence[bytes]) -> str:
    shown = ", ".join(f"{key[16:].hex()} (namespace {key[:16].hex()})" for key in keys[:3])
    return shown + (", ..." if len(keys) > 3 else "")
