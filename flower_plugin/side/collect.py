"""Stage one on a device: one forward pass a sample, of which only the loss tokens' activations are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flower_plugin.backbone import Backbone

from .codec import Codec
from .examples import Example, collate, length_buckets
from .shipment import HEADER_BYTES, LARGEST_ACTIVATION, Shipment, make_shipment
from .tokens import make_gather, pooled_width

Progress = Callable[[int], None]
INDEX_BYTES_A_SAMPLE = 20
INDEX_BYTES_A_TOKEN = 4
"""Digest and token count of a sample, and the target of a token, as a shipment's index holds them."""


@dataclass(frozen=True)
class TapRule:
    """What is kept of a forward pass.

    Attributes
    ----------
    taps : tuple of int
        Tapped blocks, ascending, the last block among them.
    token_rule : str
        ``loss`` for a causal LM, else a pooling such as ``mean+max``.
    codec : Codec
        How the kept vectors are encoded.
    """

    taps: tuple[int, ...]
    token_rule: str
    codec: Codec


@dataclass(frozen=True)
class Collected:
    """What one shift gave.

    Attributes
    ----------
    shipment : Shipment
        Activations of the samples, in the order in which the samples were given.
    refused : tuple of bytes
        Digests of samples whose activations are not finite or far too large; nothing of them is sent.
    forwarded_tokens : int
        Real tokens that went through the backbone.
    """

    shipment: Shipment
    refused: tuple[bytes, ...]
    forwarded_tokens: int


def encoded_bytes(example: Example, rule: TapRule, hidden_size: int) -> int:
    """Bytes that a sample takes in a message, before any work is done for it."""
    width = pooled_width(rule.token_rule, hidden_size)
    row = rule.codec.row_bytes(width) * len(rule.taps)
    return len(example.targets) * (row + INDEX_BYTES_A_TOKEN) + INDEX_BYTES_A_SAMPLE


def fit_budget(
    examples: Sequence[Example], rule: TapRule, hidden_size: int, budget: int
) -> tuple[list[Example], list[Example]]:
    """Part ``examples`` in those that fit ``budget`` bytes, from the first on, and the rest.

    A sample that is larger than the whole budget can never be sent; it is in neither part.
    """
    sizes = [encoded_bytes(example, rule, hidden_size) for example in examples]
    sendable = [(example, size) for example, size in zip(examples, sizes, strict=True) if size + HEADER_BYTES <= budget]
    used, taken = HEADER_BYTES, 0
    for _, size in sendable:
        if used + size > budget:
            break
        used += size
        taken += 1
    return [example for example, _ in sendable[:taken]], [example for example, _ in sendable[taken:]]


def collect(
    backbone: Backbone,
    examples: Sequence[Example],
    rule: TapRule,
    batch_size: int,
    on_progress: Progress | None = None,
) -> Collected:
    """Forward each example once and encode what the loss needs of it.

    Parameters
    ----------
    backbone : Backbone
        Frozen and in eval mode.
    examples : sequence of Example
        The samples of this shift.
    rule : TapRule
        What is kept.
    batch_size : int
        Samples in one forward pass.
    on_progress : callable, optional
        Told the number of samples done so far.

    Returns
    -------
    Collected
        The shipment, and what was left out of it.
    """
    rows: list[torch.Tensor | None] = [None] * len(examples)
    done = 0
    for bucket in length_buckets(examples, batch_size):
        batch = [examples[index] for index in bucket]
        for index, encoded in zip(bucket, _forward(backbone, batch, rule), strict=True):
            rows[index] = encoded
        done += len(bucket)
        if on_progress is not None:
            on_progress(done)
    kept = [index for index, encoded in enumerate(rows) if encoded is not None]
    return Collected(
        shipment=make_shipment(
            rule.codec,
            len(rule.taps),
            pooled_width(rule.token_rule, backbone.hidden_size),
            digests=[examples[index].digest for index in kept],
            rows=[encoded for encoded in rows if encoded is not None],
            targets=[examples[index].targets for index in kept],
        ),
        refused=tuple(examples[index].digest for index in range(len(examples)) if rows[index] is None),
        forwarded_tokens=sum(len(example.input_ids) for example in examples),
    )


@torch.inference_mode()
def _forward(backbone: Backbone, batch: Sequence[Example], rule: TapRule) -> list[torch.Tensor | None]:
    """Encoded rows uint8 [tokens * taps, row bytes] of each sample; None where they cannot be used."""
    padded = collate(batch, pad_id(backbone), "right")
    states = torch.stack(backbone.forward_taps(padded.inputs, rule.taps, make_gather(rule.token_rule, padded)), 1)
    good = _usable_samples(states, padded.tokens_per_example)
    if not all(good):
        states = states.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST_ACTIVATION, LARGEST_ACTIVATION)
    encoded = rule.codec.encode(states.flatten(0, 1)).cpu()
    sizes = [count * len(rule.taps) for count in padded.tokens_per_example]
    parts = torch.split(encoded, sizes)
    return [part if fine else None for part, fine in zip(parts, good, strict=True)]


def pad_id(backbone: Backbone) -> int:
    """The token that fills a batch up; masked, so a tokenizer without one may use any."""
    found = getattr(backbone.tokenizer, "pad_token_id", None)
    return int(found) if found is not None else 0


def _usable_samples(states: torch.Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each sample's rows are finite and no larger than a server takes."""
    low, high = states.aminmax()
    if bool(low >= -LARGEST_ACTIVATION) and bool(high <= LARGEST_ACTIVATION):  # false for NaN
        return [True] * len(tokens)
    ends = torch.tensor(tokens).cumsum(0).tolist()
    rows = (states.flatten(1).abs() <= LARGEST_ACTIVATION).all(dim=1)
    return [bool(rows[end - count : end].all()) for count, end in zip(tokens, ends, strict=True)]
