"""Tokenised examples: what of a sample the backbone reads, and which tokens the loss uses."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flower_plugin.data.sample import Sample
from flower_plugin.errors import ConfigError

from .tokenise import Tokenised, chat_template, tokenise_classification, tokenise_language

Task = Literal["classification", "causal-lm"]
Ints = NDArray[np.int32]

DIGEST_BYTES = 16
# Part of every template id: raise it when the way a sample becomes tokens changes, so that old caches end.
_RULES = "examples-1"


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """One tokenised sample.

    Attributes
    ----------
    digest
        16 bytes: hash of the sample's content and label; see `digest_of`.
    input_ids
        int32 [length]. For a causal LM it ends at the last loss position: later tokens influence nothing.
    loss_positions
        int32 [tokens]: positions t whose output predicts token t + 1 (causal LM), empty for classification.
    targets
        int32 [tokens]: the token ids to predict, or [1]: the class index.
    truncated
        Whether the text was cut to the maximum length.
    token_types
        int32 [length] for the second half of a sentence pair, else None.
    """

    digest: bytes
    input_ids: Ints
    loss_positions: Ints
    targets: Ints
    truncated: bool = False
    token_types: Ints | None = None


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a device and what became of its other samples.

    ``truncated`` counts kept examples that were cut; the other counts are of samples that were dropped.
    ``bad_labels`` names a few labels that are not among the label names.
    """

    kept: tuple[Example, ...]
    template_id: str
    truncated: int = 0
    empty: int = 0
    without_loss: int = 0
    bad_label: int = 0
    duplicates: int = 0
    bad_labels: tuple[str, ...] = ()

    @property
    def dropped(self) -> int:
        """Number of samples that gave no example."""
        return self.empty + self.without_loss + self.bad_label + self.duplicates


@dataclass(frozen=True, eq=False, slots=True)
class Collated:
    """A padded batch.

    Attributes
    ----------
    inputs
        ``input_ids``, ``attention_mask`` (and ``token_type_ids`` of sentence pairs), int64 [batch, length].
    rows, columns
        int64 [tokens]: where the loss positions lie in the padded batch, example by example.
    targets
        int64 [tokens], or [batch] for classification.
    tokens_per_example
        Number of targets of each example.
    """

    inputs: dict[str, torch.Tensor]
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor
    tokens_per_example: tuple[int, ...]


def digest_of(sample: Sample, key: bytes) -> bytes:
    """Return the 16-byte BLAKE2b hash of a sample's content and label.

    ``key`` has at most 64 bytes. With an empty key this is a plain content hash: alike on every device, and whoever
    sees it can test whether a guessed text is behind it. Only a secret key hides that.
    """
    content = [sample.text, sample.prompt, sample.response, sample.messages, sample.label]
    canonical = json.dumps(content, separators=(",", ":")).encode("ascii")
    return hashlib.blake2b(canonical, key=key, digest_size=DIGEST_BYTES).digest()


def template_id(
    tokenizer: Any, task: Task, *, label_names: Sequence[str] | None = None, template: str | None = None
) -> str:
    """Return 32 hex digits that name how samples become tokens and targets (template, label order, rules)."""
    names = list(label_names or ()) if task == "classification" else None
    chat = chat_template(tokenizer, template) if task == "causal-lm" else None
    canonical = json.dumps([_RULES, task, names, chat]).encode("ascii")
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def build_examples(
    samples: Sequence[Sample],
    tokenizer: Any,
    task: Task,
    *,
    label_names: Sequence[str] | None = None,
    max_length: int,
    key: bytes,
    template: str | None = None,
) -> Examples:
    """Tokenise samples; count and drop those that cannot be used.

    Classification reads a text, a prompt with its response as a sentence pair, or a conversation's contents
    as lines. A causal LM has its loss on every token of a text, on the response of a pair (laid out by the
    chat template if there is one; else joined as they are and ended by the end-of-sequence token), or on
    the assistant's turns with their end-of-turn token. Too long ones are cut: a text at its end, pairs and
    conversations at their beginning, so that the (last) response is kept.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    label_names
        All classes, in the order of their indices; needed for classification.
    max_length
        Most tokens of an example, at least 4.
    key
        Key of the digests, at most 64 bytes; empty: plain content hashes.
    template
        A Jinja chat template to use instead of the tokenizer's own (causal LM only).

    Raises
    ------
    ConfigError
        For a bad argument.
    DataError
        If the chat template refuses a conversation (its number is named).
    """
    _check(task, label_names, max_length, key, template)
    names = tuple(label_names or ()) if task == "classification" else None
    chosen = _choose(samples, names, key)
    usable = list(chosen.samples.values())
    if names is not None:
        tokenised = tokenise_classification([sample for _, sample in usable], tokenizer, max_length)
    else:
        tokenised = tokenise_language(usable, tokenizer, max_length, chat_template(tokenizer, template))
    targets = [names.index(str(sample.label)) if names else None for _, sample in usable]
    made = list(map(_example, chosen.samples, tokenised, targets))
    kept = tuple(example for example in made if example is not None)
    blank = sum(not len(item.input_ids) for item in tokenised)
    return Examples(
        kept=kept,
        template_id=template_id(tokenizer, task, label_names=names, template=template),
        truncated=sum(example.truncated for example in kept),
        empty=chosen.empty + blank,
        without_loss=len(made) - len(kept) - blank,
        bad_label=len(chosen.unknown),
        duplicates=chosen.duplicates,
        bad_labels=tuple(dict.fromkeys(chosen.unknown))[:5],
    )


def length_buckets(examples: Sequence[Example], batch_size: int, max_tokens: int | None = None) -> list[list[int]]:
    """Group examples of like length, so that batches waste little on padding.

    Returns lists of indices, each index once, longest examples first (the peak of memory comes at once). A
    batch has at most ``batch_size`` examples and, padded, at most ``max_tokens`` tokens (a single longer
    example makes a batch of its own).
    """
    if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(f"batch size {batch_size} and token limit {max_tokens}: both must be at least 1")
    buckets: list[list[int]] = []
    width = 0
    for index in sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids)):
        full = not buckets or len(buckets[-1]) == batch_size
        if full or (max_tokens is not None and (len(buckets[-1]) + 1) * width > max_tokens):
            buckets.append([])
            width = len(examples[index].input_ids)
        buckets[-1].append(index)
    return buckets


def collate(examples: Sequence[Example], pad_id: int, padding_side: Literal["left", "right"] = "right") -> Collated:
    """Pad examples to the longest of them and locate their loss positions in the padded batch."""
    if padding_side not in ("left", "right"):
        raise ConfigError(f'padding side {padding_side!r}: use "left" or "right"')
    lengths = [len(example.input_ids) for example in examples]
    shape = (len(examples), max(lengths, default=0))
    ids, mask, types = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    offsets = [shape[1] - length if padding_side == "left" else 0 for length in lengths]
    for row, (example, start, length) in enumerate(zip(examples, offsets, lengths, strict=True)):
        ids[row, start : start + length] = example.input_ids
        mask[row, start : start + length] = 1
        if example.token_types is not None:
            types[row, start : start + length] = example.token_types
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    if any(example.token_types is not None for example in examples):
        inputs["token_type_ids"] = torch.from_numpy(types)
    columns = [example.loss_positions + start for example, start in zip(examples, offsets, strict=True)]
    return Collated(
        inputs=inputs,
        rows=torch.from_numpy(np.repeat(np.arange(len(examples)), [len(column) for column in columns])),
        columns=_join(columns),
        targets=_join([example.targets for example in examples]),
        tokens_per_example=tuple(len(example.targets) for example in examples),
    )


@dataclass(slots=True)
class _Chosen:
    """Usable samples (with their numbers) by digest, and counts of the others."""

    samples: dict[bytes, tuple[int, Sample]] = field(default_factory=dict)
    empty: int = 0
    duplicates: int = 0
    unknown: list[str] = field(default_factory=list)


def _choose(samples: Sequence[Sample], label_names: tuple[str, ...] | None, key: bytes) -> _Chosen:
    chosen = _Chosen()
    for number, sample in enumerate(samples):
        digest = digest_of(sample, key)
        if sample.is_empty():
            chosen.empty += 1
        elif label_names is not None and sample.label not in label_names:
            chosen.unknown.append("(none)" if sample.label is None else sample.label)
        elif digest in chosen.samples:
            chosen.duplicates += 1
        else:
            chosen.samples[digest] = (number, sample)
    return chosen


def _join(arrays: Sequence[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *arrays], dtype=np.int64))


def _example(digest: bytes, item: Tokenised, label: int | None) -> Example | None:
    """Make an example, or None if there is nothing to read or nothing to predict."""
    if not len(item.input_ids):
        return None
    if label is not None:
        targets, nowhere = np.array([label], np.int32), np.zeros(0, np.int32)
        return Example(digest, item.input_ids, nowhere, targets, item.truncated, item.token_types)
    positions = np.flatnonzero(item.loss[1:]).astype(np.int32)
    if not len(positions):
        return None
    read = item.input_ids[: positions[-1] + 1].copy()
    return Example(digest, read, positions, item.input_ids[positions + 1], item.truncated)


def _check(task: str, label_names: Sequence[str] | None, max_length: int, key: bytes, template: str | None) -> None:
    if task not in ("classification", "causal-lm"):
        raise ConfigError(f"task = {task!r}: allowed are classification, causal-lm")
    if task == "classification" and not label_names:
        raise ConfigError("classification needs the label names; the data source gives none: set label-names")
    if label_names and len(set(label_names)) != len(label_names):
        raise ConfigError(f"label names {list(label_names)!r}: a name occurs twice")
    if task == "classification" and template:
        raise ConfigError("a chat template is used by the task causal-lm only; leave it empty")
    if max_length < 4:
        raise ConfigError(f"max-length = {max_length}: at least 4 tokens are needed")
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigError(f"the digest key has {len(key)} bytes; at most {hashlib.blake2b.MAX_KEY_SIZE} are used")
