"""What a run came to, in figures."""

from typing import Any

from flower_plugin.side.codec import get_codec
from flower_plugin.side.tokens import pooled_width

from .run_state import RunState
from .tally import Tally


def summarise(state: RunState, tally: Tally) -> dict[str, Any]:
    """The figures of a run, as JSON values.

    ``bytes_per_sample_everything`` is what the tapped blocks' outputs of all real tokens would take in fp16,
    ``bytes_per_sample_fp16`` what the loss tokens alone take in fp16, both without framing.
    """
    intake, samples = state.intake, max(tally.samples, 1)
    row = get_codec("fp16").row_bytes
    everything = tally.forwarded_tokens * len(intake.taps) * row(state.ledger.hidden_size)
    loss_tokens = tally.sent_tokens * len(intake.taps) * row(pooled_width(intake.token_rule, state.ledger.hidden_size))
    rounds = sorted(tally.evaluations)
    before = tally.evaluations[rounds[0]] if rounds and rounds[0] == 0 else {}
    after = tally.evaluations[rounds[-1]] if rounds and rounds[-1] > 0 else {}
    return {
        "task": state.config.task,
        "codec": intake.codec,
        "taps": list(intake.taps),
        "scope": state.config.scope,
        "devices": len(state.roster.devices),
        "refused_devices": tally.refused_devices,
        "faults": tally.faults,
        "samples": sum(len(keys) for keys in state.cached_samples().values()),
        "epochs": state.tuning.epoch,
        "best_epoch": state.tuning.best_epoch,
        "accuracy_before": before.get("accuracy"),
        "accuracy_after": after.get("accuracy"),
        "loss_before": before.get("loss"),
        "loss_after": after.get("loss"),
        "forwarded_samples": tally.samples,
        "forwarded_tokens": tally.forwarded_tokens,
        "bytes_received": tally.bytes_received,
        "bytes_per_sample": tally.bytes_received / samples,
        "bytes_per_sample_fp16": loss_tokens / samples,
        "bytes_per_sample_everything": everything / samples,
        "device_seconds": sum(tally.device_seconds.values()),
        "server_seconds": tally.server_seconds,
        "cache_read_seconds": tally.read_seconds,
        "stage_two_device_messages": tally.stage_two_messages,
        "skipped_steps": tally.skipped_steps,
        "cache": _cache_figures(state),
    }


def _cache_figures(state: RunState) -> dict[str, int]:
    statistics = state.cache.statistics()
    names = ("samples", "bytes", "hits", "misses", "evictions")
    return {name: getattr(statistics, name) for name in names}
