"""Any Hugging Face transformer as embedding, blocks and head; each part is run by the model's own forward."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flower_plugin.errors import BackboneError

from .checks import check_equal, check_task, refuse_encoder_decoder
from .layout import (
    BlockCall,
    Layout,
    PassEnded,
    Task,
    block_hidden,
    intercepted,
    probe,
    probe_ids,
    switched_off,
)

Inputs = Mapping[str, Tensor]


class Backbone:
    """A frozen transformer, cut open: taps, stages and head equal what the unsplit model computes.

    Made by `from_model` or `load_backbone`. One thread at a time may run it.

    Attributes
    ----------
    model
        The Hugging Face model, in eval mode and frozen.
    tokenizer
        Its tokenizer; None only when made from a model in memory.
    task
        ``"classification"`` (hidden states of the base model) or ``"causal-lm"``.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, task: Task, layout: Layout
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.task = task
        self.layout = layout
        self._split_checked = False

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, task: Task) -> Self:
        """View a model in memory; puts it in eval mode and freezes it (unfreeze afterwards what is to train).

        Raises
        ------
        BackboneError
            The task is unknown, the model has an encoder and a decoder, no blocks were found, it is not
            causal for task ``"causal-lm"``, or what follows its blocks does not work token by token.
        """
        check_task(task)
        refuse_encoder_decoder(model.config)
        model.train(False).requires_grad_(False)
        body = model if task == "causal-lm" else model.base_model
        seen = probe(body, causal=task == "causal-lm")
        backbone = cls(model, tokenizer, task, seen.layout)
        if task == "causal-lm":
            if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
                raise BackboneError(f"{type(model).__name__} has no language-model head; load a causal LM")
            with torch.no_grad():
                logits = backbone.head(seen.last.flatten(0, 1))
            check_equal(model, "head", logits, seen.final.flatten(0, 1))
        return backbone

    @property
    def body(self) -> nn.Module:
        """The module whose forward pass is run: the whole causal LM, or the base model for classification."""
        return self.model if self.task == "causal-lm" else self.model.base_model

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks in the order of their calls; a shared block stands here once a call."""
        return self.layout.blocks

    @property
    def num_blocks(self) -> int:
        """The number of block calls in a forward pass."""
        return len(self.layout.blocks)

    @property
    def hidden_size(self) -> int:
        """Width of the blocks' outputs."""
        return self.layout.width

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def forward_taps(self, inputs: Inputs, taps: Sequence[int], gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Run the frozen model and keep, at each tap, only what ``gather`` takes from the hidden states.

        Parameters
        ----------
        inputs
            ``input_ids`` [batch, tokens], ``attention_mask`` and whatever else the model's forward takes.
        taps
            Block indices, ascending. For classification the last block's tap is the model's last hidden
            state, after its final norm (as wide as a block's output; else the raw output).
        gather
            Called with hidden states [batch, tokens, width] while the pass runs; what it returns is kept.

        Returns
        -------
        list of Tensor
            One result of ``gather`` for each tap. The pass ends after the last tap.

        Raises
        ------
        BackboneError
            The taps are no ascending indices of blocks, or a tap did not fire.
        """
        self._check_taps(taps)
        finished = self._has_final_state and taps[-1] == self.num_blocks - 1
        raw = frozenset(taps[:-1] if finished else taps)
        kept: list[Tensor] = []

        def tap(index: int, call: BlockCall) -> Any:
            output = call.run()
            if index in raw:
                kept.append(gather(block_hidden(output)))
            if index == taps[-1] and not finished:
                raise PassEnded
            return output

        final = self._run(inputs, tap)
        if finished and final is not None:
            kept.append(gather(final))
        if len(kept) != len(taps):
            raise BackboneError(f"{len(kept)} of {len(taps)} taps fired: {type(self.model).__name__} left out blocks")
        return kept

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of raw last-block outputs [rows, width]; differentiable.

        Runs what the model does after its last block: final norm, projection, scale, soft cap, in the model's
        dtype and on its device. Rows are fed as a batch of one-token texts, so masks stay tiny.

        Raises
        ------
        BackboneError
            The task is not ``"causal-lm"``, or the width is another.
        """
        if self.task != "causal-lm":
            raise BackboneError("only a causal-lm backbone has a head; a classifier's head is trained anew")
        return run_head(self.model, self.layout, hidden.to(self.device, self.model.dtype))

    def run_blocks(self, lo: int, hi: int, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        """Run a stage: blocks ``lo`` to ``hi - 1`` by the model's own forward, the others passed over.

        Parameters
        ----------
        lo, hi
            The stage, 0 <= lo < hi <= num_blocks.
        hidden
            Hidden states [batch, tokens, width] that arrive at block ``lo``; None: the inputs are embedded.
        inputs
            As for `forward_taps`; with hidden states given, `without_text` of them is enough.

        Returns
        -------
        Tensor
            Hidden states [batch, tokens, width], differentiable: the raw output of block ``hi - 1``; for a
            classification backbone that ends with its last block, the last hidden state after the final norm.

        Raises
        ------
        BackboneError
            The range is wrong, or this family's blocks need more than the hidden states of the one before.
        """
        if not 0 <= lo < hi <= self.num_blocks:
            raise BackboneError(f"blocks {lo} to {hi} of {self.num_blocks}: give 0 <= lo < hi <= {self.num_blocks}")
        if lo > 0 and hidden is None:
            raise BackboneError(f"a stage that starts at block {lo} needs the hidden states of block {lo - 1}")
        if self.model.training and getattr(self.model, "is_gradient_checkpointing", False):
            raise BackboneError("a stage cannot run with gradient checkpointing: switch it off on the model")
        if not self._split_checked and self.num_blocks > 1:
            self._check_split()
        return self._stage(lo, hi, hidden, inputs)

    def without_text(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the inputs with a filler for token ids that keeps the padding (RoBERTa reads it)."""
        ids = inputs["input_ids"]
        pad = getattr(self.config, "pad_token_id", None)
        filler = 1 if pad == 0 else 0
        plain = torch.full_like(ids, filler)
        return {**inputs, "input_ids": plain if pad is None else torch.where(ids == pad, ids, plain)}

    @property
    def _has_final_state(self) -> bool:
        """Whether the last tap is the model's last hidden state (OPT-350M projects that to another width)."""
        return self.task == "classification" and self.layout.final_width == self.layout.width

    def _stage(self, lo: int, hi: int, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        finished = self._has_final_state and hi == self.num_blocks
        reached: list[Tensor] = []

        def step(index: int, call: BlockCall) -> Any:
            if not lo <= index < hi:
                return self.layout.skip(index, call.hidden)
            output = call.run(hidden if index == lo else None)
            if index == hi - 1:
                reached.append(block_hidden(output))
                if not finished:
                    raise PassEnded
            return output

        final = self._run(inputs, step)
        if not reached:
            raise BackboneError(f"block {hi - 1} was not reached: {type(self.model).__name__} left out blocks")
        return final if finished and final is not None else reached[0]

    def _run(self, inputs: Inputs, handler: Callable[[int, BlockCall], Any]) -> Tensor | None:
        moved = {name: value.to(self.device) for name, value in inputs.items()}
        try:
            with intercepted(self.blocks, handler):
                return block_hidden(self.body(**moved, **switched_off(self.body))[0])
        except PassEnded:
            return None

    def _check_taps(self, taps: Sequence[int]) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(taps))
        if not taps or not ascending or taps[0] < 0 or taps[-1] >= self.num_blocks:
            raise BackboneError(f"taps {list(taps)}: give ascending block indices from 0 to {self.num_blocks - 1}")

    @torch.no_grad()
    def _check_split(self) -> None:
        """Two stages of a tiny text must equal the whole; some families hand on more than hidden states."""
        ids = probe_ids(self.body)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        cut, training = self.num_blocks // 2, self.model.training
        self.model.train(False)
        try:
            whole = self._stage(0, self.num_blocks, None, inputs)
            first = self._stage(0, cut, None, inputs)
            second = self._stage(cut, self.num_blocks, first, self.without_text(inputs))
        finally:
            self.model.train(training)
        check_equal(self.model, "stages", second, whole)
        self._split_checked = True


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
