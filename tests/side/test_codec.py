"""Codecs: round trips, error bounds, sizes and refusals, at odd widths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from flower_plugin.errors import ConfigError, PayloadError
from flower_plugin.side.codec import NonFiniteRowError, codec_names, decode_states, get_codec

NAMES = ("fp32", "fp16", "bf16", "int8", "nf4")
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.tuples(st.integers(0, 5), st.integers(1, 150)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=FLOAT32, fill=FLOAT32)
)
EDGE_WIDTHS = (1, 2, 63, 64, 65, 127, 129, 384, 577)


def bound(name: str, x: Tensor) -> Tensor:
    """Largest allowed error of each value, float64."""
    x = x.double()
    absmax = x.abs().amax(1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    if name == "fp32":
        return torch.zeros_like(x)
    if name == "fp16":
        return torch.where(x.abs() <= 65504, x.abs() * 2.0**-11 + 2.0**-25, x.abs() - 65504)
    if name == "bf16":
        return x.abs() * 2.0**-8 + tiny
    if name == "int8":
        return absmax * 0.51 / 127 + tiny
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % 64)).view(len(x), (x.shape[1] + 63) // 64, 64)
    block = padded.amax(2).clamp(min=absmax * 2.0**-15.9).repeat_interleave(64, 1)[:, : x.shape[1]]
    return block * 0.16 + tiny


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(values=ROWS)
def test_error_is_bounded_for_any_finite_rows(name: str, values: np.ndarray) -> None:
    codec, x = get_codec(name), torch.from_numpy(values)
    encoded = codec.encode(x)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (len(x), codec.row_bytes(x.shape[1]))
    decoded = codec.decode(encoded, x.shape[1])
    assert decoded.dtype == torch.float32
    assert decoded.shape == x.shape
    assert bool(decoded.isfinite().all())
    assert bool(((decoded.double() - x.double()).abs() <= bound(name, x)).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", EDGE_WIDTHS)
def test_rows_are_independent(name: str, width: int) -> None:
    codec = get_codec(name)
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width)) * 30
    together = codec.encode(x)
    assert torch.equal(together, torch.cat([codec.encode(x[i : i + 1]) for i in range(9)]))
    order = torch.tensor([8, 0, 3, 3])
    assert torch.equal(codec.decode(together[order], width), codec.decode(together, width)[order])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1.0, 3.0e38, float(torch.finfo(torch.float32).max)])
def test_extreme_scales(name: str, scale: float) -> None:
    codec = get_codec(name)
    x = torch.tensor([[1.0, -1.0, 0.5, 0.0] * 17]) * scale
    decoded = codec.decode(codec.encode(x), 68)
    assert bool(((decoded.double() - x.double()).abs() <= bound(name, x)).all())


def test_nf4_keeps_small_blocks_beside_an_outlier() -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[:, 200] = 3000.0
    codec = get_codec("nf4")
    error = (codec.decode(codec.encode(x), 256) - x)[:, :192]
    assert float(error.norm() / x[:, :192].norm()) < 0.13


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_are_refused_by_number(name: str, bad: float) -> None:
    x = torch.zeros(5, 70)
    x[3, 69] = bad
    x[4, 0] = bad
    with pytest.raises(NonFiniteRowError, match="row 3 of 5") as caught:
        get_codec(name).encode(x)
    assert caught.value.row == 3


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_gradients_come_in(name: str) -> None:
    codec = get_codec(name)
    x = torch.randn(3, 65).to(torch.bfloat16)
    assert torch.equal(codec.encode(x), codec.encode(x.float().requires_grad_()))


def test_fp16_saturates() -> None:
    codec = get_codec("fp16")
    assert codec.decode(codec.encode(torch.tensor([[1e6, -1e6]])), 2).tolist() == [[65504.0, -65504.0]]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_rows_are_refused(name: str) -> None:
    codec = get_codec(name)
    good = codec.encode(torch.randn(2, 70))
    for rows in (good[:, :-1], good.view(torch.int8), good.flatten(), torch.cat([good, good], 1)):
        with pytest.raises(PayloadError, match=name):
            codec.decode(rows, 70)
    for x in (torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(PayloadError, match="float rows"):
            codec.encode(x)


@pytest.mark.parametrize("name", NAMES)
def test_states_decode_from_any_offset_into_fresh_memory(name: str) -> None:
    codec, states = get_codec(name), torch.randn(3, 4, 33)
    rows = codec.encode(states.flatten(0, 1)).view(3, -1)
    buffer = torch.zeros(rows.numel() + 1, dtype=torch.uint8)
    buffer[1:] = rows.flatten()
    decoded = decode_states(codec, buffer[1:].view(3, -1), 4, 33)
    kept = decoded.clone()
    buffer.zero_()
    assert torch.equal(decoded, kept)
    assert torch.equal(decoded.flatten(0, 1), codec.decode(rows.view(12, -1), 33))
    with pytest.raises(PayloadError):
        decode_states(codec, rows, 3, 33)


def test_unknown_codec_names_the_choices() -> None:
    assert codec_names() == NAMES
    with pytest.raises(ConfigError, match=r"'int4'.*fp32, fp16, bf16, int8, nf4"):
        get_codec("int4")
