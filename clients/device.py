"""Who a device is: a folder of its own, and an identity that outlives restarts and node ids."""

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flower_plugin.config import RunConfig, expand, known_keys, parse_run_config, plugin_home
from flower_plugin.errors import ConfigError

ConfigValue = bool | int | float | str

DEVICE_DIR = "device-dir"
DEVICE_NAME = "device-name"
PARTITION = "partition-id"
NUM_PARTITIONS = "num-partitions"
SECRET_BYTES = 32
OVERRIDABLE = (
    "backbone",
    "data",
    "device-batch-size",
    "partition",
    "partition-alpha",
    "partition-seed",
    "test-fraction",
    "train-samples",
    "test-samples",
)


@dataclass(frozen=True)
class Device:
    """A device's folder and identity.

    Attributes
    ----------
    folder : Path
        Where the device keeps its identity and its held-out activations.
    tenant : str
        The id under which the server keeps this device's samples. It is derived from the secret and cannot
        be guessed, so that no other device can pass for this one.
    partition : int
        Place among the partitions of a shared data set; 0 where the device has data of its own.
    num_partitions : int
        Number of partitions.
    """

    folder: Path
    tenant: str
    partition: int
    num_partitions: int


def open_device(node_config: Mapping[str, ConfigValue]) -> Device:
    """Open the device's folder; the first time, make its identity.

    Raises
    ------
    ConfigError
        The folder cannot be written, its identity is damaged, or the partition is out of range.
    """
    partition, count = _partition(node_config)
    default = f"partition-{partition}-of-{count}" if PARTITION in node_config else "device"
    name = str(node_config.get(DEVICE_NAME, default))
    folder = expand(str(node_config.get(DEVICE_DIR, plugin_home() / "devices" / name)))
    secret = _secret(folder)
    return Device(
        folder=folder,
        tenant="device-" + hashlib.blake2b(b"tenant", key=secret, digest_size=16).hexdigest(),
        partition=partition,
        num_partitions=count,
    )


def device_config(config: RunConfig, node_config: Mapping[str, ConfigValue]) -> RunConfig:
    """The run config as this device sees it: what its node config says about data and backbone wins."""
    own = {key: value for key, value in node_config.items() if key in OVERRIDABLE}
    if not own:
        return config
    return parse_run_config({**config.model_dump(by_alias=True), **own})


def data_options(
    config: RunConfig, run_config: Mapping[str, ConfigValue], node_config: Mapping[str, ConfigValue]
) -> dict[str, ConfigValue]:
    """What a data function is told: the run config, the user's own dotted keys, then the node config."""
    own = {key: value for key, value in run_config.items() if key not in known_keys()}
    return {**config.model_dump(by_alias=True), **own, **node_config}


def _partition(node_config: Mapping[str, ConfigValue]) -> tuple[int, int]:
    partition, count = node_config.get(PARTITION, 0), node_config.get(NUM_PARTITIONS, 1)
    if not isinstance(partition, int) or not isinstance(count, int) or not 0 <= partition < count:
        raise ConfigError(
            f"node config: {PARTITION}={partition!r} with {NUM_PARTITIONS}={count!r};"
            f" give whole numbers with 0 <= {PARTITION} < {NUM_PARTITIONS}"
        )
    return partition, count


def _secret(folder: Path) -> bytes:
    path = folder / "identity"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_once(path, secrets.token_hex(SECRET_BYTES))
        secret = bytes.fromhex(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"the device folder {folder} cannot be used: {error}; set {DEVICE_DIR} in the node config"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged; remove it to start as a new device") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} is damaged; remove it to start as a new device")
    return secret


def _write_once(path: Path, text: str) -> None:
    """Create ``path`` whole or not at all; of two processes that try, the first wins."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    draft.write_text(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
