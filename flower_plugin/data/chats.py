"""Built-in chat data: each device is one real sender of the chitchat data set."""

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_plugin.errors import ConfigError, DataError

from .options import SplitOptions, check_partition, own_limits, read_count, read_split_options
from .packages import package_path
from .sample import ClientData, Options, Sample
from .split import capped


@dataclass(frozen=True, slots=True)
class Sender:
    """One sender and the number of usable turn pairs in which he or she answers."""

    name: str
    pairs: int


Pairs = dict[str, list[list[tuple[str, str]]]]  # sender -> conversations -> (prompt, response)


def chitchat(partition_id: int, num_partitions: int, options: Options) -> ClientData:
    """Return the chat turns of one real sender: what the other wrote -> what this sender answered.

    Source: package ``chitchat-dataset`` (7,168 conversations, 1,315 anonymised senders, MIT). Partition i is
    the sender with the (``sender-offset`` + i)-th most usable turn pairs. A turn's consecutive texts are
    joined by line breaks. Held-out samples are whole conversations, about ``test-fraction`` of the
    sender's pairs. Other options: ``partition-seed``, ``samples-per-device``, ``test-samples-per-device``;
    ``train-samples`` and ``test-samples`` are shared equally by the partitions.
    To hold out whole senders, read them with a ``sender-offset`` past the training senders and a
    ``test-fraction`` of 1.

    Raises
    ------
    ConfigError
        For a bad option, or a rank that no sender has.
    DataError
        If the package is not installed.
    """
    check_partition(partition_id, num_partitions)
    split = read_split_options(options, "natural")
    if split.partition != "natural":
        raise ConfigError(f'partition = "{split.partition}": chitchat has only "natural", a sender a device')
    pairs = _read_pairs()
    senders = _ranked(pairs)
    rank = read_count(options, "sender-offset") + partition_id
    if rank >= len(senders):
        raise ConfigError(f"sender-offset + partition-id = {rank}: there are {len(senders)} senders, ranked from 0")
    talks = [[Sample(prompt=a, response=b) for a, b in talk] for talk in pairs[senders[rank].name]]
    train, test = _hold_out(talks, split, rank)
    return capped(train, test, own_limits(split, partition_id, num_partitions))


def chitchat_senders() -> tuple[Sender, ...]:
    """List the senders that have usable turn pairs, most pairs first: the order of the ranks."""
    return _ranked(_read_pairs())


def _ranked(pairs: Pairs) -> tuple[Sender, ...]:
    senders = (Sender(name, sum(map(len, talks))) for name, talks in pairs.items())
    return tuple(sorted(senders, key=lambda sender: (-sender.pairs, sender.name)))


def _hold_out(talks: list[list[Sample]], split: SplitOptions, rank: int) -> tuple[list[Sample], list[Sample]]:
    """Part a sender's conversations: held-out ones until they have the wanted number of pairs.

    At least one conversation stays for training, unless all is to be held out.
    """
    order = np.random.default_rng((split.seed, rank)).permutation(len(talks)).tolist()
    wanted = split.test_fraction * sum(map(len, talks))
    most = len(order) if split.test_fraction == 1 else len(order) - 1
    chosen, held = 0, 0
    while chosen < most and held < wanted:
        held += len(talks[order[chosen]])
        chosen += 1
    parts = order[chosen:], order[:chosen]
    train, test = ([sample for talk in part for sample in talks[talk]] for part in parts)
    return _distinct_from(train, test), test


def _distinct_from(train: list[Sample], test: list[Sample]) -> list[Sample]:
    """Drop training pairs that are held-out pairs too ("hi" -> "hello" in two conversations)."""
    held = set(test)
    return [sample for sample in train if sample not in held]


def _read_pairs() -> Pairs:
    """Read the usable turn pairs of every sender, conversation by conversation."""
    path = package_path("chitchat_dataset", "dataset.json", "chitchat-dataset==0.9.0")
    pairs: Pairs = defaultdict(list)
    try:
        talks = json.loads(path.read_bytes())
        for name in sorted(talks):
            for sender, found in _talk_pairs(talks[name]["messages"]).items():
                pairs[sender].append(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the chitchat data set ({error!r}); install chitchat-dataset==0.9.0") from error
    return dict(pairs)


def _talk_pairs(turns: list[list[dict[str, Any]]]) -> dict[str, list[tuple[str, str]]]:
    """Turn pairs (other's turn -> own turn) of one conversation by the sender who answers."""
    pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
    before: tuple[str, str] | None = None
    for turn in turns:
        texts = [" ".join(message["text"].split()) for message in turn]
        text = "\n".join(filter(None, texts))
        if not text:
            continue
        sender = turn[0]["sender"]
        if before and before[0] != sender:
            pairs[sender].append((before[1], text))
        before = (sender, text)
    return pairs
