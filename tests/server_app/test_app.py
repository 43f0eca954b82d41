"""The ServerApp over an in-memory grid: from run config to outputs."""

import json
import sys
from pathlib import Path

import pytest
from flower_plugin.server_app.app import run
from flwr.app import Context, RecordDict

import flower_plugin
from flower_plugin.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies"))
from federation import make_grid, run_config


def context_of(config, **changes):
    values = config.model_dump(by_alias=True) | {key.replace("_", "-"): value for key, value in changes.items()}
    return Context(7, 0, {}, RecordDict(), values)


@pytest.fixture
def files(write_reviews):
    return {device: write_reviews(f"d{device}.jsonl", range(8 * device, 8 * device + 8)) for device in range(2)}


def test_a_run_leaves_all_that_is_promised(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, evaluate_every=2)
    folder = run(make_grid(tmp_path, files, config), context_of(config)).path
    for name in (
        "metrics.jsonl",
        "summary.json",
        "run_config.json",
        "quality_by_epoch.png",
        "bytes_per_sample.png",
        "device_time_by_epoch.png",
        "side_networks/global/side_network.safetensors",
        "side_networks/global/side_config.json",
    ):
        assert (folder / name).stat().st_size > 0, name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["stage_two_device_messages"] == 0
    assert summary["accuracy_after"] is not None
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["round"] for event in events if event["event"] == "epoch"] == [1, 2, 3, 4]
    assert [event["round"] for event in events if event["event"] == "evaluation"] == [0, 2, 4]


def test_what_was_trained_can_be_loaded_and_agrees_with_the_devices(tmp_path, tiny_bert, files):
    import torch

    config = run_config(tmp_path, tiny_bert, num_rounds=20, learning_rate=5e-3, codec="fp32")
    folder = run(make_grid(tmp_path, files, config), context_of(config)).path
    model = flower_plugin.load_side_tuned(str(tiny_bert), folder / "side_networks" / "global")
    rows = [json.loads(line) for path in files.values() for line in path.read_text().splitlines()]
    held_out = [row for row in rows if row["split"] == "test"]
    inputs = model.tokenizer([row["text"] for row in held_out], return_tensors="pt", padding=True)
    labels = torch.tensor([model.label_names.index(row["label"]) for row in held_out])
    with torch.no_grad():
        output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
    summary = json.loads((folder / "summary.json").read_text())
    assert output.loss.item() == pytest.approx(summary["loss_after"], rel=1e-4)
    accuracy = (output.logits.argmax(-1) == labels).float().mean().item()
    assert accuracy == pytest.approx(summary["accuracy_after"])


def test_a_bad_config_stops_before_any_device_is_asked(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert)
    grid = make_grid(tmp_path, files, config)
    with pytest.raises(ConfigError, match="'codec'"):
        run(grid, context_of(config, codec="zip"))
    with pytest.raises(ConfigError, match="'strategy'"):
        run(grid, context_of(config, strategy="strategies:Unknown"))
    assert grid.log == []
    assert not (tmp_path / "runs").exists()


def test_a_strategy_of_the_users_own_is_found(tmp_path, tiny_bert, files, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from flower_plugin.strategies import EcoMobiLLM\n\n\nclass Mine(EcoMobiLLM):\n"
        "    def report(self):\n        return {**super().report(), 'mine': True}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = run_config(tmp_path, tiny_bert, strategy="mine:Mine", num_rounds=1)
    folder = run(make_grid(tmp_path, files, config), context_of(config)).path
    assert json.loads((folder / "summary.json").read_text())["mine"] is True


def test_personal_networks_have_a_folder_each(tmp_path, tiny_bert, files):
    config = run_config(tmp_path, tiny_bert, scope="personal", num_rounds=2)
    folder = run(make_grid(tmp_path, files, config), context_of(config)).path
    assert len(list((folder / "side_networks").glob("device-*/side_network.safetensors"))) == 2
