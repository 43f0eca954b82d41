"""From samples to token ids and the mask of the tokens that carry the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_plugin.data.sample import Sample

from .chat import Layout, Span, lay_out

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Tokenised:
    """Token ids int32 [length] (empty: nothing to read) and loss bool [length]: tokens to be predicted."""

    input_ids: Ints
    loss: NDArray[np.bool_]
    truncated: bool = False
    token_types: Ints | None = None


def chat_template(tokenizer: Any, template: str | None) -> str | None:
    """Return the chat template in force: the given one, else the tokenizer's own, else None."""
    if template or not getattr(tokenizer, "chat_template", None):
        return template or None
    own: str = tokenizer.get_chat_template()
    return own


def tokenise_classification(samples: Sequence[Sample], tokenizer: Any, max_length: int) -> list[Tokenised]:
    """Tokenise texts and sentence pairs with the tokenizer's special tokens, cut to ``max_length``."""
    single = [i for i, sample in enumerate(samples) if sample.prompt is None]
    double = [i for i, sample in enumerate(samples) if sample.prompt is not None]
    results: dict[int, Tokenised] = {}
    for chosen in (single, double):
        if not chosen:
            continue
        texts = [clean(_whole_text(samples[i])) for i in chosen]
        pairs = [clean(samples[i].response or "") for i in chosen] if chosen is double else None
        specials = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
        encoded = tokenizer(texts, pairs, truncation=True, max_length=max_length)
        types = encoded.get("token_type_ids") if pairs else None
        cut = _was_cut(encoded, texts, pairs, tokenizer, max_length)
        for place, i in enumerate(chosen):
            ids = np.asarray(encoded["input_ids"][place], np.int32)
            ids = ids[:0] if len(ids) <= specials else ids
            kinds = np.asarray(types[place], np.int32) if types else None
            results[i] = Tokenised(ids, np.zeros(len(ids), np.bool_), cut[place], kinds)
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
    layouts = [lay_out(sample, number, tokenizer, template) for number, sample in samples]
    results: dict[int, Tokenised] = {}
    for specials in (True, False):
        chosen = [i for i, layout in enumerate(layouts) if layout.add_special_tokens is specials]
        if not chosen:
            continue
        for i, (ids, loss) in zip(chosen, _encode([layouts[i] for i in chosen], tokenizer), strict=True):
            results[i] = _cut(ids, loss, layouts[i], max_length, tokenizer.bos_token_id)
    return [results[i] for i in range(len(samples))]


def clean(text: str) -> str:
    """Replace lone surrogates (legal in JSON, not in UTF-8), which tokenizers refuse."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _whole_text(sample: Sample) -> str:
    if sample.messages is not None:
        return "\n".join(content for _, content in sample.messages)
    return sample.text if sample.text is not None else sample.prompt or ""


def _was_cut(encoded: Any, texts: list[str], pairs: list[str] | None, tokenizer: Any, max_length: int) -> list[bool]:
    if encoded.encodings is not None:
        return [bool(encoding.overflowing) for encoding in encoded.encodings]
    # A tokenizer in Python keeps no overflow: look at the full lengths.
    full = tokenizer(texts, pairs, verbose=False)["input_ids"]
    return [len(ids) > max_length for ids in full]


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
        return Tokenised(ids[:max_length], loss[:max_length], len(ids) > max_length)
    marked = np.flatnonzero(loss)
    if not len(marked):
        return Tokenised(ids, loss)
    ids, loss = ids[: marked[-1] + 1], loss[: marked[-1] + 1]  # nothing after the last response matters
    if len(ids) <= max_length:
        return Tokenised(ids, loss)
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
