"""From samples to token ids and the mask of the tokens that carry the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_plugin.data.sample import Sample

from .chat import Layout, Span, lay_out, shorten
from .framing import Framer, Ints, chunks, longest_first, make_framer, readable


@dataclass(frozen=True, eq=False, slots=True)
class Tokenised:
    """Token ids int32 [length] (empty: nothing to read) and loss bool [length]: tokens to be predicted."""

    input_ids: Ints
    loss: NDArray[np.bool_]
    truncated: bool = False
    token_types: Ints | None = None


_NOTHING = Tokenised(np.zeros(0, np.int32), np.zeros(0, np.bool_))


def chat_template(tokenizer: Any, template: str | None) -> str | None:
    """Return the chat template in force: the given one, else the tokenizer's own, else None."""
    if template or not getattr(tokenizer, "chat_template", None):
        return template or None
    own: str = tokenizer.get_chat_template()
    return own


def tokenise_classification(samples: Sequence[Sample], tokenizer: Any, max_length: int) -> list[Tokenised]:
    """Tokenise texts and sentence pairs with the tokenizer's special tokens, cut to ``max_length``.

    Of a pair the longer half is cut. The cost depends on ``max_length``, not on how long a text is: beyond 64
    characters for each token (4096 at least) nothing is read.
    """
    results: dict[int, Tokenised] = {}
    for halves in (1, 2):
        chosen = [i for i, sample in enumerate(samples) if (1 if sample.prompt is None else 2) == halves]
        texts = [text for i in chosen for text in _texts(samples[i])]
        results.update(zip(chosen, _framed(texts, halves, tokenizer, max_length), strict=True))
    return [results[i] for i in range(len(samples))]


def tokenise_language(
    samples: Sequence[tuple[int, Sample]], tokenizer: Any, max_length: int, template: str | None
) -> list[Tokenised]:
    """Tokenise numbered samples for a causal LM, mark the tokens to predict, cut to ``max_length``.

    Raises
    ------
    DataError
        If a conversation comes without a chat template, or the template refuses it.
    """
    limit, begin = readable(max_length), getattr(tokenizer, "bos_token", None)
    layouts = [shorten(lay_out(sample, number, tokenizer, template), limit, begin) for number, sample in samples]
    results: dict[int, Tokenised] = {}
    for specials in (True, False):
        chosen = [i for i, layout in enumerate(layouts) if layout.add_special_tokens is specials]
        if not chosen:
            continue
        for chunk in chunks([layouts[i].text for i in chosen]):
            some = chosen[chunk]
            for i, (ids, loss) in zip(some, _encode([layouts[i] for i in some], tokenizer), strict=True):
                results[i] = _cut(ids, loss, layouts[i], max_length, tokenizer.bos_token_id)
    return [results[i] for i in range(len(samples))]


def clean(text: str) -> str:
    """Replace lone surrogates (legal in JSON, not in UTF-8), which tokenizers refuse."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, eq=False, slots=True)
class _Half:
    """The token ids of a text, at most as many as there is room for, and how many there are in all."""

    ids: Ints
    length: int


def _texts(sample: Sample) -> tuple[str, ...]:
    if sample.prompt is not None:
        return sample.prompt, sample.response or ""
    if sample.messages is not None:
        return ("\n".join(content for _, content in sample.messages),)
    return (sample.text or "",)


def _framed(texts: Sequence[str], halves: int, tokenizer: Any, max_length: int) -> list[Tokenised]:
    """Encode texts, of which ``halves`` neighbours make a sample."""
    room = max(0, max_length - tokenizer.num_special_tokens_to_add(pair=halves == 2))
    limit, left = readable(max_length), tokenizer.truncation_side == "left"
    read = [clean(text[-limit:] if left else text[:limit]) for text in texts]
    parts = _encode_halves(read, tokenizer, room)
    spoken = [text for text, part in zip(read, parts, strict=True) if part.length]
    if not spoken or not room:
        return [_NOTHING] * (len(texts) // halves)
    framer = make_framer(tokenizer, min(spoken, key=len), halves)
    groups = [slice(i, i + halves) for i in range(0, len(parts), halves)]
    return [_join(parts[group], room, framer, left, max(map(len, texts[group])) > limit) for group in groups]


def _encode_halves(texts: Sequence[str], tokenizer: Any, room: int) -> list[_Half]:
    left = tokenizer.truncation_side == "left"
    found: list[_Half] = []
    for chunk in chunks(texts):
        encoded = tokenizer(
            texts[chunk],
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        found += [_Half(_keep(np.asarray(ids, np.int32), room, left), len(ids)) for ids in encoded["input_ids"]]
    return found


def _join(parts: Sequence[_Half], room: int, framer: Framer, left: bool, shortened: bool) -> Tokenised:
    lengths = [part.length for part in parts]
    if not any(lengths):
        return _NOTHING
    kept = longest_first(lengths[0], lengths[1], room) if len(parts) == 2 else (min(lengths[0], room),)
    ids, types = framer([_keep(part.ids, count, left) for part, count in zip(parts, kept, strict=True)])
    cut = shortened or sum(lengths) > room
    return Tokenised(ids, np.zeros(len(ids), np.bool_), cut, types if len(parts) == 2 else None)


def _keep(ids: Ints, count: int, left: bool) -> Ints:
    """Cut ids to ``count``: at their beginning (``left``), or at their end."""
    return ids[max(0, len(ids) - count) :].copy() if left else ids[:count].copy()


def _encode(layouts: Sequence[Layout], tokenizer: Any) -> list[tuple[Ints, NDArray[np.bool_]]]:
    """Encode texts in one batch; the offsets say which tokens lie in a text's loss spans."""
    specials = layouts[0].add_special_tokens
    texts = [clean(layout.text) for layout in layouts]
    if not tokenizer.is_fast:
        return [_encode_pieces(layout, tokenizer) for layout in layouts]
    encoded = tokenizer(
        texts,
        add_special_tokens=specials,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        verbose=False,
    )
    results = []
    special_ids = np.asarray(sorted(tokenizer.added_tokens_decoder), np.int32)
    for layout, ids, offsets, added in zip(
        layouts, encoded["input_ids"], encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True
    ):
        ids = np.asarray(ids, np.int32)
        bounds = np.asarray(offsets, np.int64).reshape(-1, 2)
        # The mask marks template tokens such as <|im_end|> too; tokens that were added have no extent.
        outside = np.asarray(added, np.bool_) & (bounds[:, 0] == bounds[:, 1])
        loss = _in_spans(bounds, layout.spans, np.isin(ids, special_ids)) & ~outside
        if layout.spans is None:
            loss[:] = True
        results.append(_with_end(ids, loss, layout, tokenizer))
    return results


def _in_spans(
    bounds: NDArray[np.int64], spans: tuple[Span, ...] | None, special: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mark the tokens [start, end) that overlap a span.

    A token that straddles a span's start counts (" answer" after "Q:"), but not a special one, which belongs
    to the header and has only swallowed white space.
    """
    start, end = bounds[:, 0], bounds[:, 1]
    marked = np.zeros(len(bounds), np.bool_)
    for low, high in spans or ():
        overlaps = (start < high) & ((end > low) | ((start == end) & (start >= low)))
        marked |= overlaps & ((start >= low) | ~special)
    return marked


def _with_end(ids: Ints, loss: NDArray[np.bool_], layout: Layout, tokenizer: Any) -> tuple[Ints, NDArray[np.bool_]]:
    """End a plainly joined pair by the end-of-sequence token, which is to be learnt as well."""
    end = tokenizer.eos_token_id
    if not layout.ends or end is None or not len(ids):
        return ids, loss
    if ids[-1] == end:
        loss[-1] = True
        return ids, loss
    return np.append(ids, np.int32(end)), np.append(loss, True)


def _encode_pieces(layout: Layout, tokenizer: Any) -> tuple[Ints, NDArray[np.bool_]]:
    """Encode the text piece by piece, for tokenizers that know no offsets."""
    spans = layout.spans if layout.spans is not None else ((0, len(layout.text)),)
    borders = [0, *(border for span in spans for border in span), len(layout.text)]
    ids: list[int] = []
    loss: list[bool] = []
    for number, (low, high) in enumerate(pairwise(borders)):
        piece = tokenizer.encode(clean(layout.text[low:high]), add_special_tokens=False) if low < high else []
        ids += piece
        loss += [number % 2 == 1] * len(piece)
    if layout.add_special_tokens:
        whole = tokenizer.build_inputs_with_special_tokens(ids)
        before = next((i for i in range(len(whole)) if whole[i : i + len(ids)] == ids), 0)
        after = len(whole) - before - len(ids)
        plain = layout.spans is None
        ids, loss = whole, [plain] * before + loss + [plain] * after
    return _with_end(np.asarray(ids, np.int32), np.asarray(loss, np.bool_), layout, tokenizer)


def _cut(ids: Ints, loss: NDArray[np.bool_], layout: Layout, max_length: int, begin: int | None) -> Tokenised:
    """Cut to ``max_length``: a plain text at its end, others so that the last response stays whole.

    A prompt is cut from the left, behind the begin-of-sequence token, which models lean on. A response that
    does not fit is cut at its end, after a quarter of the length for what comes before it.
    """
    if layout.spans is None:
        return Tokenised(ids[:max_length], loss[:max_length], layout.shortened or len(ids) > max_length)
    marked = np.flatnonzero(loss)
    if not len(marked):
        return Tokenised(ids, loss, layout.shortened)
    ids, loss = ids[: marked[-1] + 1], loss[: marked[-1] + 1]  # nothing after the last response matters
    if len(ids) <= max_length:
        return Tokenised(ids, loss, layout.shortened)
    gaps = np.flatnonzero(np.diff(marked) > 1)
    last = int(marked[gaps[-1] + 1]) if len(gaps) else int(marked[0])
    low = len(ids) - max_length
    if low > last - 2:
        low = max(0, last - max(2, max_length // 4))
    kept, wanted = ids[low : low + max_length].copy(), loss[low : low + max_length].copy()
    if low:
        wanted[:2] = False  # what precedes these tokens was cut, so they cannot be predicted fairly
        if begin is not None and ids[0] == begin:
            kept[0] = begin
    return Tokenised(kept, wanted, True)
