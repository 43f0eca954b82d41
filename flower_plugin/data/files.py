"""A device's data in a JSONL, CSV or Parquet file."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flower_plugin.errors import DataError

from .options import read_split_options, read_text
from .rows import Columns, find_columns, row_to_sample
from .sample import ClientData, Options
from .split import split_by_flag, split_for_device

Row = tuple[int, dict[str, Any]]  # number (line, or row of a Parquet file, from 1) and cells
SUFFIXES = (".jsonl", ".csv", ".parquet")


def load_file(path: Path, partition_id: int, num_partitions: int, options: Options) -> ClientData:
    """Return the data of a device's own file; an empty file gives no samples.

    Columns are chosen by :func:`~flower_plugin.data.rows.find_columns`. A split column holds "train" or
    "test"; without one ``test-fraction`` is held out. The file is the device's own data, unless the option
    ``partition`` says how several devices share it. ``label-names`` ("bad,good") gives all classes in order.

    Raises
    ------
    DataError
        If the file cannot be read, naming the line, or lacks a column, naming those it has.
    ConfigError
        For a bad option.
    """
    rows = list(read_rows(path))
    split = read_split_options(options, "none")
    where = "line" if path.suffix.lower() != ".parquet" else "row"
    if not rows:
        return ClientData(label_names=_named_labels(options))
    present = {name for _, row in rows for name in row}
    columns = find_columns(options, present, path.name)
    samples = [row_to_sample(row, columns, f"{path.name}, {where} {number}") for number, row in rows]
    labels = _named_labels(options)
    if labels is None and columns.label and split.partition != "none":
        labels = tuple(sorted({sample.label for sample in samples if sample.label is not None}))
    groups = [str(row.get(columns.group)) for _, row in rows] if columns.group else None
    if columns.split:
        held_out = [_is_test(row, columns, f"{path.name}, {where} {number}") for number, row in rows]
        return split_by_flag(samples, held_out, groups, partition_id, num_partitions, split, labels)
    return split_for_device(samples, groups, partition_id, num_partitions, split, labels)


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file by its suffix, each with its number.

    Raises
    ------
    DataError
        For a missing file, another suffix, or content that is not what the suffix says.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown kind of file; use one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"the data file {path} does not exist (data-path in the node config)")
    try:
        yield from {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[suffix](path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name} is not UTF-8 ({error}); save it as UTF-8") from error


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path.name}, line {number}: not JSON ({error})") from None
            except RecursionError:
                raise DataError(f"{path.name}, line {number}: JSON is nested too deeply") from None
            if not isinstance(row, dict):
                raise DataError(f"{path.name}, line {number}: an object is needed, not {type(row).__name__}")
            yield number, row


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file, _long_fields():
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path.name}, line {reader.line_num}: the row has another number of fields than the "
                        f"header ({len(reader.fieldnames or ())}); quote texts that hold commas"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{path.name}, line {reader.reader.line_num}: not CSV ({error})") from None


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift csv's limit of 128 KiB a field: over-long texts are cut and counted later, not refused."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f'{path.name}: Parquet files need pyarrow; install it with: pip install "flower-plugin[parquet]"'
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path.name} is not a Parquet file that can be read: {error}") from error


def _is_test(row: dict[str, Any], columns: Columns, where: str) -> bool:
    value = row.get(columns.split or "split")
    if value not in ("train", "test"):
        raise DataError(f'{where}: column {columns.split!r} must hold "train" or "test", not {value!r:.40}')
    return bool(value == "test")


def _named_labels(options: Options) -> tuple[str, ...] | None:
    """Read the option label-names: "bad,good"."""
    names = [name.strip() for name in read_text(options, "label-names").split(",") if name.strip()]
    return tuple(dict.fromkeys(names)) or None
