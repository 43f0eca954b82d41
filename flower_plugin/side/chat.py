"""Laying a sample out as one text for a causal LM, with the spans that carry the loss."""

from dataclasses import dataclass
from typing import Any

from flower_plugin.data.sample import Sample
from flower_plugin.errors import DataError

Span = tuple[int, int]
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Layout:
    """A text and the spans [start, end) of its characters that carry the loss (None: all of it).

    ``ends``: whether an end-of-sequence token is to follow. ``shortened``: whether parts of it were left out.
    """

    text: str
    spans: tuple[Span, ...] | None = None
    add_special_tokens: bool = True
    ends: bool = False
    shortened: bool = False


def lay_out(sample: Sample, number: int, tokenizer: Any, template: str | None) -> Layout:
    """Lay a sample out: a plain text as it is, pairs and conversations by the chat template.

    Raises
    ------
    DataError
        If there is no template for a conversation, or the template refuses it; names the sample's number.
    """
    if sample.text is not None:
        return Layout(sample.text)
    if sample.prompt is not None and sample.response is not None:
        if template is None:
            text = sample.prompt + sample.response
            return Layout(text, ((len(sample.prompt), len(text)),), ends=True)
        turns = [("user", sample.prompt), ("assistant", sample.response)]
    else:
        turns = list(sample.messages or ())
    if template is None:
        raise DataError(
            f"sample {number} is a conversation, but the tokenizer has no chat template; "
            "give one, or use prompt and response"
        )
    messages = [{"role": role, "content": content} for role, content in turns]
    renderer = _Renderer(tokenizer, template)
    try:
        text = renderer.render(messages)
        spans = renderer.assistant_spans(messages, text)
    except Exception as error:  # templates raise jinja2's and their own errors
        raise DataError(f"the chat template refuses sample {number}: {error}") from error
    return Layout(text, spans, add_special_tokens=False)


def shorten(layout: Layout, limit: int, begin: str | None) -> Layout:
    """Leave out what cannot be read anyway: all but ``limit`` characters before, and after, the last response.

    Of a plain text the first ``limit`` characters stay. The begin-of-sequence token ``begin`` stays in front.
    """
    text = layout.text
    first = next((low for low, high in reversed(layout.spans or ()) if low < high), 0)
    start, end = max(0, first - limit), min(len(text), first + limit)
    if start == 0 and end == len(text):
        return layout
    head = begin if start and begin and text.startswith(begin) else ""
    shift = len(head) - start
    spans = layout.spans and tuple(
        (max(low, start) + shift, min(high, end) + shift) for low, high in layout.spans if high > start and low < end
    )
    return Layout(head + text[start:end], spans, layout.add_special_tokens, layout.ends and end == len(text), True)


class _Renderer:
    """Renders conversations by one template, and finds the assistant's turns in the result."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """Render messages, with the header of an answer to come if ``prompt``."""
        text: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def assistant_spans(self, messages: Messages, text: str) -> tuple[Span, ...]:
        """Return the spans of the assistant's turns in ``text``, each to the end of its end-of-turn token."""
        spans: list[Span] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            span = self._by_prefixes(messages, turn, text) or self._by_markers(messages, turn, text)
            if spans:  # never overlapping, whatever a template does
                span = max(span[0], spans[-1][1]), max(span[1], spans[-1][1])
            spans.append(span)
        return tuple(spans)

    def _by_prefixes(self, messages: Messages, turn: int, text: str) -> Span | None:
        """Find a turn as the difference of two renderings: up to its header, and up to its end.

        None if they are not beginnings of the text (templates that rewrite history), or the template does not
        know the header of an answer to come.
        """
        try:
            bare, headed = (self.render(messages[:turn], prompt=prompt) for prompt in (False, True))
        except Exception:  # many templates refuse an empty conversation
            return None
        whole = self.render(messages[: turn + 1])
        if bare == headed or not text.startswith(headed) or not text.startswith(whole):
            return None
        return len(headed), _end_of_turn(whole, len(headed), messages[turn]["content"])

    def _by_markers(self, messages: Messages, turn: int, text: str) -> Span:
        """Find a turn by writing two unlike markers in its place: what differs is its content."""
        first, second = (self._marked(messages, turn, marker) for marker in _MARKERS)
        start = min(_agreement(first, second), _agreement(first, text))
        after = min(_agreement(first[::-1], other[::-1]) for other in (second, text))
        end = max(start, len(text) - after)
        alone = self._marked(messages[: turn + 1], turn, _MARKERS[0])
        tail = alone[alone.rfind(_MARKERS[0]) + len(_MARKERS[0]) :]
        return start, end + _agreement(tail.rstrip() or tail, text[end:])

    def _marked(self, messages: Messages, turn: int, marker: str) -> str:
        changed = {"role": messages[turn]["role"], "content": marker}
        return self.render([*messages[:turn], changed, *messages[turn + 1 :]])


_MARKERS = ("\u2460first\u2461", "\u2462second\u2463")  # unlike at both ends, and unlikely in a text


def _agreement(first: str, second: str) -> int:
    """Return the length of the beginning that two texts share, found by halving: texts may be long."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _end_of_turn(whole: str, start: int, content: str) -> int:
    """Return where a turn ends: after its end-of-turn token, without the line break that follows it.

    Where no such token follows the content, the white space is the end of turn, and belongs to it.
    """
    stripped = whole.rstrip()
    without_token = bool(content.strip()) and stripped.endswith(content.rstrip())
    if len(stripped) <= start or without_token:
        return len(whole)
    return len(stripped)
