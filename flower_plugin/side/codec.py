"""Codecs of activation rows: three verbs, a fixed number of bytes a row, a bounded error.

Every row is encoded on its own, so that rows can be cut by sample and decoded by batch, in any order.
Bytes are little-endian.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, PayloadError

_TINY = torch.finfo(torch.float32).tiny


class NonFiniteRowError(PayloadError):
    """An activation row holds NaN or infinity.

    Attributes
    ----------
    row : int
        Index of the first such row.
    """

    def __init__(self, row: int, rows: int) -> None:
        super().__init__(
            f"activation row {row} of {rows} holds NaN or infinity; check the sample and the backbone's dtype"
        )
        self.row = row


class Codec(ABC):
    """Turns float rows into rows of bytes and back."""

    name: ClassVar[str]

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """Bytes that one row of ``width`` values takes."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Encode float rows.

        Parameters
        ----------
        x : Tensor
            [rows, width], any float dtype, width >= 1.

        Returns
        -------
        Tensor
            uint8 [rows, row_bytes(width)].

        Raises
        ------
        NonFiniteRowError
            A row holds NaN or infinity.
        """

    @abstractmethod
    def decode(self, rows: Tensor, width: int) -> Tensor:
        """Decode uint8 [rows, row_bytes(width)] to float32 [rows, width], in fresh memory.

        Raises
        ------
        PayloadError
            The rows have another dtype or size.
        """


class CastCodec(Codec):
    """Base of the codecs that store a float dtype; values beyond its range saturate."""

    dtype: ClassVar[torch.dtype]

    def row_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        x, _ = _checked(x)
        limit = torch.finfo(self.dtype).max
        return x.clamp(-limit, limit).to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        _check_rows(rows, self.row_bytes(width), self.name)
        # The copy gives aligned memory whatever the offset of the rows in their message.
        return rows.clone(memory_format=torch.contiguous_format).view(self.dtype).float()


class Float32(CastCodec):
    """Exact."""

    name = "fp32"
    dtype = torch.float32


class Float16(CastCodec):
    """Relative error 2^-11 inside +-65504, at least 2^-25 absolute; beyond, it saturates."""

    name = "fp16"
    dtype = torch.float16


class BFloat16(CastCodec):
    """Relative error 2^-8 (half an ulp, and saturation at the very end of float32)."""

    name = "bf16"
    dtype = torch.bfloat16


class Int8(Codec):
    """One float32 scale a row, then one signed byte a value; error at most 0.51 absmax / 127."""

    name = "int8"

    def row_bytes(self, width: int) -> int:
        return 4 + width

    def encode(self, x: Tensor) -> Tensor:
        x, absmax = _checked(x)
        # Rounded towards zero, so that 127 scales never overflow; never subnormal, so that it divides.
        scale = torch.nextafter(absmax / 127, absmax.new_zeros(())).clamp(min=_TINY).unsqueeze(1)
        values = (x / scale).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), values.view(torch.uint8)], dim=1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        _check_rows(rows, self.row_bytes(width), self.name)
        scale = rows[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return rows[:, 4:].view(torch.int8) * scale


# The 16 quantiles of a normal distribution, of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
_NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class NormalFloat4(Codec):
    """Blocks of 64 values, 4 bits each; the block scales are quantised as well.

    A row is [absmax float32][one byte a block][two values a byte]. Block b is scaled by
    absmax 2^(-byte_b / 16): a logarithmic scale, since in many transformers a few outlying dimensions are a
    thousand times larger than the rest, and a linear one would leave the other blocks without resolution.
    Error of a value: at most 0.16 times the larger of its block's absmax and absmax / 2^15.9.
    """

    name = "nf4"
    block = 64
    _steps = 16

    def __init__(self) -> None:
        levels = torch.tensor(_NF4_LEVELS)
        self._middles = (levels[1:] + levels[:-1]) / 2
        byte = torch.arange(256)
        # Both values of a byte side by side in one 8-byte element: one look-up decodes two values.
        self._pairs = torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1).view(torch.float64).flatten()
        self._scales = torch.exp2(-byte / self._steps)

    def row_bytes(self, width: int) -> int:
        return 4 + self._blocks(width) + (width + 1) // 2

    def encode(self, x: Tensor) -> Tensor:
        x, absmax = _checked(x)
        rows, width = x.shape
        count = self._blocks(width)
        blocks = torch.nn.functional.pad(x, (0, count * self.block - width)).view(rows, count, self.block)
        absmax = absmax.clamp(min=_TINY).unsqueeze(1)
        relative = (blocks.abs().amax(2) / absmax).clamp(min=2.0**-20)
        powers = (-self._steps * relative.log2()).floor_().clamp_(0, 255).to(torch.uint8)
        scales = absmax * self._scales.to(x.device)[powers.int()]
        codes = torch.bucketize(blocks / scales.unsqueeze(2), self._middles.to(x.device), out_int32=True)
        codes = codes.to(torch.uint8).flatten(1)[:, : width + width % 2]
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return torch.cat([absmax.view(torch.uint8), powers, packed], dim=1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        _check_rows(rows, self.row_bytes(width), self.name)
        count = self._blocks(width)
        absmax = rows[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        scales = absmax * self._scales.to(rows.device)[rows[:, 4 : 4 + count].int()]
        codes = rows[:, 4 + count :].int()
        values = torch.take(self._pairs.to(rows.device), codes.long()).view(torch.float32)
        return values[:, :width] * scales.repeat_interleave(self.block, dim=1)[:, :width]

    def _blocks(self, width: int) -> int:
        return -(-width // self.block)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), Float16(), BFloat16(), Int8(), NormalFloat4())}


def codec_names() -> tuple[str, ...]:
    """Names that :func:`get_codec` knows."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec called ``name``.

    Raises
    ------
    ConfigError
        There is no such codec.
    """
    try:
        return _CODECS[name]
    except (KeyError, TypeError):
        raise ConfigError(f"codec {name!r} is unknown; choose one of {', '.join(_CODECS)}") from None


def decode_states(codec: Codec, rows: Tensor, taps: int, width: int) -> Tensor:
    """Decode the rows of tokens.

    Parameters
    ----------
    rows : Tensor
        uint8 [tokens, taps * row_bytes(width)], taps side by side.

    Returns
    -------
    Tensor
        float32 [tokens, taps, width].

    Raises
    ------
    PayloadError
        The rows have another dtype or size.
    """
    size = codec.row_bytes(width)
    _check_rows(rows, taps * size, codec.name)
    return codec.decode(rows.reshape(-1, size), width).view(-1, taps, width)


def _checked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float32 and the largest magnitude of each, [rows]; refuses what is not finite."""
    if x.ndim != 2 or x.shape[1] < 1 or not x.is_floating_point():
        raise PayloadError(f"a codec encodes float rows [rows, width >= 1]; got {x.dtype} of shape {tuple(x.shape)}")
    x = x.detach().float()
    absmax = x.abs().amax(1)
    bad = ~torch.isfinite(absmax)
    if bool(bad.any()):
        raise NonFiniteRowError(int(bad.nonzero()[0]), len(x))
    return x, absmax


def _check_rows(rows: Tensor, size: int, name: str) -> None:
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] != size:
        raise PayloadError(f"{name} rows must be uint8 [rows, {size}]; got {rows.dtype} of shape {tuple(rows.shape)}")
