"""The whole method over an in-memory grid: real tiny backbones, real handlers, real cache."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_plugin.strategies import EcoMobiLLM
from flower_plugin.strategies.run_state import RunState
from flwr.app import Array, ArrayRecord, Message

from flower_plugin.errors import BackboneError, CacheError, DeviceError
from flower_plugin.messages import ACTIVATIONS, EVALUATE

sys.path.insert(0, str(Path(__file__).parent))
from federation import make_grid, run_config

WriteFile = Callable[..., Path]


@pytest.fixture
def files(write_reviews: WriteFile) -> dict[int, Path]:
    return {device: write_reviews(f"d{device}.jsonl", range(8 * device, 8 * device + 8)) for device in range(3)}


def count(grid, message_type: str) -> int:
    return sum(kind == message_type for kind, _ in grid.log)


def packed(result) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def test_devices_work_once_and_stage_two_asks_nobody(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    grid = make_grid(tmp_path, files, config)
    strategy = EcoMobiLLM(config)
    result = strategy.start(grid)
    assert count(grid, ACTIVATIONS) == 3
    assert count(grid, EVALUATE) == 6
    report = strategy.report()
    assert report["stage_two_device_messages"] == 0
    assert report["samples"] == 36
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert sorted(result.evaluate_metrics_clientapp) == [0, 4]


def test_it_learns(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, num_rounds=40, learning_rate=5e-3, holdout=0.0)
    result = EcoMobiLLM(config).start(make_grid(tmp_path, files, config))
    after = result.evaluate_metrics_clientapp[max(result.evaluate_metrics_clientapp)]
    assert after["accuracy"] > 0.8
    assert after["loss"] < result.evaluate_metrics_clientapp[0]["loss"]


def test_the_same_run_twice_gives_the_same_weights(tmp_path, tiny_bert, files):
    results = []
    for name in ("a", "b"):
        config = run_config(tmp_path / name, tiny_bert)
        grid = make_grid(tmp_path / name, files, config, first_node=100 if name == "a" else 700)
        results.append(packed(EcoMobiLLM(config).start(grid)))
    assert results[0] == results[1]


def test_a_second_run_asks_the_devices_for_nothing(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    first = packed(EcoMobiLLM(config).start(make_grid(tmp_path, files, config)))
    grid = make_grid(tmp_path, files, config, first_node=500)
    second = packed(EcoMobiLLM(config).start(grid))
    assert count(grid, ACTIVATIONS) == 0
    assert first == second


def test_new_samples_are_the_only_ones_forwarded(tmp_path, tiny_bert, files, write_reviews):
    config = run_config(tmp_path, tiny_bert)
    EcoMobiLLM(config).start(make_grid(tmp_path, files, config))
    write_reviews("d0.jsonl", range(0, 10))
    strategy = EcoMobiLLM(config)
    grid = make_grid(tmp_path, files, config)
    strategy.start(grid)
    assert [node for kind, node in grid.log if kind == ACTIVATIONS] == [100]
    assert strategy.report()["forwarded_samples"] == 4


def test_refresh_rounds_ask_for_new_samples(tmp_path, tiny_bert, files, write_reviews):
    config = run_config(tmp_path, tiny_bert, refresh_every=2, num_rounds=3)
    grid = make_grid(tmp_path, files, config)
    seen = []

    def arrive_late(server_round, arrays):
        if server_round == 2:
            write_reviews("d1.jsonl", range(8, 18))
        seen.append(count(grid, ACTIVATIONS))

    strategy = EcoMobiLLM(config)
    strategy.start(grid, evaluate_fn=arrive_late)
    assert seen == [3, 3, 4]
    assert strategy.report()["samples"] == 40


def test_a_small_budget_makes_several_shifts(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, byte_budget_mb=0.001)
    shifts = []
    strategy = EcoMobiLLM(config, observe=lambda event, fields: shifts.append(fields) if event == "shift" else None)
    strategy.start(make_grid(tmp_path, files, config))
    assert len(shifts) >= 6
    assert max(fields["bytes"] for fields in shifts) <= 1000
    assert strategy.report()["samples"] == 36


def test_personal_scope_gives_each_device_its_own_network(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, scope="personal")
    result = EcoMobiLLM(config).start(make_grid(tmp_path, files, config))
    networks = packed(result)
    assert len(networks) == 3
    assert len(set(networks.values())) == 3


def test_personal_network_equals_a_run_of_that_device_alone(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, scope="personal")
    together = packed(EcoMobiLLM(config).start(make_grid(tmp_path, files, config)))
    alone = packed(EcoMobiLLM(config).start(make_grid(tmp_path, {0: files[0]}, config)))
    (tenant,) = alone
    assert alone[tenant] == together[tenant]


def test_a_causal_lm_starts_as_the_backbone_and_gets_better(tmp_path, tiny_llama, write_chat):
    files = {device: write_chat(f"c{device}.jsonl", range(12 * device, 12 * device + 12)) for device in range(2)}
    config = run_config(tmp_path, tiny_llama, task="causal-lm", num_rounds=12, learning_rate=5e-3, codec="fp32")
    result = EcoMobiLLM(config).start(make_grid(tmp_path, files, config))
    losses = {r: m["loss"] for r, m in result.evaluate_metrics_clientapp.items()}
    assert losses[0] == pytest.approx(backbone_loss(tiny_llama, files), rel=1e-5)
    assert losses[12] < losses[0] - 0.1


def backbone_loss(folder: Path, files: dict[int, Path]) -> float:
    """Mean loss of the plain model over the response tokens of the held-out pairs."""
    import json

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for path in files.values():
        for row in map(json.loads, path.read_text().splitlines()):
            if row["split"] == "test":
                from flower_plugin.data.sample import Sample
                from flower_plugin.side.examples import build_examples

                sample = Sample(prompt=row["prompt"], response=row["response"])
                (example,) = build_examples([sample], tokenizer, "causal-lm", max_length=24, key=b"").kept
                with torch.no_grad():
                    logits = model(torch.tensor(example.input_ids[None].astype(np.int64))).logits[0]
                rows = logits[torch.tensor(example.loss_positions.astype(np.int64))]
                targets = torch.tensor(example.targets.astype(np.int64))
                total += torch.nn.functional.cross_entropy(rows, targets, reduction="sum").item()
                tokens += len(targets)
    return total / tokens


def test_a_server_without_a_checkpoint_gets_the_head_from_a_device(tmp_path, tiny_llama, write_chat):
    files = {0: write_chat("c.jsonl", range(12))}
    changes = {"task": "causal-lm", "num_rounds": 3}
    with_it = run_config(tmp_path, tiny_llama, **changes)
    without = run_config(tmp_path / "other", tiny_llama, server_backbone="none", **changes)
    expected = packed(EcoMobiLLM(with_it).start(make_grid(tmp_path, files, with_it)))
    assert packed(EcoMobiLLM(without).start(make_grid(tmp_path, files, without))) == expected


def test_held_out_samples_are_forwarded_once(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    grid = make_grid(tmp_path, files, config)
    result = EcoMobiLLM(config).start(grid)
    assert result.evaluate_metrics_clientapp[0]["forwarded"] == 12
    assert result.evaluate_metrics_clientapp[4]["forwarded"] == 0


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    expected = packed(EcoMobiLLM(config).start(make_grid(tmp_path, files, config)))
    folder = tmp_path / "run"
    folder.mkdir()

    def stop_after_two(server_round, arrays):
        if server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EcoMobiLLM(config, folder).start(make_grid(tmp_path, files, config), evaluate_fn=stop_after_two)
    grid = make_grid(tmp_path, files, config, first_node=900)
    strategy = EcoMobiLLM(config, folder)
    result = strategy.start(grid)
    assert count(grid, ACTIVATIONS) == 0
    assert sorted(result.train_metrics_clientapp) == [3, 4]
    assert packed(result) == expected


def test_a_run_goes_on_when_all_devices_left_after_stage_one(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    folder = tmp_path / "run"
    folder.mkdir()
    EcoMobiLLM(config, folder).start(make_grid(tmp_path, files, config), num_rounds=1)
    grid = make_grid(tmp_path, {}, config)
    strategy = EcoMobiLLM(config, folder)
    strategy.start(grid, num_rounds=4)
    assert strategy.report()["epochs"] == 4
    assert strategy.report()["samples"] == 36


def test_a_device_that_fails_is_named_and_the_others_go_on(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    events = []

    def die(reply: Message, node: int) -> Message | None:
        from flwr.app import Error

        if node == 101 and reply.metadata.message_type == ACTIVATIONS:
            return Message(Error(8, "the process died"), reply_to=reply)
        return reply

    def swap(reply: Message, node: int) -> Message | None:
        answer = die(reply, node)
        if answer is not reply:
            answer.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            answer.metadata.__dict__["_src_node_id"] = node
        return answer

    strategy = EcoMobiLLM(config, observe=lambda event, fields: events.append((event, fields)))
    strategy.start(make_grid(tmp_path, files, config, swap))
    faults = [fields for event, fields in events if event == "fault"]
    assert {fields["node"] for fields in faults} == {101}
    assert "the process died" in faults[0]["reason"]
    assert strategy.report()["samples"] == 24


def test_a_device_that_recovers_is_asked_again(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    failures = []

    def fail_once(reply: Message, node: int) -> Message | None:
        if node == 101 and reply.metadata.message_type == ACTIVATIONS and not failures:
            failures.append(node)
            arrays = reply.content["arrays"]
            reply.content["arrays"] = ArrayRecord(
                {"payload": Array(arrays["payload"].numpy()[:-5]), "index": arrays["index"]}
            )
        return reply

    strategy = EcoMobiLLM(config)
    strategy.start(make_grid(tmp_path, files, config, fail_once))
    assert failures == [101]
    assert strategy.report()["faults"] == 1
    assert strategy.report()["samples"] == 36


def test_a_device_with_another_backbone_is_refused(tmp_path, tiny_bert, tiny_llama, files):
    config = run_config(tmp_path, tiny_bert)
    grid = make_grid(tmp_path, files, config)
    grid.contexts[102].node_config["backbone"] = str(tiny_llama)
    events = []
    strategy = EcoMobiLLM(config, observe=lambda event, fields: events.append((event, fields)))
    strategy.start(grid)
    refusals = [fields for event, fields in events if event == "refused"]
    assert [fields["node"] for fields in refusals] == [102]
    assert "backbone" in refusals[0]["reason"]
    assert strategy.report()["samples"] == 24


def test_a_device_without_data_is_named(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    (tmp_path / "empty.jsonl").write_text("")
    grid = make_grid(tmp_path, {**files, 3: tmp_path / "empty.jsonl"}, config)
    events = []
    strategy = EcoMobiLLM(config, observe=lambda event, fields: events.append((event, fields)))
    strategy.start(grid)
    assert [fields["node"] for event, fields in events if event == "refused"] == [103]
    assert strategy.report()["samples"] == 36


def test_two_devices_with_one_identity_are_told_apart(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    grid = make_grid(tmp_path, files, config)
    grid.contexts[102].node_config["device-dir"] = str(tmp_path / "device-1")
    events = []
    EcoMobiLLM(config, observe=lambda event, fields: events.append((event, fields))).start(grid)
    (refusal,) = [fields for event, fields in events if event == "refused"]
    assert "same identity" in refusal["reason"]


def test_a_poisoned_evaluation_is_left_out(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)

    def lie(reply: Message, node: int) -> Message:
        if node == 100 and reply.metadata.message_type == EVALUATE:
            reply.content["metrics"]["num-examples"] = 1e9
        return reply

    result = EcoMobiLLM(config).start(make_grid(tmp_path, files, config, lie))
    assert result.evaluate_metrics_clientapp[4]["num-examples"] == 8


def test_nobody_to_work_with_is_an_error(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, min_devices=5)
    with pytest.raises(DeviceError, match=r"3 of at least 5 devices.*min-devices"):
        EcoMobiLLM(config).start(make_grid(tmp_path, files, config))


def test_a_wrong_backbone_is_an_error_before_any_device_is_asked(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tmp_path / "nowhere")
    grid = make_grid(tmp_path, files, config)
    with pytest.raises(BackboneError, match="nowhere"):
        EcoMobiLLM(config).start(grid)
    assert grid.log == []


def test_an_evicted_sample_is_asked_for_again(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    strategy = EcoMobiLLM(config)
    strategy.start(make_grid(tmp_path, files, config))
    from flower_plugin.side.cache import ActivationCache

    tenant = sorted(strategy._state.ledger.digests)[0]
    with ActivationCache.open(tmp_path / "cache", 50_000_000) as cache:
        cache.forget(tenant)
    again = EcoMobiLLM(config)
    grid = make_grid(tmp_path, files, config)
    again.start(grid)
    assert count(grid, ACTIVATIONS) == 1
    assert again.report()["forwarded_samples"] == 12


def test_a_cache_that_is_too_small_costs_samples_not_the_run(tmp_path, tiny_bert, write_reviews, caplog):
    files = {
        device: write_reviews(f"big{device}.jsonl", range(300 * device, 300 * device + 300)) for device in range(2)
    }
    config = run_config(
        tmp_path,
        tiny_bert,
        cache_quota_gb=0.00105,
        byte_budget_mb=0.2,
        codec="fp32",
        num_rounds=2,
        pooling="mean+max+cls+last",
    )
    strategy = EcoMobiLLM(config)
    strategy.start(make_grid(tmp_path, files, config))
    assert 0 < strategy.report()["samples"] < 900
    assert strategy.report()["forwarded_samples"] == 900
    assert "raise 'cache-quota-gb'" in caplog.text


def test_a_cache_that_cannot_be_written_stops_the_run_and_loses_nothing(tmp_path, tiny_bert, files, monkeypatch):
    from flower_plugin.side.cache import ActivationCache

    config, put, calls = run_config(tmp_path, tiny_bert), ActivationCache.put, []

    def full_disk(self, namespace, shipment):
        calls.append(namespace)
        if len(calls) == 2:
            raise CacheError("No space left on device")
        return put(self, namespace, shipment)

    with monkeypatch.context() as patch:
        patch.setattr(ActivationCache, "put", full_disk)
        # Devices keep their held-out samples in a cache of their own: only the server's disk is full.
        patch.setattr("flower_plugin.strategies.run_state.RunState.admit", _without_tests(RunState.admit))
        with pytest.raises(CacheError, match="No space left"):
            EcoMobiLLM(config).start(make_grid(tmp_path, files, config))
    strategy = EcoMobiLLM(config)
    strategy.start(make_grid(tmp_path, files, config))
    assert strategy.report()["forwarded_samples"] == 24


def _without_tests(admit):
    def changed(self, found):
        devices = tuple(
            replace(device, profile=device.profile.model_copy(update={"num_test": 0})) for device in found.devices
        )
        admit(self, replace(found, devices=devices))

    return changed
