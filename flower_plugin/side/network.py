"""The side network: a token-local ladder beside a frozen backbone, trained from tapped activations alone.

Form (Ladder Side-Tuning, Sung et al. 2022): every tap is normalised and projected down to a narrow side
stream, a gate mixes it in, a residual block works at the narrow width, and one up-projection, zero at the
start, adds what was learned to the backbone's last hidden state. Nothing looks across tokens, so a cached row
is all it ever needs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from flower_plugin.errors import ConfigError

_MAX_WIDTH = 1 << 20
_MAX_TAPS = 1024
_MAX_LABELS = 1 << 20
_SAFE = 1e15  # the squares of a row's values add up to a float32


@dataclass(frozen=True)
class SideNetworkConfig:
    """Shape of a side network.

    Parameters
    ----------
    width : int
        Width of one row of states: hidden size of the backbone times `vectors`.
    taps : tuple of int
        Tapped block indices, ascending; the last one is the backbone's last block.
    num_labels : int or None
        Classes of the new classification head; None for a causal LM, which keeps the backbone's head.
    vectors : int
        Pooled vectors joined in one row ("mean+max" has two); each is normalised by itself: scales differ.
    reduction : int
        The side stream is `width // reduction` wide; 8 is the value of the LST paper.
    side_width : int or None
        Width of the side stream when it should not follow from `reduction`.
    expansion : int
        Hidden width of a residual block, in side widths.
    dropout : float
        Dropout on the side stream, in [0, 1).
    input_dropout : float
        Dropout on the normalised taps and on what the classification head reads, in [0, 1). Half is right for
        a classifier, whose taps are wide and samples few; a causal LM wants 0 to 0.3.
    gate_temperature : float
        T of the gate sigmoid(a / T); small values let the gate move with small steps of `a` (LST uses 0.1).

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """

    width: int
    taps: tuple[int, ...]
    num_labels: int | None = None
    vectors: int = 1
    reduction: int = 8
    side_width: int | None = None
    expansion: int = 2
    dropout: float = 0.1
    input_dropout: float = 0.5
    gate_temperature: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        _require_int("width", self.width, 1, _MAX_WIDTH)
        _require_int("vectors", self.vectors, 1, self.width)
        _require_int("reduction", self.reduction, 1, _MAX_WIDTH)
        _require_int("expansion", self.expansion, 1, 64)
        _require_int("number of taps", len(self.taps), 1, _MAX_TAPS)
        for tap in self.taps:
            _require_int("tap", tap, 0, _MAX_WIDTH)
        if list(self.taps) != sorted(set(self.taps)):
            raise ConfigError(f"taps must be ascending block indices without repeats, got {self.taps}.")
        if self.width % self.vectors:
            raise ConfigError(f"width {self.width} is not a multiple of its {self.vectors} pooled vectors.")
        if self.num_labels is not None:
            _require_int("num_labels", self.num_labels, 1, _MAX_LABELS)
        if self.side_width is not None:
            _require_int("side_width", self.side_width, 1, _MAX_WIDTH)
        _require_number("dropout", self.dropout, 0.0, 1.0)
        _require_number("input_dropout", self.input_dropout, 0.0, 1.0)
        _require_number("gate_temperature", self.gate_temperature, 1e-4, 1e4)

    @property
    def stream_width(self) -> int:
        """Width of the side stream."""
        return self.side_width if self.side_width is not None else max(1, self.width // self.reduction)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, the inverse of `from_dict`."""
        return {**asdict(self), "taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from JSON values; unknown or missing names raise `ConfigError`."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        missing = sorted({"width", "taps"} - set(values))
        if unknown or missing:
            raise ConfigError(f"Side network config: unknown keys {unknown}, missing keys {missing}.")
        if not isinstance(values["taps"], list | tuple):
            raise ConfigError(f"taps must be a list of block indices, got {values['taps']!r}.")
        return cls(**values)


class SideBlock(nn.Module):
    """Residual feed-forward block at the width of the side stream: z + W2 gelu(W1 norm(z)).

    W2 starts at zero: the ladder starts as a mean of its projections and bends only as far as the data asks.
    """

    def __init__(self, width: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, expansion * width)
        self.contract = nn.Linear(expansion * width, width)
        self.dropout = nn.Dropout(dropout)
        _zero(self.contract)

    def forward(self, stream: Tensor) -> Tensor:
        """Map a stream [tokens, side] to a stream of the same shape."""
        inner = nn.functional.gelu(self.expand(self.norm(stream)))
        mapped: Tensor = stream + self.dropout(self.contract(inner))
        return mapped


class VectorNorm(nn.GroupNorm):
    """LayerNorm of each of the joined vectors of a row by itself, with a trained scale and shift a feature.

    Scale and shift can start from data: `calibrate` sets them so that every feature has mean 0 and deviation
    1 over the rows it is shown. Transformers' few features with huge values would otherwise drown the others
    (Timkey & van Schijndel 2021, "All Bark and No Bite").
    """

    _FLOOR = 0.02  # of the mean deviation: features that hardly vary must not be blown up

    def __init__(self, width: int, vectors: int) -> None:
        super().__init__(vectors, width)

    @torch.no_grad()
    def calibrate(self, states: Tensor) -> None:
        """Set scale and shift from rows [tokens, width], unless these give no finite ones."""
        plain = nn.functional.group_norm(states.float(), self.num_groups, eps=self.eps)
        deviation = plain.std(0, correction=0)
        scale = 1 / (deviation + self._FLOOR * deviation.mean()).clamp_min(1e-6)
        shift = -plain.mean(0) * scale
        if bool((scale.isfinite() & shift.isfinite()).all()):
            self.weight.copy_(scale)
            self.bias.copy_(shift)


class Tap(nn.Module):
    """Normalise one tapped activation and project it down to the side stream."""

    def __init__(self, config: SideNetworkConfig) -> None:
        super().__init__()
        self.norm = VectorNorm(config.width, config.vectors)
        self.input_dropout = nn.Dropout(config.input_dropout)
        self.down = nn.Linear(config.width, config.stream_width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, state: Tensor) -> Tensor:
        """Map a state [tokens, width] to [tokens, side]."""
        projected: Tensor = self.dropout(self.down(self.input_dropout(self.norm(state))))
        return projected


class ClassificationHead(nn.Module):
    """The new head of a classifier: normalise the pooled vectors, then a linear layer that starts at zero."""

    def __init__(self, config: SideNetworkConfig, num_labels: int) -> None:
        super().__init__()
        self.norm = VectorNorm(config.width, config.vectors)
        self.dropout = nn.Dropout(config.input_dropout)
        self.project = nn.Linear(config.width, num_labels)
        _zero(self.project)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the adapted last hidden state [samples, width] to logits [samples, num_labels]."""
        logits: Tensor = self.project(self.dropout(self.norm(hidden)))
        return logits


class SideNetwork(nn.Module):
    """Ladder over the tapped activations of a frozen backbone.

    Parameters
    ----------
    config : SideNetworkConfig
        Its shape.

    Notes
    -----
    z0 = Down0(h0), then z <- g z + (1 - g) Down_i(h_i) with g = sigmoid(a_i / T), and z <- Block_i(z) after
    each tap (Sung et al. 2022, LST). The up-projection starts at zero: the first pass is the backbone's own.
    """

    def __init__(self, config: SideNetworkConfig) -> None:
        super().__init__()
        self.config = config
        side = config.stream_width
        self.taps = nn.ModuleList(Tap(config) for _ in config.taps)
        self.blocks = nn.ModuleList(SideBlock(side, config.expansion, config.dropout) for _ in config.taps)
        # g = i / (i + 1): the stream starts as the mean of all taps. Equal gates would leave the first of six
        # taps a share of 1/32, and the middle blocks often know most.
        self.gates = nn.Parameter(config.gate_temperature * torch.arange(1.0, len(config.taps)).log())
        self.up = nn.Linear(side, config.width)
        _zero(self.up)
        self.classifier = None if config.num_labels is None else ClassificationHead(config, config.num_labels)

    def forward(self, states: Tensor) -> Tensor:
        """Adapt the backbone's last hidden state.

        Parameters
        ----------
        states : Tensor
            [tokens, taps, width], the tapped activations; the last tap is the backbone's last hidden state.

        Returns
        -------
        Tensor
            Logits [tokens, num_labels] for classification; for a causal LM the adapted last hidden state
            [tokens, width], which the backbone's own head turns into logits.

        Raises
        ------
        ConfigError
            If the shape does not fit the config.
        """
        self._check(states)
        hidden: Tensor = states[:, -1] + self.delta(states)
        return hidden if self.classifier is None else self.classifier(hidden)

    def delta(self, states: Tensor) -> Tensor:
        """Return what is added to the last hidden state: [tokens, taps, width] -> [tokens, width]."""
        gates = torch.sigmoid(self.gates / self.config.gate_temperature)
        stream = self.blocks[0](self.taps[0](states[:, 0]))
        for index in range(1, len(self.taps)):
            gate = gates[index - 1]
            stream = gate * stream + (1 - gate) * self.taps[index](states[:, index])
            stream = self.blocks[index](stream)
        delta: Tensor = self.up(stream)
        return delta

    def calibrate(self, states: Tensor) -> None:
        """Start all norms from the usable rows, two or more, of states [tokens, taps, width]; 32 are good."""
        states = states[self.usable(states)]
        if len(states) < 2:
            return
        for index, tap in enumerate(self.taps):
            assert isinstance(tap, Tap)
            tap.norm.calibrate(states[:, index])
        if self.classifier is not None:
            self.classifier.norm.calibrate(states[:, -1])

    @torch.no_grad()
    def usable(self, states: Tensor) -> Tensor:
        """Return which rows can be normalised (finite, and their squares too): [tokens, ...] -> bool [tokens]."""
        self._check(states)
        low, high = states.aminmax() if len(states) else (0.0, 0.0)
        if low > -_SAFE and high < _SAFE:
            return torch.ones(len(states), dtype=torch.bool, device=states.device)
        one = self.config.width // self.config.vectors
        return states.float().reshape(len(states), -1, one).var(-1, correction=0).isfinite().all(1)

    def _check(self, states: Tensor) -> None:
        expected = (len(self.config.taps), self.config.width)
        if states.ndim != 3 or tuple(states.shape[1:]) != expected:
            raise ConfigError(
                f"Side network expects states of shape [tokens, {expected[0]}, {expected[1]}], "
                f"got {list(states.shape)}: check taps and pooled vectors."
            )


def new_side_network(config: SideNetworkConfig, seed: int) -> SideNetwork:
    """Build a side network whose start is fixed by `seed`, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SideNetwork(config)


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"Side network: {name} must be a whole number from {low} to {high}, got {value!r}.")


def _require_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
        raise ConfigError(f"Side network: {name} must be a number from {low} to below {high}, got {value!r}.")
