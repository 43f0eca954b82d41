"""What a device's data is made of: samples, and the two parts of a device's data."""

from collections.abc import Mapping
from dataclasses import dataclass

from flower_plugin.errors import DataError

Options = Mapping[str, bool | int | float | str]
"""Merged run-config and node-config values; keys are kebab-case. "" means "not set"."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample in exactly one of three forms, with an optional class label.

    Parameters
    ----------
    text
        A plain text.
    prompt, response
        A pair; the loss of a causal LM is on the response only.
    messages
        A conversation: ``((role, content), ...)``; the loss is on the assistant's turns.
    label
        Name of the class (always a string), or None.

    Raises
    ------
    DataError
        If the sample has none or several of the forms.
    """

    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.response is None):
            given, other = ("prompt", "response") if self.response is None else ("response", "prompt")
            raise DataError(f"a sample has a {given} but no {other}; give both or neither")
        forms = [self.text is not None, self.prompt is not None, self.messages is not None]
        if sum(forms) != 1:
            raise DataError(f"a sample needs one of: text, prompt + response, messages; {sum(forms)} of them are given")

    def is_empty(self) -> bool:
        """Whether nothing but white space could be learnt from."""
        if self.text is not None:
            return not self.text.strip()
        if self.response is not None:
            return not self.response.strip()
        return not any(content.strip() for _, content in self.messages or ())


@dataclass(frozen=True, slots=True)
class ClientData:
    """Everything one device has: samples to train on and disjoint, held-out ones to evaluate on.

    ``label_names`` are all classes of the task in the order of their indices (the same on every device),
    or None when the source cannot know them (a device's own file; a causal LM).
    """

    train: tuple[Sample, ...] = ()
    test: tuple[Sample, ...] = ()
    label_names: tuple[str, ...] | None = None

    def labels_seen(self) -> tuple[str, ...]:
        """The labels that occur in this device's samples, sorted."""
        return tuple(sorted({s.label for s in (*self.train, *self.test) if s.label is not None}))
