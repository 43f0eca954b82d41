"""Gathering: which vectors of a block's output [batch, length, width] are kept."""

from collections.abc import Callable

import torch

from flower_plugin.errors import ConfigError

from .examples import Collated

Gather = Callable[[torch.Tensor], torch.Tensor]

LOSS_TOKENS = "loss"
POOLINGS = ("cls", "last", "mean", "max")


def parse_pooling(rule: str) -> tuple[str, ...]:
    """Return the parts of a pooling rule such as "mean" or "mean+max".

    Raises
    ------
    ConfigError
        For an unknown or a repeated part.
    """
    parts = tuple(part.strip() for part in rule.split("+"))
    if not set(parts) <= set(POOLINGS) or len(set(parts)) != len(parts):
        raise ConfigError(f'pooling = {rule!r}: use one of {", ".join(POOLINGS)}, or several joined by "+"')
    return parts


def pooled_width(rule: str, hidden_size: int) -> int:
    """Return the width of one gathered vector: parts of the rule times the hidden size."""
    return hidden_size if rule == LOSS_TOKENS else hidden_size * len(parse_pooling(rule))


def make_gather(rule: str, batch: Collated) -> Gather:
    """Return the function hidden [batch, length, width] -> float32 [rows, width'] of a rule and a batch.

    "loss" gives one row for each loss position, in the order of the batch's targets; a pooling rule gives one
    row for each sample, its pooled vectors side by side. Padding on either side never takes part. The result
    is a copy: nothing of ``hidden`` stays alive.
    """
    if rule == LOSS_TOKENS:
        return gather_positions(batch.rows, batch.columns)
    return gather_pooled(rule, batch.inputs["attention_mask"])


def gather_positions(rows: torch.Tensor, columns: torch.Tensor) -> Gather:
    """Gather the vectors at (rows[i], columns[i]): [batch, length, width] -> float32 [tokens, width]."""

    def gather(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[rows.to(hidden.device), columns.to(hidden.device)].float()

    return gather


def gather_pooled(rule: str, attention_mask: torch.Tensor) -> Gather:
    """Pool each sample's real tokens: [batch, length, width] -> float32 [batch, parts * width].

    "cls" is the first real token, "last" the last, "mean" and "max" go over all of them (special tokens too).
    """
    parts = parse_pooling(rule)
    real = attention_mask.bool()
    if not bool(real.any(dim=1).all()):
        raise ConfigError("a sample without a single real token cannot be pooled")
    length = real.shape[1]
    first = real.int().argmax(dim=1)
    last = length - 1 - real.flip(1).int().argmax(dim=1)
    padding = None if bool(real.all()) else ~real.unsqueeze(-1)
    counts = real.sum(dim=1, keepdim=True)

    def pool(part: str, hidden: torch.Tensor) -> torch.Tensor:
        if part in ("cls", "last"):
            chosen = (first if part == "cls" else last).to(hidden.device)
            return hidden[torch.arange(len(hidden), device=hidden.device), chosen].float()
        # Filled, not multiplied by the mask: a padding row may hold NaN or inf, and 0 * NaN is NaN.
        neutral = 0.0 if part == "mean" else -torch.inf
        kept = hidden if padding is None else hidden.masked_fill(padding.to(hidden.device), neutral)
        if part == "max":
            return kept.amax(dim=1).float()
        return kept.sum(dim=1, dtype=torch.float32) / counts.to(hidden.device)

    def gather(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([pool(part, hidden) for part in parts], dim=-1)

    return gather
