"""Typed reading of the data options: partition, sizes, seeds."""

from dataclasses import dataclass, replace
from typing import Literal

from flower_plugin.errors import ConfigError

from .sample import Options

Partition = Literal["none", "iid", "dirichlet", "natural"]
PARTITIONS: tuple[Partition, ...] = ("none", "iid", "dirichlet", "natural")


def read_text(options: Options, key: str, default: str = "") -> str:
    """Return a string option; "" or a missing key give the default."""
    value = options.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{key} = {value!r}: a string is needed, not {type(value).__name__}")
    return value or default


def read_number(options: Options, key: str, default: float, low: float, high: float) -> float:
    """Return a number in [low, high]; "" or a missing key give the default."""
    value = options.get(key, "")
    if value == "" and isinstance(value, str):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{key} = {value!r}: a number from {low:g} to {high:g} is needed")
    return value


def read_count(options: Options, key: str, default: int = 0) -> int:
    """Return a whole number >= 0; "" or a missing key give the default."""
    value = read_number(options, key, default, 0, 2**53)
    if value != int(value):
        raise ConfigError(f"{key} = {value!r}: a whole number >= 0 is needed")
    return int(value)


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How samples are dealt to devices and parted in training and held-out samples.

    The totals ``train_samples`` and ``test_samples`` count over all partitions (where every device has a
    pool of its own, each takes an even share at most), the ``*_per_device`` caps for each device; 0 means
    "no limit" everywhere.
    """

    partition: Partition = "iid"
    alpha: float = 0.5
    seed: int = 0
    test_fraction: float = 0.2
    train_samples: int = 0
    test_samples: int = 0
    samples_per_device: int = 0
    test_samples_per_device: int = 0


def read_split_options(options: Options, default_partition: Partition) -> SplitOptions:
    """Read the options that :class:`SplitOptions` names.

    Keys: ``partition``, ``partition-alpha``, ``partition-seed``, ``test-fraction``, ``train-samples``,
    ``test-samples``, ``samples-per-device``, ``test-samples-per-device``.

    Raises
    ------
    ConfigError
        Naming the key, the value and what is allowed.
    """
    partition = read_text(options, "partition", default_partition)
    if partition not in PARTITIONS:
        raise ConfigError(f"partition = {partition!r}: allowed are {', '.join(PARTITIONS)}")
    return SplitOptions(
        partition=partition,
        alpha=read_number(options, "partition-alpha", 0.5, 1e-3, 1e6),
        seed=read_count(options, "partition-seed"),
        test_fraction=read_number(options, "test-fraction", 0.2, 0.0, 1.0),
        train_samples=read_count(options, "train-samples"),
        test_samples=read_count(options, "test-samples"),
        samples_per_device=read_count(options, "samples-per-device"),
        test_samples_per_device=read_count(options, "test-samples-per-device"),
    )


def own_limits(options: SplitOptions, partition_id: int, num_partitions: int) -> SplitOptions:
    """Turn the totals into this device's share of them, for sources where each device has its own pool."""
    return replace(
        options,
        train_samples=0,
        test_samples=0,
        samples_per_device=_least(
            options.samples_per_device, _share(options.train_samples, partition_id, num_partitions)
        ),
        test_samples_per_device=_least(
            options.test_samples_per_device, _share(options.test_samples, partition_id, num_partitions)
        ),
    )


def _share(total: int, partition_id: int, num_partitions: int) -> int:
    """Return an even share of a total, at least 1 (0: no limit)."""
    return max(1, (total + num_partitions - 1 - partition_id) // num_partitions) if total else 0


def _least(first: int, second: int) -> int:
    """Return the tighter of two limits, where 0 is no limit."""
    return min(first, second) if first and second else first or second


def check_partition(partition_id: int, num_partitions: int) -> None:
    """Raise ConfigError unless 0 <= partition_id < num_partitions."""
    if num_partitions < 1 or not 0 <= partition_id < num_partitions:
        raise ConfigError(
            f"partition-id = {partition_id} with num-partitions = {num_partitions}: "
            f"the id must be from 0 to num-partitions - 1 (set both in the node config)"
        )
