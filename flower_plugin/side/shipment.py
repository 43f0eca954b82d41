"""What one message carries: the encoded activations of some samples, as one payload and one small index.

Both are flat uint8 arrays, little-endian, of a fixed layout::

    index   = header, then digests [samples, 16] u1, tokens [samples] u4, targets [tokens] i4
    payload = rows [tokens, taps * row_bytes] u1

The header ends with an xxh3 checksum over everything else, header included. The checksum is against damage,
not against forgery: whoever reads a shipment checks all that it says against what was agreed.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from ..errors import PayloadError
from .codec import Codec, decode_states, get_codec

DIGEST_BYTES = 16
UNBOUND = bytes(16)
"""The namespace of shipments that are not bound to one."""
LARGEST_ACTIVATION = 1e6
"""Largest magnitude that is taken for an activation: those of real backbones stay below 1e5, while squares and
sums of much larger values, finite as they are, overflow in training."""

Bytes = NDArray[np.uint8]

_MAGIC = b"ECOA"
_VERSION = 1
# magic, version, flags (0), codec, namespace, taps, width, samples, tokens, payload bytes
_HEADER = struct.Struct("<4sHH8s16sIIQQQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
_CHECK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Shipment:
    """Encoded activations of some samples.

    Attributes
    ----------
    codec : str
        Name of the codec of ``rows``.
    taps, width : int
        States are [tokens, taps, width] once decoded.
    digests : tuple of bytes
        16 bytes a sample, no two alike.
    tokens : ndarray
        int32 [samples]: rows of each sample, at least one.
    targets : ndarray
        int32 [tokens].
    rows : ndarray
        uint8 [tokens, taps * row_bytes(width)], sample after sample.
    namespace : bytes
        16 bytes that both sides derive from what they agreed on, such as ``Namespace.id``.

    Raises
    ------
    PayloadError
        The parts do not fit each other.
    """

    codec: str
    taps: int
    width: int
    digests: tuple[bytes, ...]
    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    rows: Bytes
    namespace: bytes = UNBOUND

    def __post_init__(self) -> None:
        total, row = int(self.tokens.sum()), self.taps * get_codec(self.codec).row_bytes(self.width)
        found = (self.tokens.shape, self.targets.shape, self.rows.shape, self.rows.dtype)
        wanted = ((len(self.digests),), (total,), (total, row), np.dtype(np.uint8))
        if found != wanted:
            raise PayloadError(f"shipment: tokens, targets and rows have shapes {found}; they must be {wanted}")
        if any(len(digest) != DIGEST_BYTES for digest in self.digests) or len(self.namespace) != DIGEST_BYTES:
            raise PayloadError(f"shipment: a digest or the namespace is not {DIGEST_BYTES} bytes long")
        if len(set(self.digests)) != len(self.digests):
            raise PayloadError("shipment: duplicated digests; send each sample once")
        if self.tokens.size and int(self.tokens.min()) < 1:
            raise PayloadError("shipment: a sample has no token; leave samples without a loss token out")

    def decode(self) -> Tensor:
        """The states, float32 [tokens, taps, width]."""
        return decode_states(get_codec(self.codec), torch.tensor(self.rows), self.taps, self.width)


def make_shipment(
    codec: Codec,
    taps: int,
    width: int,
    digests: Sequence[bytes],
    rows: Sequence[Tensor],
    targets: Sequence[NDArray[np.integer]],
    namespace: bytes = UNBOUND,
) -> Shipment:
    """Put samples that were encoded one by one together.

    Parameters
    ----------
    rows : sequence of Tensor
        One a sample: uint8 of tokens * taps * row_bytes(width) bytes in any shape, token-major.
    targets : sequence of ndarray
        One a sample: integers [tokens].

    Raises
    ------
    PayloadError
        The parts do not fit each other.
    """
    size = taps * codec.row_bytes(width)
    for digest, part, target in zip(digests, rows, targets, strict=True):
        if part.dtype != torch.uint8 or part.numel() != size * len(target):
            raise PayloadError(
                f"sample {digest.hex()} has {part.numel()} {part.dtype} values for {len(target)} tokens; "
                f"they must be {size} bytes a token"
            )
    joined = torch.cat([part.reshape(-1).cpu() for part in rows]) if rows else torch.empty(0, dtype=torch.uint8)
    return Shipment(
        codec=codec.name,
        taps=taps,
        width=width,
        digests=tuple(digests),
        tokens=np.array([len(target) for target in targets], np.int32),
        targets=np.concatenate([np.zeros(0, np.int32), *targets]).astype(np.int32),
        rows=joined.numpy().reshape(-1, size),
        namespace=namespace,
    )


def shipment_bytes(codec: Codec, taps: int, width: int, samples: int, tokens: int) -> int:
    """Bytes on the wire, payload and index together, of ``samples`` with ``tokens`` in all."""
    return HEADER_BYTES + samples * (DIGEST_BYTES + 4) + tokens * (4 + taps * codec.row_bytes(width))


def pack(shipment: Shipment) -> tuple[Bytes, Bytes]:
    """Lay a shipment out as (payload, index), both uint8 [n]."""
    payload = np.ascontiguousarray(shipment.rows).reshape(-1)
    body = b"".join(
        (*shipment.digests, shipment.tokens.astype("<u4").tobytes(), shipment.targets.astype("<i4").tobytes())
    )
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        0,
        shipment.codec.encode(),
        shipment.namespace,
        shipment.taps,
        shipment.width,
        len(shipment.digests),
        len(shipment.targets),
        payload.size,
    )
    index = header + _checksum(header, body, payload.data) + body
    return payload, np.frombuffer(index, np.uint8)


def unpack(
    payload: Bytes,
    index: Bytes,
    *,
    codec: str,
    taps: int,
    width: int,
    budget_bytes: int,
    max_samples: int,
    target_limit: int,
    namespace: bytes = UNBOUND,
) -> Shipment:
    """Read a shipment of unknown origin; nothing is allocated before its sizes are found true.

    Parameters
    ----------
    codec, taps, width, namespace
        As agreed; the shipment must say the same.
    budget_bytes : int
        Most bytes of payload and index together, the index's header aside.
    max_samples : int
        Most samples.
    target_limit : int
        Targets are 0 .. target_limit - 1.

    Returns
    -------
    Shipment
        Its rows are a view of ``payload``; all of them decode to values of at most ``LARGEST_ACTIVATION``.

    Raises
    ------
    PayloadError
        It is truncated, damaged, larger than allowed, of another kind, or holds values that are not allowed.
    """
    payload, index = _flat_bytes(payload, "payload"), _flat_bytes(index, "index")
    _refuse_if(len(index) < HEADER_BYTES, f"the index has {len(index)} bytes, fewer than its header")
    size = len(payload) + len(index) - HEADER_BYTES
    _refuse_if(size > budget_bytes, f"{size} bytes are more than the budget of {budget_bytes}")
    header, body = index[: _HEADER.size].tobytes(), index[HEADER_BYTES:]
    samples, total = _read_header(header, (codec, namespace, taps, width), len(payload))
    _refuse_if(samples > max_samples, f"it holds {samples} samples; at most {max_samples} are expected")
    row = taps * get_codec(codec).row_bytes(width)
    wanted = samples * (DIGEST_BYTES + 4) + total * 4
    _refuse_if(len(body) != wanted, f"the index holds {len(body)} bytes for counts that need {wanted}")
    _refuse_if(len(payload) != total * row, f"the payload holds {len(payload)} bytes, not {total} rows of {row}")
    found = index[_HEADER.size : HEADER_BYTES].tobytes()
    _refuse_if(
        found != _checksum(header, body.data, payload.data),
        "the checksum is wrong: it was damaged on its way",
    )

    digests, tokens, targets = _read_body(body, samples, total, target_limit)
    shipment = Shipment(codec, taps, width, digests, tokens, targets, payload.reshape(total, row), namespace)
    _refuse_wild_values(shipment)
    return shipment


def _read_header(header: bytes, agreed: tuple[str, bytes, int, int], payload_bytes: int) -> tuple[int, int]:
    magic, version, flags, codec, namespace, taps, width, samples, total, payload_size = _HEADER.unpack(header)
    _refuse_if(magic != _MAGIC, "the index does not start like one")
    _refuse_if((version, flags) != (_VERSION, 0), f"layout version {version}.{flags}; this side reads {_VERSION}.0")
    found = (codec.rstrip(b"\0").decode("ascii", "replace"), namespace, taps, width)
    for name, is_so, should_be in zip(("codec", "namespace", "taps", "width"), found, agreed, strict=True):
        _refuse_if(is_so != should_be, f"its {name} is {is_so!r}; agreed was {should_be!r}")
    _refuse_if(
        payload_size != payload_bytes,
        f"the payload has {payload_bytes} bytes; its sender counted {payload_size}",
    )
    return samples, total


def _read_body(
    body: Bytes, samples: int, total: int, target_limit: int
) -> tuple[tuple[bytes, ...], NDArray[np.int32], NDArray[np.int32]]:
    flat = body[: samples * DIGEST_BYTES].tobytes()
    digests = tuple(flat[at : at + DIGEST_BYTES] for at in range(0, len(flat), DIGEST_BYTES))
    counts = body[len(flat) : len(flat) + samples * 4].view("<u4")
    targets = body[len(flat) + samples * 4 :].view("<i4").astype(np.int32)
    _refuse_if(int(counts.sum(dtype=np.uint64)) != total, f"its tokens a sample do not add up to its {total} tokens")
    outside = np.flatnonzero((targets < 0) | (targets >= target_limit))
    if outside.size:
        at = int(outside[0])
        raise PayloadError(f"shipment: target {targets[at]} of token {at} is outside 0..{target_limit - 1}")
    return digests, counts.astype(np.int32), targets


def _refuse_wild_values(shipment: Shipment) -> None:
    codec, ends = get_codec(shipment.codec), np.cumsum(shipment.tokens)
    for start in range(0, len(shipment.rows), _CHECK_ROWS):
        rows = torch.tensor(shipment.rows[start : start + _CHECK_ROWS])
        largest = decode_states(codec, rows, shipment.taps, shipment.width).flatten(1).abs().amax(1)
        wild = ~(largest <= LARGEST_ACTIVATION)  # Of NaN as well.
        if bool(wild.any()):
            at = int(wild.nonzero()[0])
            digest = shipment.digests[int(np.searchsorted(ends, start + at, side="right"))]
            found = float(largest[at])
            raise PayloadError(
                f"shipment: activations of sample {digest.hex()} hold "
                + (f"{found:g}; at most {LARGEST_ACTIVATION:g} is allowed" if found < np.inf else "NaN or infinity")
            )


def _flat_bytes(array: Bytes, name: str) -> Bytes:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        kind = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise PayloadError(f"shipment: the {name} must be a uint8 array [n]; got {kind}")
    return np.ascontiguousarray(array)


def _checksum(*parts: bytes | memoryview) -> bytes:
    state = xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def _refuse_if(wrong: bool, reason: str) -> None:
    if wrong:
        raise PayloadError(f"shipment: {reason}")
