"""References: functions, paths, Hugging Face data sets."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from flower_plugin.data import ClientData, Sample, load_client_data
from flower_plugin.errors import ConfigError, DataError


@pytest.fixture
def source(monkeypatch):
    """A user's module with data functions."""
    module = ModuleType("own_source")
    module.whole = lambda i, n, options: ClientData(train=(Sample(text=f"{i} of {n}"),), label_names=("a",))
    module.pair = lambda i, n, options: ([{"text": "a", "label": 1}], [Sample(text="b")])
    module.renamed = lambda i, n, options: ([{"body": "a"}], [])
    module.number = lambda i, n, options: 5
    module.texts = lambda i, n, options: (["a"], [])
    module.string = lambda i, n, options: ("abc", [])
    module.broken = lambda i, n, options: 1 / 0
    module.clear = lambda i, n, options: (_ for _ in ()).throw(ConfigError("my own words"))
    module.constant = 3
    monkeypatch.setitem(sys.modules, "own_source", module)
    return module


def load(reference: str, device: int = 0, count: int = 1, **options) -> ClientData:
    return load_client_data(reference, device, count, {k.replace("_", "-"): v for k, v in options.items()})


@pytest.mark.usefixtures("source")
def test_a_function_gives_client_data_or_two_lists():
    assert load("own_source:whole", 1, 3).train == (Sample(text="1 of 3"),)
    assert load("own_source:pair") == ClientData((Sample(text="a", label="1"),), (Sample(text="b"),))
    assert load("own_source:renamed", text_column="body").train == (Sample(text="a"),)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own_source:nothing", "has no function 'nothing'; it has: .*pair.*whole"),
        ("own_source:constant", "has no function 'constant'"),
        ("no_such_module_here:f", "'no_such_module_here' cannot be imported"),
        ("own_source:number", r"pair \(train, test\), not int"),
        ("own_source:texts", r"\(train\), sample 0 must be a Sample or a dict, not str"),
        ("own_source:string", r"\(train\) must be a list.*not str"),
        ("own_source:broken", "failed with ZeroDivisionError"),
        ("own_source:renamed", "sample 0 has the columns: body"),
        ("just words", 'use "module:function", a path that ends with .jsonl'),
        ("", "data = ''"),
        ("file.txt", "data = 'file.txt'"),
    ],
)
def test_a_bad_reference_says_what_is_wrong(reference, message):
    with pytest.raises(DataError, match=message):
        load(reference)


@pytest.mark.usefixtures("source")
def test_a_functions_own_clear_error_passes():
    with pytest.raises(ConfigError, match="my own words"):
        load("own_source:clear")


@pytest.mark.usefixtures("source")
def test_the_devices_path_wins(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"text": "mine"}')
    data = load("own_source:whole", data_path=str(tmp_path / "own.jsonl"), test_fraction=0)
    assert data.train == (Sample(text="mine"),)
    assert load("own_source:whole", data_path="").train == (Sample(text="0 of 1"),)


def test_a_partition_id_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="partition-id = 4"):
        load("anything:here", 4, 4)


class FakeRows:
    """The part of datasets.Dataset that is read."""

    def __init__(self, rows, names=None):
        self._rows = rows
        self.column_names = list(rows[0])
        self.features = {name: SimpleNamespace() for name in rows[0]}
        if names:
            self.features["label"].names = names

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, column):
        return [row[column] for row in self._rows]

    def __iter__(self):
        return iter(self._rows)

    def select(self, indices):
        return [self._rows[i] for i in indices]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package datasets, which knows one data set."""
    rows = [{"text": f"{i}", "label": i % 2} for i in range(40)]
    splits = {"train": FakeRows(rows, ["neg", "pos"]), "test": FakeRows(rows[:9], ["neg", "pos"])}
    calls = []

    def load_dataset(name, config):
        calls.append((name, config))
        if name == "imdb":
            return splits
        raise FileNotFoundError(f"{name} not found")

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return SimpleNamespace(splits=splits, calls=calls)


def test_a_hub_data_set_is_dealt_with_its_class_names(hub):
    parts = [load("datasets:imdb:plain", i, 4, train_samples=20) for i in range(4)]
    assert hub.calls[0] == ("imdb", "plain")
    assert {part.label_names for part in parts} == {("neg", "pos")}
    train = [sample for part in parts for sample in part.train]
    assert len(set(train)) == len(train) == 20
    assert sorted(int(sample.text or "") for part in parts for sample in part.test) == list(range(9))
    assert all(sample.label == ("neg", "pos")[int(sample.text or "") % 2] for sample in train)


def test_a_hub_data_set_without_a_test_split_is_split(hub):
    del hub.splits["test"]
    data = load("datasets:imdb", test_fraction=0.25)
    assert (len(data.train), len(data.test)) == (30, 10)
    assert hub.calls == [("imdb", None)]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("datasets:other", {}, "'other' cannot be loaded: FileNotFoundError"),
        ("datasets:imdb", {"train_split": "all"}, "no split 'all'; it has: test, train"),
        ("datasets:imdb", {"text_column": "body"}, "text-column = 'body' does not exist.*label, text"),
        ("datasets:", {}, "name a data set"),
    ],
)
def test_hub_errors(reference, options, message):
    with pytest.raises(DataError, match=message):
        load(reference, **options)


def test_the_extra_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install .flower-plugin\[datasets\]"):
        load("datasets:imdb")
