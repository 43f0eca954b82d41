"""Texts and sentence pairs of a classifier: cut first, then framed by the tokenizer's special tokens.

A tokenizer that cuts by itself also keeps what it cut off, of a pair every piece of one half with every piece of
the other: gigabytes for two long texts. Here each half is encoded alone, cut, and put into its place.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Framer = Callable[[Sequence[Ints]], tuple[Ints, Ints | None]]

CHARACTERS_A_TOKEN = 64
_FEWEST_CHARACTERS = 4096
_CHUNK_CHARACTERS = 1 << 20


def readable(max_length: int) -> int:
    """Characters of a text that are read for ``max_length`` tokens: far more than tokens have in any language."""
    return max(_FEWEST_CHARACTERS, CHARACTERS_A_TOKEN * max_length)


def chunks(texts: Sequence[str]) -> Iterator[slice]:
    """Slices of ``texts`` of about a million characters, so that a batch of long texts needs little memory."""
    start = used = 0
    for place, text in enumerate(texts):
        if used and used + len(text) > _CHUNK_CHARACTERS:
            yield slice(start, place)
            start, used = place, 0
        used += len(text)
    if start < len(texts):
        yield slice(start, len(texts))


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens two halves keep within ``room`` if the longer one is always cut; as tokenizers do it."""
    if first + second <= room:
        return first, second
    half = room // 2
    if first > half and second > half:
        return (half + room % 2, half) if first > second else (half, half + room % 2)
    return (first, room - first) if first < second else (room - second, second)


def make_framer(tokenizer: Any, text: str, halves: int) -> Framer:
    """Return the function from the token ids of each half to the ids and token types of the whole.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    text
        Any text of at least one token: where a pair of it ends up shows where others do.
    halves
        1 for texts, 2 for sentence pairs.
    """
    if not tokenizer.is_fast:
        return lambda parts: _prepare(tokenizer, parts)
    encoded = tokenizer(*[[text]] * halves, truncation=False, verbose=False)
    ids, places = encoded["input_ids"][0], encoded.sequence_ids(0)
    types = encoded["token_type_ids"][0] if "token_type_ids" in encoded else None
    runs = [
        (key, np.asarray([ids[at] for at in run], np.int32))
        for key, run in groupby(range(len(ids)), lambda at: (places[at], types[at] if types else 0))
    ]

    def frame(parts: Sequence[Ints]) -> tuple[Ints, Ints | None]:
        filled = [special if place is None else parts[place] for (place, _), special in runs]
        kinds = np.repeat(np.asarray([kind for (_, kind), _ in runs], np.int32), [len(part) for part in filled])
        return np.concatenate(filled), kinds if types else None

    return frame


def _prepare(tokenizer: Any, parts: Sequence[Ints]) -> tuple[Ints, Ints | None]:
    """Frame by a tokenizer in Python, which takes ids."""
    made = tokenizer.prepare_for_model(*[part.tolist() for part in parts], truncation=False, verbose=False)
    types = made.get("token_type_ids")
    return np.asarray(made["input_ids"], np.int32), None if types is None else np.asarray(types, np.int32)
