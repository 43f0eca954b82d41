"""``train.activations``: stage one, one shift of it."""

import resource
import time
from logging import INFO

from flwr.app import Context
from flwr.common.logger import log

from flower_plugin.backbone import load_backbone
from flower_plugin.messages import ActivationReply, ActivationRequest
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import Collected, TapRule, collect, fit_budget
from flower_plugin.side.shipment import pack

from .backbones import require_fingerprint
from .device import device_config, open_device
from .samples import load_samples


def collect_activations(request: ActivationRequest, context: Context) -> ActivationReply:
    """Forward the wanted samples, as many as one message may carry, and reply with what the loss needs."""
    config = device_config(request.config, context.node_config)
    device = open_device(context.node_config)
    require_fingerprint(config.backbone, request.fingerprint)
    backbone = load_backbone(config.backbone, config.task)
    samples = load_samples(config, context, device, backbone.tokenizer, request.label_names)
    wanted = set(request.wanted)
    examples = [example for example in samples.train().kept if example.digest in wanted]
    rule = TapRule(request.taps, config.token_rule, get_codec(config.codec))
    now, later = fit_budget(examples, rule, backbone.hidden_size, config.byte_budget)
    started, cpu_started = time.perf_counter(), time.process_time()
    collected = collect(backbone, now, rule, config.device_batch_size, _log_progress(len(now)))
    payload, index = pack(collected.shipment)
    sent = {example.digest for example in (*now, *later)}
    too_large = tuple(example.digest for example in examples if example.digest not in sent)
    return ActivationReply(
        tenant=device.tenant,
        remaining=len(later),
        refused=collected.refused + too_large,
        payload=payload,
        index=index,
        costs=_costs(collected, time.perf_counter() - started, time.process_time() - cpu_started),
    )


def _costs(collected: Collected, seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {
        "device_seconds": seconds,
        "device_cpu_seconds": cpu_seconds,
        "forwarded_tokens": float(collected.forwarded_tokens),
        "sent_tokens": float(sum(collected.shipment.tokens)),
        "device_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _log_progress(total: int):  # type: ignore[no-untyped-def]
    """Log every tenth of the samples."""
    step = max(1, total // 10)
    state = {"next": step}

    def tell(done: int) -> None:
        if done >= state["next"]:
            log(INFO, "Forwarded %s of %s samples", done, total)
            state["next"] = done + step

    return tell
