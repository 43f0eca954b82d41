"""``evaluate.side_tuned``: the side network on the device's own held-out samples."""

import time
from collections.abc import Sequence

from flwr.app import Context

from flower_plugin.backbone import load_backbone, load_head, load_tokenizer
from flower_plugin.config import RunConfig
from flower_plugin.errors import DataError
from flower_plugin.messages import EvaluateReply, EvaluateRequest
from flower_plugin.side.cache import ActivationCache
from flower_plugin.side.cache_records import Namespace
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import TapRule, collect
from flower_plugin.side.examples import Example
from flower_plugin.side.network import SideNetwork
from flower_plugin.side.objective import Head
from flower_plugin.side.packing import unpack_network
from flower_plugin.side.reader import CacheReader
from flower_plugin.side.recipe import SampleKey, TrainConfig
from flower_plugin.side.trainer import Trainer

from .backbones import require_fingerprint
from .device import ConfigValue, Device, device_config, open_device
from .samples import load_samples

HELD_OUT = "held-out"
QUOTA_GB = "held-out-quota-gb"
DEFAULT_QUOTA_GB = 4.0
LOSSLESS = "fp32"


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
    missing = set(cache.missing(namespace, [example.digest for example in examples]))
    new = [example for example in examples if example.digest in missing]
    if new:
        backbone = load_backbone(config.backbone, config.task)
        rule = TapRule(namespace.taps, namespace.token_rule, get_codec(namespace.codec))
        cache.put(namespace, collect(backbone, new, rule, config.device_batch_size).shipment)
    return len(new)


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


def _quota(node_config: dict[str, ConfigValue]) -> int:
    return int(float(node_config.get(QUOTA_GB, DEFAULT_QUOTA_GB)) * 1e9)
