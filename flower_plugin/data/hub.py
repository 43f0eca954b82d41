"""Hugging Face data sets, through the optional extra ``datasets``."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flower_plugin.errors import DataError

from .options import SplitOptions, check_partition, read_split_options, read_text
from .partition import Indices
from .rows import Columns, find_columns, label_text, row_to_sample
from .sample import ClientData, Options, Sample
from .split import deal, split_for_device


def load_hub(reference: str, partition_id: int, num_partitions: int, options: Options) -> ClientData:
    """Return a device's part of a Hugging Face data set, ``"datasets:NAME[:CONFIG]"``.

    The splits are ``train-split`` (default "train") and ``test-split`` (default "test"). Each is dealt by the
    ``partition`` options (default iid); where there is no test split, ``test-fraction`` is held out.

    Raises
    ------
    DataError
        If the extra is not installed, or the data set, a split or a column does not exist.
    """
    check_partition(partition_id, num_partitions)
    name, _, config = reference.removeprefix("datasets:").partition(":")
    if not name:
        raise DataError(f'data = {reference!r}: name a data set, as in "datasets:NAME[:CONFIG]"')
    splits = _load(name, config)
    split = read_split_options(options, "iid")
    train = _pick(splits, read_text(options, "train-split", "train"), name)
    test_name = read_text(options, "test-split")
    columns = find_columns(options, train.column_names, f"{name} (train)")
    names, rename = _label_names(train, columns)
    if not test_name and "test" not in splits:
        samples = _samples(train, np.arange(len(train)), columns, rename, name)
        return split_for_device(samples, _groups(train, columns), partition_id, num_partitions, split, names)
    parts = []
    for rows, total, cap in (
        (train, split.train_samples, split.samples_per_device),
        (_pick(splits, test_name or "test", name), split.test_samples, split.test_samples_per_device),
    ):
        mine = _part(rows, columns, partition_id, num_partitions, split, total)[: cap or None]
        parts.append(tuple(_samples(rows, mine, columns, rename, name)))
    return ClientData(parts[0], parts[1], names)


def _load(name: str, config: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f'the data set {name!r} needs the package datasets; install it with: pip install "flower-plugin[datasets]"'
        ) from error
    try:
        return load_dataset(name, config or None)
    except Exception as error:  # the library raises many kinds: missing, offline, wrong config
        raise DataError(f"the data set {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _pick(splits: Any, split: str, name: str) -> Any:
    if split not in splits:
        raise DataError(f"the data set {name!r} has no split {split!r}; it has: {', '.join(sorted(splits))}")
    return splits[split]


def _label_names(rows: Any, columns: Columns) -> tuple[tuple[str, ...] | None, Callable[[Any], Any]]:
    """Return the class names (of a ClassLabel column, else the values seen) and how a cell becomes one."""
    if columns.label is None:
        return None, lambda value: value
    names = getattr(rows.features[columns.label], "names", None)
    if names:
        # -1 is the library's mark for "no label"
        return tuple(names), lambda value: names[value] if value is not None and value >= 0 else None
    seen = {label_text(value) for value in rows[columns.label]}
    return tuple(sorted(label for label in seen if label is not None)), lambda value: value


def _groups(rows: Any, columns: Columns) -> list[str] | None:
    return [str(value) for value in rows[columns.group]] if columns.group else None


def _part(
    rows: Any, columns: Columns, partition_id: int, num_partitions: int, split: SplitOptions, total: int
) -> Indices:
    """Indices of a device's rows, in seeded random order, of at most ``total`` rows over all devices."""
    order = np.random.default_rng((split.seed, 1)).permutation(len(rows))[: total or None]
    labels = rows[columns.label] if columns.label else [None] * len(rows)
    groups = _groups(rows, columns)
    parts = deal([labels[i] for i in order], groups and [groups[i] for i in order], num_partitions, split)
    mine: Indices = order[parts[partition_id]]
    return mine


def _samples(rows: Any, indices: Indices, columns: Columns, rename: Callable[[Any], Any], name: str) -> list[Sample]:
    """Read only the chosen rows of the (memory-mapped) table."""
    samples = []
    for index, row in zip(indices.tolist(), rows.select(indices.tolist()), strict=True):
        cells = dict(row)
        if columns.label:
            cells[columns.label] = rename(cells[columns.label])
        samples.append(row_to_sample(cells, columns, f"{name}, row {index}"))
    return samples
