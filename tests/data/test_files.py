"""A device's own files: columns, labels, splits, and errors that name the line."""

import contextlib
import csv
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower_plugin.data import ClientData, Sample, load_client_data
from flower_plugin.errors import ConfigError, DataError

ROWS = [{"text": f"text, {i}\n", "label": i % 2, "half": "train" if i % 4 else "test"} for i in range(20)]


def write(path: Path, rows: list[dict]) -> str:
    """Write rows in the format of the path's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


def load(path: str, device: int = 0, count: int = 1, **options) -> ClientData:
    return load_client_data(path, device, count, {k.replace("_", "-"): v for k, v in options.items()})


def everything(data: ClientData) -> set[Sample]:
    return {*data.train, *data.test}


@pytest.fixture(params=[".jsonl", ".csv", ".parquet"])
def path(request, tmp_path) -> Path:
    return tmp_path / f"own{request.param}"


def test_all_formats_give_the_same_samples(path):
    data = load(write(path, ROWS), test_fraction=0.25)
    assert everything(data) == {Sample(text=f"text, {i}\n", label=str(i % 2)) for i in range(20)}
    assert (len(data.train), len(data.test)) == (15, 5)
    assert data.label_names is None
    assert data.labels_seen() == ("0", "1")


def test_a_file_is_the_devices_own_unless_a_partition_is_named(path):
    file = write(path, ROWS)
    assert everything(load(file, 0, 3)) == everything(load(file, 2, 3))
    parts = [load(file, i, 3, partition="iid") for i in range(3)]
    assert sum(len(everything(part)) for part in parts) == 20
    assert set.union(*map(everything, parts)) == everything(load(file))
    assert {part.label_names for part in parts} == {("0", "1")}


def test_a_split_column_decides_what_is_held_out(path):
    data = load(write(path, ROWS), split_column="half")
    assert {sample.text for sample in data.test} == {f"text, {i}\n" for i in range(0, 20, 4)}
    assert len(data.train) == 15


def test_a_bad_split_value_is_named(path):
    file = write(path, [{"text": "a", "split": "train"}, {"text": "b", "split": "dev"}])
    with pytest.raises(DataError, match=r"own.*, (line|row) [23].*'split'.*'dev'"):
        load(file)


def test_a_missing_column_names_those_that_exist(path):
    with pytest.raises(DataError, match=r"text-column = 'body' does not exist.*half, label, text"):
        load(write(path, ROWS), text_column="body")


def test_no_usable_column_names_those_that_exist(path):
    with pytest.raises(DataError, match=r"name a text-column.*columns: body"):
        load(write(path, [{"body": "a"}]))


def test_pairs_and_conversations(path):
    file = write(path, [{"q": "how?", "a": "so", "label": "x"}])
    assert load(file, prompt_column="q", response_column="a", test_fraction=0).train == (
        Sample(prompt="how?", response="so", label="x"),
    )
    with pytest.raises(DataError, match="prompt-column with a response-column"):
        load(file, prompt_column="q")


def test_conversations_are_lists_or_json_text(path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    file = write(path, [{"messages": json.dumps(talk) if path.suffix == ".csv" else talk}])
    (sample,) = load(file, test_fraction=0).train
    assert sample == Sample(messages=(("user", "hi"), ("assistant", "hello")))


@pytest.mark.parametrize("messages", ["[{", [1], [{"role": "user"}], [{"role": 1, "content": "a"}], {"a": 1}])
def test_bad_conversations_name_the_line(tmp_path, messages):
    file = write(tmp_path / "own.jsonl", [{"messages": []}, {"messages": messages}])
    with pytest.raises(DataError, match=r"own\.jsonl, line 3: .*message"):
        load(file)


def test_natural_partitions_by_a_group_column(path):
    file = write(path, [{"text": f"{i}", "movie": i % 5} for i in range(20)])
    parts = [load(file, i, 5, partition="natural", group_column="movie") for i in range(5)]
    for part in parts:
        assert len({int(sample.text or "") % 5 for sample in everything(part)}) == 1


def test_label_names_come_from_the_option(path):
    assert load(write(path, ROWS), label_names="1, 0").label_names == ("1", "0")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "true"),
        (1, "1"),
        (1.0, "1"),
        (0.5, "0.5"),
        ("a", "a"),
        ("", None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_labels_are_strings(tmp_path, value, expected):
    file = write(tmp_path / "own.jsonl", [{"text": "a", "label": value}])
    assert load(file, test_fraction=0).train[0].label == expected


def test_empty_files_give_empty_data(tmp_path):
    for name, content in (("a.jsonl", "\n \n"), ("b.csv", ""), ("c.csv", "text,label\n")):
        (tmp_path / name).write_text(content)
        assert load(str(tmp_path / name), 1, 4, partition="dirichlet") == ClientData()
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "d.parquet")
    assert load(str(tmp_path / "d.parquet")) == ClientData()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: an object is needed, not list"),
        ("a.jsonl", b"[" * 200_000 + b"\n", "nested too deeply|not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"label": 1}', "a.jsonl, line 2: column 'text' is missing; .*label"),
        ("a.jsonl", b'{"text": 5}', "a.jsonl, line 1: column 'text' must hold a string, not int"),
        ("a.jsonl", b'{"text": "a", "label": [1]}', "a.jsonl, line 1: the label must be"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.csv", b"text,label\na,1\nb\n", "a.csv, line 3: the row has another number of fields"),
        ("a.csv", b"text,label\na,1,2\n", "a.csv, line 2: the row has another number of fields"),
        ("a.csv", b'text,label\n"a,1\n', "a.csv, line 2: not CSV"),
        ("a.parquet", b"PAR1 but not really PAR1", "a.parquet is not a Parquet file"),
    ],
)
def test_bad_content_names_the_line(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / name))


def test_long_csv_texts_are_read_and_the_limit_is_restored(tmp_path):
    before = csv.field_size_limit()
    file = write(tmp_path / "a.csv", [{"text": "word " * 100_000}])
    assert len(load(file, test_fraction=0).train[0].text or "") == 500_000
    assert csv.field_size_limit() == before


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,label\na,1\n")
    assert load(str(tmp_path / "a.csv"), test_fraction=0).train == (Sample(text="a", label="1"),)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv does not exist"):
        load(str(tmp_path / "none.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="does not exist"):
        load(str(tmp_path / "folder.csv"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install .flower-plugin\[parquet\]"):
        load(str(tmp_path / "a.parquet"))


def test_bad_options_are_refused(path):
    with pytest.raises(ConfigError, match="test-fraction = 2"):
        load(write(path, ROWS), test_fraction=2)
    with pytest.raises(ConfigError, match="text-column = 3"):
        load(write(path, ROWS), text_column=3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.csv", "a.parquet"]))
def test_any_bytes_give_data_or_a_clear_error(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with contextlib.suppress(DataError):  # and no other kind of error
        load(str(tmp_path / name))
