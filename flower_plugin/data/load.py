"""From a reference in the run or node config to a device's data."""

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flower_plugin.errors import DataError, FlowerPluginError

from .files import SUFFIXES, load_file
from .hub import load_hub
from .options import check_partition, read_text
from .rows import find_columns, row_to_sample
from .sample import ClientData, Options, Sample

Source = Callable[[int, int, Options], object]


def load_client_data(reference: str, partition_id: int, num_partitions: int, options: Options) -> ClientData:
    """Load the data of one device.

    Parameters
    ----------
    reference
        ``"module:function"``, called with (partition_id, num_partitions, options), which returns ClientData
        or a pair (train, test) of lists of samples or dicts; or the path of a .jsonl, .csv or .parquet file;
        or ``"datasets:NAME[:CONFIG]"`` for a Hugging Face data set. The option ``data-path`` (node config)
        wins.
    options
        Merged run-config and node-config values.

    Raises
    ------
    DataError
        If the source is not found or its data cannot be used.
    ConfigError
        For a bad option or partition id.
    """
    check_partition(partition_id, num_partitions)
    reference = read_text(options, "data-path", reference).strip()
    if reference.startswith("datasets:"):
        return load_hub(reference, partition_id, num_partitions, options)
    if Path(reference).suffix.lower() in SUFFIXES:
        return load_file(Path(reference).expanduser(), partition_id, num_partitions, options)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", reference):
        source = _find_source(reference)
        result = _call(source, reference, partition_id, num_partitions, options)
        return _as_client_data(result, reference, options)
    raise DataError(
        f'data = {reference!r}: use "module:function", a path that ends with {", ".join(SUFFIXES)}, '
        'or "datasets:NAME[:CONFIG]"'
    )


def _find_source(reference: str) -> Source:
    module_name, _, function_name = reference.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise DataError(
            f"data = {reference!r}: module {module_name!r} cannot be imported ({error}); "
            "check the name, and that it is installed or part of the app"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [name for name, item in vars(module).items() if callable(item) and not name.startswith("_")]
        raise DataError(
            f"data = {reference!r}: module {module_name!r} has no function {function_name!r}; "
            f"it has: {', '.join(sorted(public)) or '(none)'}"
        )
    source: Source = function
    return source


def _call(source: Source, reference: str, partition_id: int, num_partitions: int, options: Options) -> object:
    try:
        return source(partition_id, num_partitions, options)
    except FlowerPluginError:
        raise
    except Exception as error:
        raise DataError(f"data = {reference!r} failed with {type(error).__name__}: {error}") from error


def _as_client_data(result: object, reference: str, options: Options) -> ClientData:
    if isinstance(result, ClientData):
        return result
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise DataError(
            f"data = {reference!r} must return ClientData or a pair (train, test), not {type(result).__name__}"
        )
    train, test = (
        _as_samples(part, f"{reference} ({name})", options)
        for name, part in zip(("train", "test"), result, strict=True)
    )
    return ClientData(train, test)


def _as_samples(items: object, where: str, options: Options) -> tuple[Sample, ...]:
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise DataError(f"{where} must be a list of samples or dicts, not {type(items).__name__}")
    return tuple(_as_sample(item, f"{where}, sample {number}", options) for number, item in enumerate(items))


def _as_sample(item: Any, where: str, options: Options) -> Sample:
    if isinstance(item, Sample):
        return item
    if isinstance(item, Mapping):
        return row_to_sample(item, find_columns(options, set(map(str, item)), where), where)
    raise DataError(f"{where} must be a Sample or a dict, not {type(item).__name__}")
