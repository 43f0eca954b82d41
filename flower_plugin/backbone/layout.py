"""Where a model's blocks are, learnt from the model itself: one tiny forward pass, no table of names."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flower_plugin.errors import BackboneError

Task = Literal["classification", "causal-lm"]

# Not needed here, costly, or in the way: switched off where a family's forward knows the argument.
_SWITCHED_OFF = ("use_cache", "output_router_logits", "output_hidden_states", "output_attentions")


class PassEnded(Exception):  # noqa: N818
    """Raised by a handler to end a forward pass whose rest is not needed."""


def block_hidden(output: Any) -> Tensor:
    """Return the hidden states [batch, tokens, width] in a block's output: a tensor or a sequence's first."""
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(hidden, Tensor):
        raise BackboneError(f"a block returned {type(output).__name__}, which holds no hidden states")
    return hidden


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """Return a block's output with its hidden states replaced, in the form the family uses."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    return [hidden, *output[1:]] if isinstance(output, list) else hidden


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, caught inside the model's own forward pass."""

    forward: Callable[..., Any]
    argument: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the model hands to the block."""
        return block_hidden(self.args[0] if self.args else self.kwargs[self.argument])

    def run(self, hidden: Tensor | None = None) -> Any:
        """Run the block, on other hidden states where they are given."""
        if hidden is None:
            return self.forward(*self.args, **self.kwargs)
        if self.args:
            return self.forward(hidden, *self.args[1:], **self.kwargs)
        return self.forward(**{**self.kwargs, self.argument: hidden})


@contextmanager
def intercepted(blocks: Sequence[nn.Module], handler: Callable[[int, BlockCall], Any]) -> Iterator[None]:
    """Hand every call of a block, numbered in the order of the calls, to ``handler`` for its output.

    Only the ``forward`` of the instances is replaced, for the time of the context: the model keeps reading
    the blocks' attributes, and shared blocks (ALBERT) are simply called more than once.
    """
    counter = itertools.count()
    before = {block: block.__dict__.get("forward") for block in blocks}

    def watched(block: nn.Module) -> Callable[..., Any]:
        own, argument = block.forward, next(iter(inspect.signature(block.forward).parameters), "")
        return lambda *args, **kwargs: handler(next(counter), BlockCall(own, argument, args, kwargs))

    try:
        for block in before:
            block.__dict__["forward"] = watched(block)
        yield
    finally:
        for block, own in before.items():
            del block.__dict__["forward"]
            if own is not None:
                block.__dict__["forward"] = own


def switched_off(model: nn.Module) -> dict[str, bool]:
    """Return the keyword arguments that keep a forward pass free of caches and extra outputs."""
    known = inspect.signature(model.forward).parameters
    return {name: False for name in _SWITCHED_OFF if name in known}


@dataclass(frozen=True)
class Layout:
    """A model as embedding, blocks, head.

    Attributes
    ----------
    blocks
        The blocks in the order in which a forward pass calls them; a shared block stands here once a call.
    width
        Width of the blocks' outputs.
    final_width
        Width of the model's first output: the last hidden states, or the logits.
    templates
        For each call, the form of what the block returns, with None for every tensor.
    """

    blocks: tuple[nn.Module, ...]
    width: int
    final_width: int
    templates: tuple[Any, ...] = field(repr=False)

    def skip(self, index: int, hidden: Tensor) -> Any:
        """Return what block ``index`` returns when it leaves the hidden states as they are."""
        return with_hidden(self.templates[index], hidden)


@dataclass(frozen=True)
class Probe:
    """What one tiny pass showed: the layout, the last block's output and the model's first output."""

    layout: Layout
    last: Tensor
    final: Tensor


def probe(model: nn.Module, causal: bool) -> Probe:
    """Run a tiny text through the model and see which modules are its blocks.

    Blocks are the elements of an outermost ``nn.ModuleList`` that are called with and return hidden states
    [batch, tokens, width]; of several lists the one with the most calls. Works on the meta device as well.

    Raises
    ------
    BackboneError
        No blocks were found, the model does not read plain text, or it is not causal though it must be.
    """
    ids = probe_ids(model)
    lists = {name: tuple(found) for name, found in _outermost_lists(model)}
    owner = {block: name for name, found in lists.items() for block in found}
    calls: dict[str, list[tuple[nn.Module, Any]]] = {name: [] for name in lists}

    def note(block: nn.Module, _: Any, output: Any) -> None:
        calls[owner[block]].append((block, output))

    hooks = [block.register_forward_hook(note) for block in owner]
    try:
        final = run_quietly(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    finally:
        for hook in hooks:
            hook.remove()
    texts = {name: made for name, made in calls.items() if made and all(_is_text(o, ids) for _, o in made)}
    if not texts:
        raise BackboneError(
            f"no blocks were found in {type(model).__name__}: no nn.ModuleList in it has elements that return"
            " hidden states [batch, tokens, width]. Use a transformer that keeps its blocks in such a list."
        )
    made = max(texts.values(), key=len)
    last = block_hidden(made[-1][1])
    if causal:
        _check_causal(model, last)
    layout = Layout(
        tuple(block for block, _ in made),
        last.shape[-1],
        final.shape[-1],
        tuple(_template(o) for _, o in made),
    )
    return Probe(layout, last, final)


@torch.no_grad()
def run_quietly(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the model's first output in eval mode without gradients; its mode is put back afterwards."""
    training = model.training
    model.eval()
    try:
        output = model(**inputs, **switched_off(model))[0]
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise BackboneError(
            f"{type(model).__name__} could not read a text of three tokens: {error}. A backbone must accept"
            " input_ids and attention_mask alone."
        ) from error
    finally:
        model.train(training)
    if not isinstance(output, Tensor):
        raise BackboneError(f"{type(model).__name__} returned {type(output).__name__} instead of a tensor")
    return output


def run_head(model: nn.Module, layout: Layout, hidden: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the logits [rows, vocabulary] for last-block outputs [rows, width], by the model's own forward.

    ``device`` is where everything before the head is computed; "meta" when only the head has weights.
    """
    if hidden.dim() != 2 or hidden.shape[1] != layout.width:
        raise BackboneError(f"the head takes hidden states [rows, {layout.width}], not {list(hidden.shape)}")
    last = len(layout.blocks) - 1
    # Some families cannot reshape an empty batch: it is fed as one row, whose logits are cut off again.
    rows = hidden if len(hidden) else hidden.new_zeros((1, layout.width))
    ids = torch.zeros((len(rows), 1), dtype=torch.long, device=device or hidden.device)

    def pass_over(index: int, call: BlockCall) -> Any:
        return layout.skip(index, rows[:, None] if index == last else call.hidden)

    with intercepted(layout.blocks, pass_over):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **switched_off(model))
    return block_hidden(output[0])[: len(hidden), 0]


def token_embedding(model: nn.Module) -> Tensor:
    """Return the table of token embeddings [vocabulary, width]."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or len(weight) < 4:
        raise BackboneError(f"{type(model).__name__} has no table of token embeddings: no language model")
    return weight


def probe_ids(model: nn.Module) -> Tensor:
    """Return token ids [2, 3] that differ in the last token only."""
    weight = token_embedding(model)
    middle = len(weight) // 2
    ids = [[middle, middle + 1, middle - 1], [middle, middle + 1, middle]]
    return torch.tensor(ids, device=weight.device)


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}", child
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


def _is_text(output: Any, ids: Tensor) -> bool:
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    return isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.shape[:2] == ids.shape


def _template(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return type(output)([None] * len(output)) if type(output) in (tuple, list) else (None,) * len(output)
    return None


def _check_causal(model: nn.Module, last: Tensor) -> None:
    if last.is_meta:
        return
    early = last[:, :-1].float()
    if not torch.allclose(early[0], early[1], rtol=1e-3, atol=1e-3 * float(early.abs().max())):
        raise BackboneError(
            f"{type(model).__name__} is no causal language model: an early token's state depends on a later"
            " one. Use task 'classification', or set is_decoder in its config if it was trained so."
        )
