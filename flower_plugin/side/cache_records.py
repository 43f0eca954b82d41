"""What the activation cache keeps of a sample, and under which name."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from ..errors import CacheError
from .codec import decode_states, get_codec
from .shipment import Shipment

Parts = tuple[int, int, memoryview, memoryview]
"""Tokens, bytes of a token's row, targets and rows of a record."""

# Checksum of all that follows, tokens, bytes of a token; then targets i4 [tokens], rows u1 [tokens, bytes].
_HEADER = struct.Struct("<QII")
_COUNTS = struct.Struct("<II")


@dataclass(frozen=True)
class Namespace:
    """All that makes a sample's activations what they are, the sample itself aside.

    Attributes
    ----------
    tenant : str
        Whose samples these are: a stable identity.
    fingerprint : str
        Of the backbone.
    template : str
        Names how samples become tokens.
    max_length : int
        Tokens a sample at most.
    taps : tuple of int
        Tapped blocks.
    token_rule : str
        Which tokens are kept.
    codec : str
        How they are encoded.
    """

    tenant: str
    fingerprint: str
    template: str
    max_length: int
    taps: tuple[int, ...]
    token_rule: str
    codec: str

    @cached_property
    def description(self) -> bytes:
        """Canonical JSON of the fields."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @cached_property
    def id(self) -> bytes:
        """16 bytes; others cannot find a second namespace of the same id."""
        return hashlib.blake2b(self.description, digest_size=16).digest()

    def key(self, digest: bytes) -> bytes:
        """The cache's key of a sample of this namespace, 32 bytes."""
        return self.id + digest


@dataclass(frozen=True, eq=False)
class Batch:
    """Encoded samples, in the order in which they were asked for.

    Attributes
    ----------
    rows : ndarray
        uint8 [tokens, taps * row_bytes].
    targets : ndarray
        int32 [tokens].
    tokens : ndarray
        int32 [samples]: rows of each sample.
    """

    rows: NDArray[np.uint8]
    targets: NDArray[np.int32]
    tokens: NDArray[np.int32]

    def tensors(self, codec: str, taps: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decode to states float32 [tokens, taps, width], targets int64 [tokens], tokens int64 [samples].

        Raises
        ------
        PayloadError
            The rows are not of this codec, number of taps and width.
        """
        states = decode_states(get_codec(codec), torch.from_numpy(self.rows), taps, width)
        return states, torch.from_numpy(self.targets).long(), torch.from_numpy(self.tokens).long()


@dataclass(frozen=True)
class TenantStatistics:
    """Samples and record bytes stored of a tenant; reads since the cache was opened."""

    samples: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True)
class Statistics:
    """State of a cache; reads and evictions count since it was opened, by this process.

    Attributes
    ----------
    samples, bytes : int
        Stored samples and the size of their records.
    used_bytes, capacity_bytes : int
        Space taken in the store, page by page, and the most that it may take.
    hits, misses, evictions : int
        Samples read, samples asked for in vain, samples that made room for others.
    tenants : mapping of str to TenantStatistics
        The same by tenant.
    """

    samples: int
    bytes: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    tenants: Mapping[str, TenantStatistics]


@dataclass(frozen=True)
class Verification:
    """Result of a full scan: intact samples, keys of those dropped, whether the tables agree."""

    samples: int
    dropped: tuple[bytes, ...]
    consistent: bool


def make_records(prefix: bytes, shipment: Shipment) -> Iterator[tuple[bytes, bytes]]:
    """Key and record of each sample of a shipment; ``prefix`` is the id of its namespace."""
    row_bytes = shipment.rows.shape[1]
    start = 0
    for digest, count in zip(shipment.digests, shipment.tokens.tolist(), strict=True):
        part = slice(start, start + count)
        start += count
        targets = shipment.targets[part].astype("<i4").tobytes()
        content = _COUNTS.pack(count, row_bytes) + targets + shipment.rows[part].tobytes()
        key = prefix + digest
        yield key, _checksum(key, content).to_bytes(8, "little") + content


def split_record(key: bytes, record: memoryview) -> Parts | None:
    """Parts of the record under ``key``, without a copy; None if it is not what was stored there."""
    if len(record) < _HEADER.size:
        return None
    checksum, tokens, row_bytes = _HEADER.unpack_from(record)
    middle = _HEADER.size + 4 * tokens
    if len(record) != middle + tokens * row_bytes or checksum != _checksum(key, record[8:]):
        return None
    return tokens, row_bytes, record[_HEADER.size : middle], record[middle:]


def join_records(parts: Sequence[Parts]) -> Batch:
    """One batch of what :func:`split_record` gave.

    Raises
    ------
    CacheError
        The records differ in the size of a row.
    """
    sizes = {part[1] for part in parts}
    if len(sizes) > 1:
        raise CacheError(f"samples of different taps, codec or width in one batch: rows of {sorted(sizes)} bytes")
    rows = np.frombuffer(bytearray().join([part[3] for part in parts]), np.uint8)
    targets = np.frombuffer(bytearray().join([part[2] for part in parts]), "<i4").astype(np.int32, copy=False)
    tokens = np.array([part[0] for part in parts], np.int32)
    return Batch(rows.reshape(len(targets), sizes.pop() if sizes else 0), targets, tokens)


def _checksum(key: bytes, content: bytes | memoryview) -> int:
    # The digest seeds it, so that a record under another sample's name is found out.
    return xxh3_64_intdigest(content, int.from_bytes(key[-8:], "little"))
