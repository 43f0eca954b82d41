"""Shipments: round trips, sizes on the wire, and every lie refused as a PayloadError."""

import dataclasses
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from flower_plugin.errors import PayloadError
from flower_plugin.side.codec import codec_names, get_codec
from flower_plugin.side.shipment import (
    HEADER_BYTES,
    LARGEST_ACTIVATION,
    Shipment,
    make_shipment,
    pack,
    shipment_bytes,
    unpack,
)

NAMES = codec_names()
CHECKSUM = slice(HEADER_BYTES - 16, HEADER_BYTES)


def example(codec: str = "int8", tokens: tuple[int, ...] = (2, 1, 3), taps: int = 2, width: int = 5) -> Shipment:
    random = torch.Generator().manual_seed(len(tokens))
    coder = get_codec(codec)
    rows = [coder.encode(torch.randn(count * taps, width, generator=random)) for count in tokens]
    digests = [index.to_bytes(16, "big") for index in range(len(tokens))]
    return make_shipment(coder, taps, width, digests, rows, [np.arange(count) % 7 for count in tokens])


def agreed(shipment: Shipment, **changes: Any) -> dict[str, Any]:
    terms = {"codec": shipment.codec, "taps": shipment.taps, "width": shipment.width}
    return terms | {"budget_bytes": 10**6, "max_samples": 100, "target_limit": 7} | changes


def signed(payload: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The index with a checksum that fits, as a liar would send it."""
    index = index.copy()
    content = (index[: CHECKSUM.start], index[CHECKSUM.stop :], payload)
    index[CHECKSUM] = np.frombuffer(xxh3_128(b"".join(part.tobytes() for part in content)).digest(), np.uint8)
    return index


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(NAMES),
    tokens=st.lists(st.integers(1, 4), max_size=6).map(tuple),
    taps=st.integers(1, 4),
    width=st.integers(1, 130),
)
def test_round_trip(codec: str, tokens: tuple[int, ...], taps: int, width: int) -> None:
    sent = example(codec, tokens, taps, width)
    payload, index = pack(sent)
    size = shipment_bytes(get_codec(codec), taps, width, len(tokens), sum(tokens))
    assert len(payload) + len(index) == size
    got = unpack(payload, index, **agreed(sent, budget_bytes=size - HEADER_BYTES))
    assert (got.digests, got.codec, got.taps, got.width) == (sent.digests, codec, taps, width)
    for name in ("tokens", "targets", "rows"):
        assert np.array_equal(getattr(got, name), getattr(sent, name))
    assert torch.equal(got.decode(), sent.decode())
    assert got.decode().shape == (sum(tokens), taps, width)


@pytest.mark.parametrize("taps", [4, 5, 6, 7])
@pytest.mark.parametrize("samples", [1, 50])
def test_bytes_against_fp16(taps: int, samples: int) -> None:
    size = {}
    for name in NAMES:
        payload, index = pack(example(name, (1,) * samples, taps, 384))
        size[name] = len(payload) + len(index)
    assert size["int8"] / size["fp16"] <= 0.53
    assert size["nf4"] / size["fp16"] <= 0.30


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_flipped_bits_are_found(data: st.DataObject) -> None:
    sent = example()
    arrays = [array.copy() for array in pack(sent)]
    array = data.draw(st.sampled_from(arrays))
    array[data.draw(st.integers(0, len(array) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PayloadError):
        unpack(*arrays, **agreed(sent))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_truncated_and_extended_arrays_are_found(data: st.DataObject) -> None:
    sent = example()
    arrays = list(pack(sent))
    which = data.draw(st.integers(0, 1))
    if data.draw(st.booleans()):
        arrays[which] = arrays[which][: data.draw(st.integers(0, len(arrays[which]) - 1))]
    else:
        arrays[which] = np.append(arrays[which], np.zeros(data.draw(st.integers(1, 99)), np.uint8))
    with pytest.raises(PayloadError):
        unpack(*arrays, **agreed(sent))
    if len(arrays[1]) >= HEADER_BYTES:
        with pytest.raises(PayloadError):
            unpack(arrays[0], signed(*arrays), **agreed(sent))


@settings(max_examples=150, deadline=None)
@given(payload=st.binary(max_size=300), index=st.binary(max_size=300))
def test_random_bytes_are_refused(payload: bytes, index: bytes) -> None:
    with pytest.raises(PayloadError):
        unpack(np.frombuffer(payload, np.uint8), np.frombuffer(index, np.uint8), **agreed(example()))


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_signed_lies_raise_only_payload_errors_and_allocate_little(data: st.DataObject) -> None:
    sent = example()
    payload, index = (array.copy() for array in pack(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        array = data.draw(st.sampled_from([payload, index, index, index]))
        at = data.draw(st.integers(0, len(array) - 1))
        value = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
        array[at : at + data.draw(st.sampled_from([1, 4, 8]))] = value
    index = signed(payload, index)
    tracemalloc.start()
    try:
        got = unpack(payload, index, **agreed(sent))
    except PayloadError:
        pass
    else:
        assert bool(got.decode().isfinite().all())
        assert int(got.tokens.sum()) == len(got.targets) == len(got.rows)
        assert 0 <= int(got.targets.min()) <= int(got.targets.max()) < 7
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2_000_000


# Offsets of the header's fields: taps, width, samples, tokens, payload bytes.
@pytest.mark.parametrize(("at", "kind"), [(32, "<I"), (36, "<I"), (40, "<Q"), (48, "<Q"), (56, "<Q")])
@pytest.mark.parametrize("count", [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_huge_counts_are_refused(at: int, kind: str, count: int) -> None:
    sent = example()
    payload, index = pack(sent)
    size = struct.calcsize(kind)
    index = index.copy()
    index[at : at + size] = np.frombuffer((count % 2 ** (8 * size)).to_bytes(size, "little"), np.uint8)
    with pytest.raises(PayloadError):
        unpack(payload, signed(payload, index), **agreed(sent, max_samples=2**64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": "fp16"}, "codec is 'int8'; agreed was 'fp16'"),
        ({"taps": 3}, "taps is 2; agreed was 3"),
        ({"width": 6}, "width is 5; agreed was 6"),
        ({"namespace": b"n" * 16}, "namespace"),
        ({"budget_bytes": 191}, "192 bytes are more than the budget of 191"),
        ({"max_samples": 2}, "3 samples; at most 2"),
        ({"target_limit": 2}, r"target 2 of token 5 is outside 0\.\.1"),
    ],
)
def test_what_was_not_agreed_is_refused(changes: dict[str, Any], reason: str) -> None:
    sent = example()
    with pytest.raises(PayloadError, match=reason):
        unpack(*pack(sent), **agreed(sent, **changes))


def test_other_arrays_are_refused() -> None:
    sent = example()
    payload, index = pack(sent)
    for wrong in (payload.astype(np.int8), payload.reshape(1, -1), payload.tobytes(), None):
        with pytest.raises(PayloadError, match="payload must be a uint8 array"):
            unpack(wrong, index, **agreed(sent))  # type: ignore[arg-type]
    spread = np.repeat(payload, 2)[::2]
    assert unpack(spread, index, **agreed(sent)).digests == sent.digests


def test_signed_duplicates_empty_samples_and_negative_targets_are_refused() -> None:
    sent = example()
    payload, index = pack(sent)
    twice, empty, negative = index.copy(), index.copy(), index.copy()
    twice[HEADER_BYTES + 16 : HEADER_BYTES + 32] = twice[HEADER_BYTES : HEADER_BYTES + 16]
    empty[HEADER_BYTES + 48 : HEADER_BYTES + 60] = np.array([3, 0, 3], "<u4").view(np.uint8)
    negative[HEADER_BYTES + 60 : HEADER_BYTES + 64] = 255
    cases = ((twice, "duplicated"), (empty, "no token"), (negative, "target -1 of token 0"))
    for changed, reason in cases:
        with pytest.raises(PayloadError, match=reason):
            unpack(payload, signed(payload, changed), **agreed(sent))


@pytest.mark.parametrize("codec", NAMES)
def test_encoded_nan_is_refused_by_sample(codec: str) -> None:
    sent = example(codec)
    rows = sent.rows.copy()
    rows[2, :4] = 255  # As a float of any width this is NaN: the value or the scale of sample 1.
    with pytest.raises(PayloadError, match=sent.digests[1].hex()):
        unpack(*pack(dataclasses.replace(sent, rows=rows)), **agreed(sent))


def test_inconsistent_shipments_cannot_be_made() -> None:
    sent = example()
    for changes in (
        {"tokens": sent.tokens[:-1]},
        {"targets": sent.targets[1:]},
        {"rows": sent.rows[:, 1:]},
        {"digests": (b"short", *sent.digests[1:])},
        {"digests": sent.digests[:1] * 3},
        {"namespace": b""},
    ):
        with pytest.raises(PayloadError):
            dataclasses.replace(sent, **changes)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="they must be"):
        make_shipment(get_codec("int8"), 2, 5, [bytes(16)], [torch.zeros(17, dtype=torch.uint8)], [np.zeros(1, int)])


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("value", [3e38, -2e36, 2 * LARGEST_ACTIVATION])
def test_activations_beyond_any_backbones_are_refused_by_name(codec: str, value: float) -> None:
    coder = get_codec(codec)
    states = [torch.randn(count * 2, 5) for count in (2, 1, 3)]
    digests = [bytes([number]) * 16 for number in range(3)]

    def send() -> Shipment:
        targets = [np.zeros(count, np.int32) for count in (2, 1, 3)]
        return make_shipment(coder, 2, 5, digests, [coder.encode(part) for part in states], targets)

    states[0][0, 0] = -0.9 * LARGEST_ACTIVATION
    payload, index = pack(send())
    unpack(payload, index, **agreed(send()))
    states[1][1, 4] = value
    payload, index = pack(send())
    with pytest.raises(PayloadError, match=f"{digests[1].hex()} hold .*at most 1e\\+06"):
        unpack(payload, index, **agreed(send()))
