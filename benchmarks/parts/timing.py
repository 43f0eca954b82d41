"""What taps, codec and packing add to a plain forward pass, as the median of paired measurements."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from flower_plugin.backbone import Backbone, load_backbone
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import TapRule, collect, pad_id
from flower_plugin.side.examples import Collated, Example, collate, length_buckets
from flower_plugin.side.shipment import pack
from flower_plugin.side.taps import plan_taps

from .settings import Federation


def tap_overhead(federation: Federation, pairs: int = 12, samples: int = 128) -> list[float]:
    """Ratios (stage one / plain forward pass) of ``pairs`` back-to-back measurements on the same batches.

    The plain pass is given ready-made batches; stage one makes them, taps, encodes and packs. Which of the
    two comes first alternates, so that a machine that gets slower or faster favours neither.
    """
    config = federation.config
    backbone = load_backbone(config.backbone, config.task)
    examples = federation.examples(0, backbone.tokenizer).train[:samples]
    rule = TapRule(plan_taps(config.taps, backbone.num_blocks), config.token_rule, get_codec(config.codec))
    batches = _batches(backbone, examples, config.device_batch_size)

    def stage_one() -> None:
        pack(collect(backbone, examples, rule, config.device_batch_size).shipment)

    def plain() -> None:
        _forward(backbone, batches)

    stage_one(), plain()
    return [_pair(stage_one, plain, first=number % 2 == 0) for number in range(pairs)]


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def _pair(measured: Callable[[], None], reference: Callable[[], None], first: bool) -> float:
    times = {}
    for name in ("measured", "reference") if first else ("reference", "measured"):
        begin = time.process_time()
        (measured if name == "measured" else reference)()
        times[name] = time.process_time() - begin
    return times["measured"] / times["reference"]


def _batches(backbone: Backbone, examples: Sequence[Example], size: int) -> list[Collated]:
    buckets = length_buckets(examples, size)
    return [collate([examples[i] for i in bucket], pad_id(backbone)) for bucket in buckets]


@torch.inference_mode()
def _forward(backbone: Backbone, batches: Sequence[Collated]) -> None:
    for batch in batches:
        backbone.body(**batch.inputs)
