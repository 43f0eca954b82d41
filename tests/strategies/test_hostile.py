"""What a bad device can say, and that the others never notice."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flower_plugin.strategies import EcoMobiLLM
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

from flower_plugin.messages import ACTIVATIONS, EVALUATE, PROFILE
from flower_plugin.side.shipment import Shipment, pack

sys.path.insert(0, str(Path(__file__).parent))
from federation import make_grid, run_config

BAD = 101


@pytest.fixture
def files(write_reviews: Callable[..., Path]) -> dict[int, Path]:
    return {device: write_reviews(f"d{device}.jsonl", range(8 * device, 8 * device + 8)) for device in range(3)}


def on(message_type, change):
    """A fault that changes the bad device's replies of one type."""

    def fault(reply, node):
        if node == BAD and reply.metadata.message_type == message_type:
            change(reply.content)
        return reply

    return fault


def fields(**values):
    def change(content):
        content["fields"] = ConfigRecord({**content["fields"], **values})

    return change


def arrays(**values):
    def change(content):
        kept = dict(content["arrays"])
        content["arrays"] = ArrayRecord({**kept, **{name: Array(make(kept)) for name, make in values.items()}})

    return change


def run(tmp_path, backbone, files, fault, **changes):
    events = []
    config = run_config(tmp_path, backbone, num_rounds=2, **changes)
    strategy = EcoMobiLLM(config, observe=lambda event, values: events.append((event, values)))
    result = strategy.start(make_grid(tmp_path, files, config, fault))
    reasons = [values["reason"] for event, values in events if event in ("fault", "refused")]
    return strategy.report(), reasons, result


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fields(tenant="device-somebody"), "answers for another device"),
        (fields(tenant="../x"), "tenant"),
        (fields(remaining=-1), "remaining"),
        (fields(kind="Profile"), "expected ActivationReply"),
        (arrays(payload=lambda kept: kept["payload"].numpy()[:-1]), "payload"),
        (arrays(payload=lambda kept: np.zeros(10**6, np.uint8)), ""),
        (arrays(index=lambda kept: kept["index"].numpy()[::-1].copy()), ""),
        (arrays(payload=lambda kept: kept["payload"].numpy().astype(np.float32)), "uint8"),
    ],
)
def test_a_bad_shift_costs_only_its_own_samples(tmp_path, tiny_bert, files, change, reason):
    report, reasons, _ = run(tmp_path, tiny_bert, files, on(ACTIVATIONS, change))
    assert report["samples"] == 24
    assert reasons
    assert all(reason in text for text in reasons)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fields(hidden_size=64), "hidden size 64 instead of 32"),
        (fields(num_blocks=1), "num blocks 1 instead of 3"),
        (fields(template="other"), "template other"),
        (fields(label_names=["x" * 1000]), "label_names"),
        (fields(digests=[b"0" * 16] * 2), "twice"),
        (fields(tenant=".."), "tenant"),
        (fields(fingerprint="0" * 32), "backbone"),
    ],
)
def test_a_lying_profile_is_refused(tmp_path, tiny_bert, files, change, reason):
    report, reasons, _ = run(tmp_path, tiny_bert, files, on(PROFILE, change))
    assert report["samples"] == 24
    assert len(reasons) == 1
    assert reason in reasons[0]


def shipment(content) -> Shipment:
    from flower_plugin.side.shipment import unpack

    config = content["fields"]
    assert config["kind"] == "ActivationReply"
    packed = {name: content["arrays"][name].numpy() for name in ("payload", "index")}
    return unpack(**packed, codec="fp32", taps=3, width=32, budget_bytes=10**8, max_samples=1000, target_limit=2)


def repacked(change):
    """Change a shipment and pack it with a true checksum."""

    def apply(content):
        payload, index = pack(change(shipment(content)))
        content["arrays"] = ArrayRecord({"payload": Array(payload), "index": Array(index)})

    return apply


def without_some(sent: Shipment) -> Shipment:
    return Shipment(
        sent.codec, sent.taps, sent.width, sent.digests[:5], sent.tokens[:5], sent.targets[:5], sent.rows[:5]
    )


def huge(sent: Shipment) -> Shipment:
    rows = np.full((len(sent.rows), sent.taps * sent.width), 3e38, np.float32).view(np.uint8)
    return Shipment(sent.codec, sent.taps, sent.width, sent.digests, sent.tokens, sent.targets, rows)


def of_a_stranger(sent: Shipment) -> Shipment:
    digests = (b"s" * 16, *sent.digests[1:])
    return Shipment(sent.codec, sent.taps, sent.width, digests, sent.tokens, sent.targets, sent.rows)


def test_samples_left_out_without_a_word_are_a_fault(tmp_path, tiny_bert, files):
    fault = on(ACTIVATIONS, repacked(without_some))
    report, reasons, _ = run(tmp_path, tiny_bert, files, fault, codec="fp32")
    assert "left out 7 samples without a word" in reasons[0]
    assert report["samples"] >= 29


def test_samples_that_nobody_asked_for_are_refused(tmp_path, tiny_bert, files):
    report, reasons, _ = run(tmp_path, tiny_bert, files, on(ACTIVATIONS, repacked(of_a_stranger)), codec="fp32")
    assert report["samples"] == 24
    assert "not asked for" in reasons[0]


def test_huge_activations_poison_nobody(tmp_path, tiny_bert, files):
    report, _, result = run(tmp_path, tiny_bert, files, on(ACTIVATIONS, repacked(huge)), codec="fp32")
    assert report["samples"] == 24
    assert report["skipped_steps"] == 0
    assert np.isfinite(result.train_metrics_clientapp[2]["loss"])


@pytest.mark.parametrize(
    "lie",
    [
        {"tokens": 1e300, "loss": 1e200, "accuracy": 1.0},
        {"num-examples": 1e9},
        {"accuracy": 2.0},
        {"loss": float("nan")},
        {"loss": -1.0},
    ],
)
def test_one_device_does_not_decide_the_quality(tmp_path, tiny_bert, files, lie):
    def change(content):
        content["metrics"] = MetricRecord({**content["metrics"], **lie})

    _, reasons, result = run(tmp_path, tiny_bert, files, on(EVALUATE, change))
    assert result.evaluate_metrics_clientapp[2]["num-examples"] == 8
    assert len(reasons) == 2


def test_costs_that_are_no_numbers_leave_the_sums_alone(tmp_path, tiny_bert, files):
    def change(content):
        lies = {"device_seconds": float("nan"), "forwarded_tokens": float("inf"), "event": 1.0, "time": 2.0}
        content["metrics"] = MetricRecord({**content["metrics"], **lies})

    report, _, _ = run(tmp_path, tiny_bert, files, on(ACTIVATIONS, change))
    assert report["samples"] == 36
    assert np.isfinite(report["device_seconds"])
    assert np.isfinite(report["forwarded_tokens"])


def test_a_sample_that_cannot_be_sent_is_asked_for_once(tmp_path, tiny_llama, write_chat):
    files = {0: write_chat("c.jsonl", range(12))}
    # One token of three taps takes 3 * 32 * 4 bytes: the longer responses do not fit.
    config = run_config(
        tmp_path, tiny_llama, task="causal-lm", codec="fp32", byte_budget_mb=0.0015, refresh_every=1, num_rounds=3
    )
    strategy = EcoMobiLLM(config)
    strategy.start(make_grid(tmp_path, files, config))
    report = strategy.report()
    assert 0 < report["samples"] < 9
    assert report["stage_two_device_messages"] == 0
