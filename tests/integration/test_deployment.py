"""The app against a deployment: a real SuperLink, real SuperNodes, real processes that are killed."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flower_plugin

sys.path.insert(0, str(Path(__file__).parent))
from loopback import (
    DEVICES,
    ENVIRONMENT,
    FlowerProcesses,
    Loopback,
    copy_training_rows,
    events,
    is_dead,
    rounds,
    small_run,
    wait_until,
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """A SuperLink and three SuperNodes, started once for all tests of this file."""
    folder = tmp_path_factory.mktemp("federation")
    with pytest.MonkeyPatch.context() as patch, FlowerProcesses(folder / "flower") as flower:
        for key, value in {**ENVIRONMENT, "HOME": str(folder / "home")}.items():
            patch.setenv(key, value)
        loopback = Loopback(flower, folder)
        for device in range(DEVICES):
            loopback.start_device(device)
        yield loopback
        loopback.kill_devices()


@pytest.fixture
def training_data(federation, write_reviews):
    """Give every device new samples, all for training."""

    def give(first: int) -> None:
        for device in range(DEVICES):
            start = first + 8 * device
            copy_training_rows(write_reviews("rows.jsonl", range(start, start + 8)), federation.data_file(device))

    return give


def test_a_run_finishes_with_a_cached_stage_two(federation, tmp_path, tiny_bert, training_data, write_reviews):
    training_data(0)
    # One device has held-out samples; the others are not asked to evaluate.
    shutil.copy(write_reviews("rows.jsonl", range(8)), federation.data_file(0))
    federation.start_run("whole", small_run(tmp_path, tiny_bert))
    output = federation.finish_run("whole")
    (folder,) = (tmp_path / "runs").glob("*")
    assert (folder / "summary.json").exists(), output
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["devices"], summary["samples"], summary["epochs"]) == (DEVICES, 36, 4)
    assert summary["forwarded_samples"] == 36
    assert summary["stage_two_device_messages"] == 0
    assert (summary["faults"], summary["refused_devices"]) == (0, 0)
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    found = events(tmp_path)
    assert rounds(found) == [1, 2, 3, 4]
    assert [event["round"] for event in found if event["event"] == "request"] == [1] * DEVICES
    for picture in ("quality_by_epoch.png", "bytes_per_sample.png", "device_time_by_epoch.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert_usable(tiny_bert, folder / "side_networks" / "global")


def assert_usable(backbone: Path, network: Path) -> None:
    """The exported side network loads and gives class scores."""
    model = flower_plugin.load_side_tuned(str(backbone), network)
    inputs = model.tokenizer(["a great film", "a dull song"], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (2, 2)
    assert torch.isfinite(logits).all()


def test_a_server_app_killed_in_stage_two_goes_on_from_its_cache(federation, tmp_path, tiny_bert, training_data):
    training_data(100)
    federation.start_run("killed", small_run(tmp_path, tiny_bert, num_rounds="100000"))
    wait_until(lambda: max(rounds(events(tmp_path)), default=0) >= 3, "three epochs")
    server_app = federation.server_app()
    server_app.kill()
    wait_until(lambda: is_dead(server_app), "the death of the server app", 30)
    federation.flower.kill("killed")
    before = events(tmp_path)
    reached = max(rounds(before))
    last = reached + 3
    federation.start_run(
        "resumed", small_run(tmp_path, tiny_bert, num_rounds=str(last), resume="true", min_devices="1")
    )
    output = federation.finish_run("resumed")
    after = events(tmp_path)[len(before) :]
    assert after, output
    # The checkpoint is written before the epoch is reported, so an epoch that was not told of may be done.
    assert rounds(after) in (list(range(reached + 1, last + 1)), list(range(reached + 2, last + 1)))
    assert [event for event in after if event["event"] in ("request", "shift", "fault")] == []
    (path,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(path.read_text())
    # The figures are of the whole run: the 36 samples were forwarded before the server app was killed.
    assert (summary["samples"], summary["forwarded_samples"], summary["epochs"]) == (36, 36, last)


@pytest.mark.slow
def test_a_super_node_killed_in_its_shift_is_asked_again_when_it_is_back(
    federation, tmp_path, tiny_bert, training_data
):
    training_data(200)
    settings = small_run(tmp_path, tiny_bert, shift_timeout="60.0", query_timeout="60.0")
    federation.start_run("shift", settings)
    wait_until(lambda: [event for event in events(tmp_path) if event["event"] == "request"], "the start of stage one")
    federation.flower.kill("device-1")
    federation.start_device(1)
    output = federation.finish_run("shift")
    (path,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(path.read_text())
    faults = [event for event in events(tmp_path) if event["event"] == "fault"]
    assert len(faults) == 1, output
    assert summary["samples"] == 36
    assert summary["stage_two_device_messages"] == 0
