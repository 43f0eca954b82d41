"""The vocabulary: what goes in comes out, and what comes in is checked."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flower_plugin.config import RunConfig
from flower_plugin.errors import DeviceError, PayloadError
from flower_plugin.messages import (
    ActivationReply,
    ActivationRequest,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    HeadReply,
    Profile,
    ProfileRequest,
)

CONFIG = RunConfig(backbone="x", learning_rate=0.5, label_names="a,b")
PROFILE = Profile(
    tenant="device-1",
    order=3,
    plugin_version="1",
    fingerprint="f" * 32,
    model_type="bert",
    num_blocks=2,
    hidden_size=8,
    vocab_size=10,
    template="t",
    digests=(b"0" * 16, b"1" * 16),
    num_test=1,
    label_names=("a", "ü"),
)
REPLY = ActivationReply(
    tenant="device-1",
    remaining=0,
    refused=(),
    payload=np.arange(5, dtype=np.uint8),
    index=np.zeros(0, np.uint8),
    costs={"device_seconds": 1.5},
)


@pytest.mark.parametrize(
    "message",
    [
        ProfileRequest(config=CONFIG),
        PROFILE,
        ActivationRequest(config=CONFIG, fingerprint="f", taps=(0, 2), label_names=(), wanted=(b"1" * 16,)),
        REPLY,
        EvaluateRequest(config=CONFIG, fingerprint="f", taps=(1,), label_names=("a",), network=np.ones(3, np.uint8)),
        EvaluateReply(tenant="device-t", metrics={"loss": 0.5}),
        HeadReply(head=np.ones(3, np.uint8)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_round_trip_keeps_everything(message):
    again = type(message).from_records(message.to_records())
    for name in type(message).model_fields:
        np.testing.assert_equal(getattr(again, name), getattr(message, name))


def test_a_failure_becomes_an_error_with_its_reason():
    with pytest.raises(DeviceError, match="no memory"):
        Profile.from_records(Failure(reason="no memory").to_records())


def test_another_version_is_named():
    records = PROFILE.to_records()
    records["fields"]["schema"] = 99
    with pytest.raises(PayloadError, match="version 99; install the same"):
        Profile.from_records(records)


def test_another_kind_of_message_is_refused():
    with pytest.raises(PayloadError, match="expected ActivationReply"):
        ActivationReply.from_records(PROFILE.to_records())


def test_an_empty_message_is_refused():
    with pytest.raises(PayloadError, match="no ConfigRecord"):
        Profile.from_records(RecordDict())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "../../etc/passwd"),
        ("tenant", ""),
        ("order", -1),
        ("num_blocks", 0),
        ("num_blocks", 10**9),
        ("digests", [b"0" * 16, b"0" * 16]),
        ("label_names", ["x" * 300]),
        ("tenant", ".."),
        ("num_test", 10**12),
        ("digests", [b"short"]),
        ("hidden_size", "many"),
        ("no_such_field", 1),
    ],
)
def test_a_field_out_of_range_is_named(field, value):
    records = PROFILE.to_records()
    records["fields"][field] = value
    with pytest.raises(PayloadError, match=field):
        Profile.from_records(records)


@pytest.mark.parametrize(
    "array",
    [
        Array(np.zeros((2, 2), np.uint8)),
        Array(np.zeros(3, np.float32)),
        Array(dtype="uint8", shape=(5,), stype="numpy.ndarray", data=b"no array"),
    ],
    ids=["two dimensions", "floats", "garbage"],
)
def test_an_odd_array_is_refused(array):
    records = REPLY.to_records()
    records["arrays"] = ArrayRecord({"payload": array, "index": Array(np.zeros(1, np.uint8))})
    with pytest.raises(PayloadError, match="payload"):
        ActivationReply.from_records(records)


def test_a_missing_array_is_named():
    records = REPLY.to_records()
    records["arrays"] = ArrayRecord({"payload": Array(np.zeros(1, np.uint8))})
    with pytest.raises(PayloadError, match="'index' is missing"):
        ActivationReply.from_records(records)


def test_a_run_config_from_a_newer_server_is_refused():
    records = ProfileRequest(config=CONFIG).to_records()
    fields = dict(records["fields"]) | {"config.from-the-future": 1}
    with pytest.raises(PayloadError, match="from-the-future"):
        ProfileRequest.from_records(RecordDict({"fields": ConfigRecord(fields)}))
