"""What a device answers: its profile, its activations, the quality of a side network."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flower_plugin.clients import activations, evaluation
from flower_plugin.clients.activations import collect_activations
from flower_plugin.clients.evaluation import evaluate_side_tuned
from flower_plugin.clients.profile import profile
from flwr.app import Context, RecordDict

from flower_plugin.backbone import Backbone
from flower_plugin.config import RunConfig, parse_run_config
from flower_plugin.errors import CacheError, ConfigError
from flower_plugin.messages import ActivationReply, ActivationRequest, EvaluateRequest, Profile, ProfileRequest
from flower_plugin.side.network import SideNetwork, SideNetworkConfig
from flower_plugin.side.packing import pack_network
from flower_plugin.side.shipment import unpack

TAPS = (0, 2)
NAMES = ("fresh", "rotten")


@pytest.fixture
def context(tmp_path, write_reviews) -> Context:
    data = write_reviews("data.jsonl", range(12))
    node_config = {"data-path": str(data), "device-dir": str(tmp_path / "device")}
    return Context(1, 1, node_config, RecordDict(), {})


def config_of(backbone: Path, **changes) -> RunConfig:
    values = {"backbone": str(backbone), "data": "data.jsonl", "max-length": 24, "codec": "fp32"}
    return parse_run_config(values | {key.replace("_", "-"): value for key, value in changes.items()})


def ask(config: RunConfig, context: Context, found: Profile, wanted, names=NAMES) -> ActivationReply:
    request = ActivationRequest(
        config=config, fingerprint=found.fingerprint, taps=TAPS, label_names=names, wanted=tuple(wanted)
    )
    return collect_activations(request, context)


def sent(reply: ActivationReply) -> list[bytes]:
    limits = {"budget_bytes": 1 << 30, "max_samples": 1000, "target_limit": 1000}
    return list(unpack(reply.payload, reply.index, codec="fp32", taps=2, width=32, **limits).digests)


@pytest.mark.parametrize("max_length", [64, 65])
def test_more_tokens_than_the_model_has_positions_for_are_refused(tiny_bert, context, max_length):
    request = ProfileRequest(config=config_of(tiny_bert, max_length=max_length))
    if max_length == 64:
        assert profile(request, context).digests
        return
    with pytest.raises(ConfigError, match=r"'max-length' = 65, .*positions for 64 tokens.*lower 'max-length' to 64"):
        profile(request, context)


def test_the_longest_allowed_text_goes_through(tiny_bert, context):
    Path(context.node_config["data-path"]).write_text(
        json.dumps({"text": "film " * 500, "label": "fresh", "split": "train"}) + "\n"
    )
    config = config_of(tiny_bert, max_length=64)
    found = profile(ProfileRequest(config=config), context)
    assert found.truncated == 1
    assert sent(ask(config, context, found, found.digests)) == list(found.digests)


def test_computed_positions_have_no_limit(tiny_llama, context):
    request = ProfileRequest(config=config_of(tiny_llama, max_length=4096, task="causal-lm"))
    assert profile(request, context).digests


def test_every_wanted_sample_is_sent_to_come_or_refused(tiny_bert, context):
    config = config_of(tiny_bert, byte_budget_mb=0.002)
    found = profile(ProfileRequest(config=config), context)
    strangers = [bytes([number]) * 16 for number in range(3)]
    left, arrived = [*strangers, *found.digests], []
    while left:
        reply = ask(config, context, found, left)
        now = sent(reply)
        assert len(left) == len(now) + len(reply.refused) + reply.remaining
        assert list(reply.refused) == [digest for digest in strangers if digest in left]
        arrived += now
        left = [digest for digest in left if digest not in now and digest not in reply.refused]
    assert sorted(arrived) == sorted(found.digests)
    assert len(found.digests) > reply.remaining == 0


def test_samples_of_unknown_classes_are_refused(tiny_bert, context):
    config = config_of(tiny_bert)
    found = profile(ProfileRequest(config=config), context)
    reply = ask(config, context, found, found.digests, names=("fresh", "other"))
    assert len(sent(reply)) == len(reply.refused) == len(found.digests) // 2
    assert set(reply.refused) == set(found.digests) - set(sent(reply))


def test_samples_that_are_deleted_meanwhile_are_refused(tiny_bert, context):
    config = config_of(tiny_bert)
    found = profile(ProfileRequest(config=config), context)
    file = Path(context.node_config["data-path"])
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:6]))
    reply = ask(config, context, found, found.digests)
    arrived = sent(reply)
    assert len(arrived) == 6
    assert reply.refused == tuple(digest for digest in found.digests if digest not in arrived)


def test_samples_larger_than_a_message_are_refused(tiny_bert, context):
    config = config_of(tiny_bert, byte_budget_mb=0.0002)
    found = profile(ProfileRequest(config=config), context)
    reply = ask(config, context, found, found.digests)
    assert (sent(reply), reply.remaining, reply.refused) == ([], 0, found.digests)


def test_activations_that_are_not_finite_are_refused(tiny_bert, context, monkeypatch):
    own = Backbone.forward_taps

    def broken(self, *arguments):
        states = own(self, *arguments)
        states[0][0] = float("nan")
        return states

    monkeypatch.setattr(Backbone, "forward_taps", broken)
    config = config_of(tiny_bert, device_batch_size=100)
    found = profile(ProfileRequest(config=config), context)
    reply = ask(config, context, found, found.digests)
    assert len(reply.refused) == 1
    assert {*sent(reply), *reply.refused} == set(found.digests)


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024)])
def test_peak_memory_is_in_the_units_of_the_platform(monkeypatch, platform, unit):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(activations.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert activations._peak_bytes() == 7 * unit


def test_costs_are_finite(tiny_bert, context):
    config = config_of(tiny_bert)
    found = profile(ProfileRequest(config=config), context)
    costs = ask(config, context, found, found.digests).costs
    assert np.isfinite(list(costs.values())).all()
    assert 10 < costs["device_peak_mb"] < 100_000


def evaluate(config: RunConfig, context: Context):
    found = profile(ProfileRequest(config=config), context)
    network = SideNetwork(SideNetworkConfig(width=32, taps=TAPS, num_labels=2))
    request = EvaluateRequest(
        config=config, fingerprint=found.fingerprint, taps=TAPS, label_names=NAMES, network=pack_network(network)
    )
    return evaluate_side_tuned(request, context).metrics


def test_held_out_samples_are_stored_chunk_by_chunk(tiny_bert, context, monkeypatch):
    sizes = []
    own = evaluation.collect

    def watched(backbone, examples, *arguments):
        sizes.append(len(examples))
        return own(backbone, examples, *arguments)

    monkeypatch.setattr(evaluation, "collect", watched)
    monkeypatch.setattr(evaluation, "CHUNK_BYTES", 1000)
    first = evaluate(config_of(tiny_bert), context)
    assert (first["num-examples"], first["forwarded"]) == (6, 6)
    assert (sum(sizes), max(sizes)) == (6, 3)
    assert evaluate(config_of(tiny_bert), context)["forwarded"] == 0


def test_a_sample_larger_than_a_chunk_is_evaluated(tiny_bert, context, monkeypatch):
    monkeypatch.setattr(evaluation, "CHUNK_BYTES", 1)
    assert evaluate(config_of(tiny_bert), context)["num-examples"] == 6


def test_a_quota_that_is_too_small_is_named_before_any_work(tiny_llama, context, monkeypatch):
    rows = [{"text": f"film {'film ' * 400} plot " * 2 + "a " * number, "split": "test"} for number in range(12)]
    Path(context.node_config["data-path"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    context.node_config["held-out-quota-gb"] = 0.0011
    config = config_of(tiny_llama, max_length=900, task="causal-lm")
    found = profile(ProfileRequest(config=config), context)
    monkeypatch.setattr(evaluation, "collect", lambda *_: pytest.fail("it forwards samples"))
    network = SideNetwork(SideNetworkConfig(width=32, taps=TAPS))
    request = EvaluateRequest(
        config=config, fingerprint=found.fingerprint, taps=TAPS, label_names=(), network=pack_network(network)
    )
    with pytest.raises(CacheError, match=r"12 held-out samples need .* GB; raise 'held-out-quota-gb'"):
        evaluate_side_tuned(request, context)


@pytest.mark.parametrize("quota", [0, -1, "much", True, float("nan"), float("inf"), 1e-9])
def test_a_bad_quota_is_named(tiny_bert, context, quota):
    context.node_config["held-out-quota-gb"] = quota
    with pytest.raises(ConfigError, match="held-out-quota-gb"):
        evaluate(config_of(tiny_bert), context)
