"""Bytes of activations: by codec and by which tokens travel."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flower_plugin.backbone import load_backbone
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import TapRule, collect
from flower_plugin.side.examples import Example
from flower_plugin.side.shipment import pack
from flower_plugin.side.taps import plan_taps
from flower_plugin.side.tokens import LOSS_TOKENS

from .settings import Federation, reviews
from .side import run_side

SMALL = {"train_samples": 400, "test_samples": 40, "num_rounds": 1}


@dataclass(frozen=True)
class AllTokens:
    """Bytes of a message with every real token of the samples, and the mean number of tokens."""

    size: int
    mean_length: float


def wire_bytes(folder: Path, codec: str, **changes: object) -> int:
    """Bytes of all phones' activations, read off their replies."""
    name = "-".join([codec, *map(str, changes.values())])
    return run_side(reviews(0, **SMALL, codec=codec, **changes), folder / name).wire_bytes


def all_tokens(codec: str) -> AllTokens:
    """The same samples as `wire_bytes` sends, had every token of each been sent (by the same code)."""
    federation: Federation = reviews(0, **SMALL)
    backbone = load_backbone(federation.config.backbone, federation.config.task)
    rule = TapRule(plan_taps(federation.config.taps, backbone.num_blocks), LOSS_TOKENS, get_codec(codec))
    size, lengths = 0, []
    for phone in range(federation.phones):
        examples = [_whole(example) for example in federation.examples(phone, backbone.tokenizer).train]
        payload, index = pack(collect(backbone, examples, rule, federation.config.device_batch_size).shipment)
        size += len(payload) + len(index)
        lengths += [len(example.input_ids) for example in examples]
    return AllTokens(size, float(np.mean(lengths)))


def _whole(example: Example) -> Example:
    positions = np.arange(len(example.input_ids), dtype=np.int32)
    return replace(example, loss_positions=positions, targets=example.input_ids)
