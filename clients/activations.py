"""``train.activations``: stage one, one shift of it."""

import resource
import sys
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
    """Forward the wanted samples, as many as one message may carry, and reply with what the loss needs.

    ``refused`` names every wanted sample that will never come: gone or changed since the device was asked, of a
    class that is not the run's, larger than a message may be, or with activations that are not finite.
    """
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
    collected = collect(backbone, now, rule, config.device_batch_size, ProgressLog(len(now)))
    payload, index = pack(collected.shipment)
    coming = {*collected.shipment.digests, *(example.digest for example in later)}
    return ActivationReply(
        tenant=device.tenant,
        remaining=len(later),
        refused=tuple(digest for digest in dict.fromkeys(request.wanted) if digest not in coming),
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
        "device_peak_mb": _peak_bytes() / 1e6,
    }


def _peak_bytes() -> int:
    """Largest memory of this process so far; macOS counts it in bytes, Linux in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class ProgressLog:
    """Logs every tenth of the samples.

    Parameters
    ----------
    total : int
        Samples of the shift.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._step = max(1, total // 10)
        self._next = self._step

    def __call__(self, done: int) -> None:
        """Take note of the number of samples done."""
        if done >= self._next:
            log(INFO, "Forwarded %s of %s samples", done, self._total)
            self._next = done + self._step
