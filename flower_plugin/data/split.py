"""From a pool of samples to one device's training and held-out samples."""

from collections.abc import Hashable, Sequence

import numpy as np

from flower_plugin.errors import ConfigError, DataError

from .options import SplitOptions, check_partition, own_limits
from .partition import Indices, dirichlet, iid, largest_remainder, natural, stratified_choice
from .sample import ClientData, Sample


def plan_totals(available: int, options: SplitOptions) -> tuple[int, int]:
    """Return (training, held-out) totals over all devices for a pool of ``available`` samples.

    Raises
    ------
    ConfigError
        If more samples are asked for than there are.
    """
    train, test, fraction = options.train_samples, options.test_samples, options.test_fraction
    if train + test > available:
        raise ConfigError(
            f"train-samples = {train} and test-samples = {test} ask for {train + test} samples, "
            f"but the source has {available}; ask for fewer"
        )
    if train and not test:
        wanted = round(train * fraction / (1 - fraction)) if fraction < 1 else 0
        return train, min(wanted, available - train)
    if test and not train:
        return available - test, test
    if train and test:
        return train, test
    held_out = round(available * fraction)
    if fraction < 1:  # a single sample is one to train on
        held_out = min(held_out, max(available - 1, 0))
    return available - held_out, held_out


def deal(
    labels: Sequence[Hashable], groups: Sequence[Hashable] | None, num_partitions: int, options: SplitOptions
) -> list[Indices]:
    """Deal a pool to the devices by ``options.partition`` ("none": every device gets all of it)."""
    if options.partition == "none":
        return [np.arange(len(labels))] * num_partitions
    if options.partition == "dirichlet":
        return dirichlet(labels, num_partitions, options.alpha, options.seed)
    if options.partition == "natural":
        if groups is None:
            raise ConfigError(
                'partition = "natural": the data has no groups; name a group-column, or use iid or dirichlet'
            )
        return natural(groups, num_partitions, options.seed)
    return iid(len(labels), num_partitions, options.seed)


def split_for_device(
    samples: Sequence[Sample],
    groups: Sequence[Hashable] | None,
    partition_id: int,
    num_partitions: int,
    options: SplitOptions,
    label_names: tuple[str, ...] | None,
) -> ClientData:
    """Return the part of one device of a pool, held-out samples stratified by label.

    Parameters
    ----------
    samples
        The whole pool, the same on every device.
    groups
        The natural group of each sample, or None.

    Raises
    ------
    ConfigError
        For a partition id out of range, or sizes the pool cannot give.
    """
    check_partition(partition_id, num_partitions)
    if options.partition == "none":
        options = own_limits(options, partition_id, num_partitions)
    labels = [sample.label for sample in samples]
    train_total, test_total = plan_totals(len(samples), options)
    pool = stratified_choice(labels, train_total + test_total, (options.seed, 1))
    pool.sort()
    pool_groups = None if groups is None else [groups[i] for i in pool]
    parts = deal([labels[i] for i in pool], pool_groups, num_partitions, options)
    mine = pool[parts[partition_id]]
    if options.partition == "none":
        held_out = test_total
    else:
        held_out = largest_remainder([len(part) for part in parts], test_total)[partition_id]
    if train_total:  # a device that can train keeps a sample to train on
        held_out = min(held_out, max(len(mine) - 1, 0))
    seed = (options.seed, 2, partition_id)
    test = stratified_choice([labels[i] for i in mine], held_out, seed)
    train = np.random.default_rng((*seed, 3)).permutation(np.setdiff1d(np.arange(len(mine)), test))
    return capped([samples[i] for i in mine[train]], [samples[i] for i in mine[test]], options, label_names)


def split_by_flag(
    samples: Sequence[Sample],
    held_out: Sequence[bool],
    groups: Sequence[Hashable] | None,
    partition_id: int,
    num_partitions: int,
    options: SplitOptions,
    label_names: tuple[str, ...] | None,
) -> ClientData:
    """Like :func:`split_for_device`, where the source itself says which samples are held out.

    Of the totals, each device takes an even share at most.
    """
    check_partition(partition_id, num_partitions)
    options = own_limits(options, partition_id, num_partitions)
    if len(held_out) != len(samples):
        raise DataError(f"{len(samples)} samples but {len(held_out)} split flags")
    mine = deal([sample.label for sample in samples], groups, num_partitions, options)[partition_id]
    mine = np.random.default_rng((options.seed, 2, partition_id)).permutation(mine)
    train = [samples[i] for i in mine if not held_out[i]]
    return capped(train, [samples[i] for i in mine if held_out[i]], options, label_names)


def capped(
    train: Sequence[Sample],
    test: Sequence[Sample],
    options: SplitOptions,
    label_names: tuple[str, ...] | None = None,
) -> ClientData:
    """Cut both parts to the limits for each device (0: no limit)."""
    return ClientData(
        train=tuple(train[: options.samples_per_device or None]),
        test=tuple(test[: options.test_samples_per_device or None]),
        label_names=label_names,
    )
