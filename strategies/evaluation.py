"""Evaluation on the devices: who is asked, and what their figures come to."""

import math
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING

from flwr.app import Message
from flwr.common.logger import log

from flower_plugin.config import RunConfig
from flower_plugin.errors import DeviceError, FlowerPluginError, PayloadError
from flower_plugin.messages import EVALUATE, EvaluateReply, EvaluateRequest, instruction

from .exchange import Answer
from .observe import Observe
from .roster import Device
from .run_state import RunState

MOST_LOSS = 1e4


def evaluation_messages(state: RunState, group: str) -> list[Message]:
    """A message to each device that has held-out samples and a side network that serves it."""
    return [
        instruction(_request(state, device), EVALUATE, device.node_id, group, state.config.evaluate_timeout)
        for device in state.roster.devices
        if device.profile.num_test and state.tuning.serves(device.tenant)
    ]


def gather_evaluations(
    answers: Iterable[Answer], devices: Sequence[Device], config: RunConfig, observe: Observe
) -> dict[str, float] | None:
    """Mean of the devices' figures; a device that failed or whose figures cannot be is left out and named."""
    most_tokens = config.max_length if config.task == "causal-lm" else 1
    limits = {device.node_id: device.profile.num_test for device in devices}
    good = []
    for answer in answers:
        try:
            if answer.reply is None:
                raise DeviceError(answer.problem)
            metrics = EvaluateReply.from_records(answer.reply.content).metrics
            good.append(check_evaluation(metrics, limits[answer.node_id], most_tokens))
        except FlowerPluginError as error:
            observe("fault", {"node": answer.node_id, "reason": f"evaluation: {error}"})
            log(WARNING, "The evaluation of node %s is left out: %s", answer.node_id, error)
    return {"devices": float(len(good)), **mean_metrics(good)} if good else None


def check_evaluation(metrics: Mapping[str, float], most_samples: int, most_tokens: int) -> dict[str, float]:
    """A device's figures, checked: they decide means over all devices.

    Parameters
    ----------
    metrics : Mapping
        What the device says.
    most_samples : int
        Its held-out samples.
    most_tokens : int
        Loss tokens that one sample can have.

    Raises
    ------
    PayloadError
        A figure is missing, not finite, or out of its range.
    """
    for name in ("num-examples", "tokens", "loss", "accuracy"):
        if not math.isfinite(metrics.get(name, math.nan)):
            raise PayloadError(f"{name} = {metrics.get(name)} is missing or not finite")
    samples = metrics["num-examples"]
    if not 1 <= samples <= most_samples:
        raise PayloadError(f"num-examples = {samples:g}, but it has {most_samples} held-out samples")
    if not samples <= metrics["tokens"] <= samples * most_tokens:
        raise PayloadError(f"tokens = {metrics['tokens']:g} cannot be, with {samples:g} samples")
    if not 0 <= metrics["accuracy"] <= 1 or not 0 <= metrics["loss"] <= MOST_LOSS:
        raise PayloadError("its accuracy or loss is out of range")
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Loss and accuracy weighted by tokens; counts and seconds summed."""
    tokens = sum(part["tokens"] for part in metrics)
    means = {name: sum(part[name] * part["tokens"] for part in metrics) / tokens for name in ("loss", "accuracy")}
    sums = ("num-examples", "tokens", "forwarded", "device_seconds")
    return means | {name: sum(part.get(name, 0.0) for part in metrics) for name in sums}


def _request(state: RunState, device: Device) -> EvaluateRequest:
    network = state.tuning.packed(state.tuning.owner(device.tenant))
    return EvaluateRequest(config=state.config, network=network, **state.intake.plan)
