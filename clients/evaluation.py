"""``evaluate.side_tuned``: the side network on the device's own held-out samples."""

import math
import time
from collections.abc import Mapping, Sequence

from flwr.app import Context

from flower_plugin.backbone import Backbone, load_backbone, load_head, load_tokenizer
from flower_plugin.config import RunConfig
from flower_plugin.errors import CacheError, ConfigError, DataError
from flower_plugin.messages import EvaluateReply, EvaluateRequest
from flower_plugin.side.cache import ActivationCache
from flower_plugin.side.cache_records import Namespace
from flower_plugin.side.cache_store import MIN_QUOTA_BYTES
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import TapRule, collect, encoded_bytes, fit_budget
from flower_plugin.side.examples import Example
from flower_plugin.side.network import SideNetwork
from flower_plugin.side.objective import Head
from flower_plugin.side.packing import unpack_network
from flower_plugin.side.reader import CacheReader
from flower_plugin.side.recipe import SampleKey, TrainConfig
from flower_plugin.side.shipment import HEADER_BYTES
from flower_plugin.side.trainer import Trainer

from .backbones import require_fingerprint
from .device import ConfigValue, Device, device_config, open_device
from .samples import load_samples

HELD_OUT = "held-out"
QUOTA_GB = "held-out-quota-gb"
DEFAULT_QUOTA_GB = 4.0
LOSSLESS = "fp32"
CHUNK_BYTES = 32_000_000
"""Activations that are held in memory before they are stored."""


def evaluate_side_tuned(request: EvaluateRequest, context: Context) -> EvaluateReply:
    """Evaluate a side network; held-out samples are forwarded the first time only, their activations kept."""
    started = time.perf_counter()
    config = device_config(request.config, context.node_config)
    device = open_device(context.node_config)
    require_fingerprint(config.backbone, request.fingerprint)
    tokenizer = load_tokenizer(config.backbone)
    test = load_samples(config, context, device, tokenizer, request.label_names).test()
    if not test.kept:
        raise DataError("the device has no held-out sample to evaluate on; see 'test-fraction'")
    namespace = Namespace(
        tenant=device.tenant,
        fingerprint=request.fingerprint,
        template=test.template_id,
        max_length=config.max_length,
        taps=request.taps,
        token_rule=config.token_rule,
        codec=LOSSLESS,
    )
    network = unpack_network(request.network)
    with ActivationCache.open(device.folder / HELD_OUT, _quota(context.node_config)) as cache:
        forwarded = _forward_missing(cache, namespace, test.kept, config)
        head = load_head(config.backbone) if config.task == "causal-lm" else None
        metrics = _evaluate(
            network, CacheReader(cache, lambda _: namespace, network.config.width), device, test.kept, head
        )
    metrics |= {"forwarded": float(forwarded), "device_seconds": time.perf_counter() - started}
    return EvaluateReply(tenant=device.tenant, metrics=metrics)


def _forward_missing(
    cache: ActivationCache, namespace: Namespace, examples: Sequence[Example], config: RunConfig
) -> int:
    """Forward the samples whose activations are not kept yet; how many they were."""
    missing = set(cache.missing(namespace, [example.digest for example in examples]))
    new = [example for example in examples if example.digest in missing]
    if not new:
        return 0
    backbone = load_backbone(config.backbone, config.task)
    rule = TapRule(namespace.taps, namespace.token_rule, get_codec(namespace.codec))
    need = sum(encoded_bytes(example, rule, backbone.hidden_size) for example in examples)
    if need > cache.capacity_bytes:
        raise _too_small(f"{len(examples)} held-out samples need {need / 1e9:.3g} GB")
    stored = _store_in_chunks(cache, namespace, new, backbone, rule, config.device_batch_size)
    kept = [example.digest for example in examples if example.digest not in missing]
    lost = cache.missing(namespace, [*kept, *stored])
    if lost:
        raise _too_small(f"{len(lost)} of {len(examples)} held-out samples had to make room for others")
    return len(new)


def _store_in_chunks(
    cache: ActivationCache,
    namespace: Namespace,
    examples: Sequence[Example],
    backbone: Backbone,
    rule: TapRule,
    batch_size: int,
) -> list[bytes]:
    """Forward and store, never more at once than a chunk or the largest sample; the digests that were stored."""
    largest = max(encoded_bytes(example, rule, backbone.hidden_size) for example in examples)
    budget = max(CHUNK_BYTES, largest + HEADER_BYTES)
    stored: list[bytes] = []
    later = list(examples)
    while later:
        now, later = fit_budget(later, rule, backbone.hidden_size, budget)
        shipment = collect(backbone, now, rule, batch_size).shipment
        try:
            cache.put(namespace, shipment)
        except CacheError as error:
            raise _too_small(str(error)) from error
        stored += shipment.digests
    return stored


def _too_small(reason: str) -> CacheError:
    return CacheError(
        f"the device cannot keep its held-out activations: {reason}; raise {QUOTA_GB!r} in the node config,"
        " or hold out fewer samples ('test-fraction', 'test-samples-per-device')"
    )


def _evaluate(
    network: SideNetwork, reader: CacheReader, device: Device, examples: Sequence[Example], head: Head | None
) -> dict[str, float]:
    keys = [SampleKey(device.tenant, example.digest) for example in examples]
    result = Trainer(network, reader, TrainConfig(), head=head).evaluate(keys)
    return {
        "num-examples": float(result.samples),
        "tokens": float(result.tokens),
        "loss": result.loss,
        "accuracy": result.accuracy,
    }


def _quota(node_config: Mapping[str, ConfigValue]) -> int:
    """The quota of the held-out activations in bytes."""
    value = node_config.get(QUOTA_GB, DEFAULT_QUOTA_GB)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(float(value)) or float(value) * 1e9 < MIN_QUOTA_BYTES:
        raise ConfigError(
            f"node config: {QUOTA_GB}={value!r}; give a number of GB above 0, at least {MIN_QUOTA_BYTES / 1e9:.4f}"
        )
    return int(float(value) * 1e9)
