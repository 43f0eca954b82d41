"""A device's identity and its own view of the run config."""

import multiprocessing
from pathlib import Path

import pytest
from flower_plugin.clients.device import data_options, device_config, open_device

from flower_plugin.config import RunConfig
from flower_plugin.errors import ConfigError


def test_an_identity_outlives_restarts(tmp_path):
    node_config = {"device-dir": str(tmp_path / "d")}
    assert open_device(node_config) == open_device(node_config)


def test_two_folders_are_two_devices(tmp_path):
    tenants = {open_device({"device-dir": str(tmp_path / name)}).tenant for name in "ab"}
    assert len(tenants) == 2


def test_the_secret_is_the_owners_alone(tmp_path):
    open_device({"device-dir": str(tmp_path)})
    assert (tmp_path / "identity").stat().st_mode & 0o077 == 0


def test_simulated_devices_are_told_apart_by_partition():
    first, second = (open_device({"partition-id": k, "num-partitions": 2}) for k in range(2))
    assert first.tenant != second.tenant
    assert first.folder.is_relative_to(Path.home())


def test_of_two_processes_that_start_at_once_the_first_decides(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        devices = pool.map(open_device, [{"device-dir": str(tmp_path / "d")}] * 8)
    assert len({device.tenant for device in devices}) == 1


@pytest.mark.parametrize("text", ["", "zz", "abcd"])
def test_a_damaged_identity_is_named(tmp_path, text):
    (tmp_path / "identity").write_text(text)
    with pytest.raises(ConfigError, match="identity is damaged"):
        open_device({"device-dir": str(tmp_path)})


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="device-dir"):
        open_device({"device-dir": str(tmp_path / "file" / "d")})


@pytest.mark.parametrize(
    "node_config",
    [
        {"partition-id": 2, "num-partitions": 2},
        {"partition-id": -1, "num-partitions": 2},
        {"partition-id": "a", "num-partitions": 2},
        {"partition-id": 1},
    ],
)
def test_a_partition_out_of_range_is_named(node_config):
    with pytest.raises(ConfigError, match="partition-id"):
        open_device(node_config)


def test_node_config_decides_about_data_and_backbone_only():
    config = RunConfig(backbone="x", codec="int8")
    own = device_config(config, {"backbone": "/mine", "codec": "fp32", "device-batch-size": 2})
    assert (own.backbone, own.codec, own.device_batch_size) == ("/mine", "int8", 2)


def test_a_bad_value_in_the_node_config_is_named():
    with pytest.raises(ConfigError, match="device-batch-size"):
        device_config(RunConfig(backbone="x"), {"device-batch-size": 0})


def test_data_options_hold_the_users_own_keys():
    options = data_options(RunConfig(backbone="x"), {"mine.key": 1, "codec": "fp32"}, {"text-column": "review"})
    assert options["mine.key"] == 1
    assert options["text-column"] == "review"
    assert options["codec"] == "int8"
