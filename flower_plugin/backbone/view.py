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
    run_head,
    switched_off,
)

Inputs = Mapping[str, Tensor]
Around = Callable[[int, Callable[[Tensor], Any], Tensor], Any]


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
    held
        The blocks [lo, hi) that have weights: all, except in a part made by `load_part`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, task: Task, layout: Layout
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.task = task
        self.layout = layout
        self.held = (0, len(layout.blocks))
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
        """Where the model is; blocks of a part that have no weights do not count."""
        return next(weight.device for weight in self.model.parameters() if not weight.is_meta)

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

    def embed(self, inputs: Inputs) -> Tensor:
        """Return the hidden states [batch, tokens, width] that the model hands to its first block; differentiable."""
        reached: list[Tensor] = []

        def stop(_: int, call: BlockCall) -> Any:
            reached.append(call.hidden)
            raise PassEnded

        self._run(inputs, stop)
        return reached[0]

    def run_blocks(
        self, lo: int, hi: int, hidden: Tensor | None, inputs: Inputs, around: Around | None = None
    ) -> Tensor:
        """Run a stage: blocks ``lo`` to ``hi - 1`` by the model's own forward, the others passed over.

        Parameters
        ----------
        lo, hi
            The stage, 0 <= lo < hi <= num_blocks.
        hidden
            Hidden states [batch, tokens, width] that arrive at block ``lo``; None: the inputs are embedded.
        inputs
            As for `forward_taps`; with hidden states given, `without_text` of them is enough.
        around
            Called for each block with its index, a function that runs it on hidden states, and these; returns
            what that function returned. For checkpointing, seeding, timing.

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
        if lo < self.held[0] or hi > self.held[1]:
            raise BackboneError(
                f"blocks {lo} to {hi} are not all here: this part holds {self.held[0]} to {self.held[1]}"
            )
        if not self._split_checked and self.held[1] - self.held[0] > 1:
            self._check_split()
        return self._stage(lo, hi, hidden, inputs, around)

    def without_text(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the inputs with a filler for token ids that keeps the padding (RoBERTa reads it)."""
        return {**inputs, "input_ids": self.filler_ids(self.padded(inputs["input_ids"]))}

    def padded(self, ids: Tensor) -> Tensor:
        """Return where token ids are the padding token: what a later stage must know of them (RoBERTa reads it)."""
        pad = getattr(self.config, "pad_token_id", None)
        return torch.zeros_like(ids, dtype=torch.bool) if pad is None else ids == pad

    def filler_ids(self, padded: Tensor) -> Tensor:
        """Return token ids [batch, tokens] that say nothing but where the padding is."""
        pad = getattr(self.config, "pad_token_id", None)
        plain = torch.full(padded.shape, 1 if pad == 0 else 0, dtype=torch.long, device=padded.device)
        return plain if pad is None else plain.masked_fill(padded, pad)

    @property
    def _has_final_state(self) -> bool:
        """Whether the last tap is the model's last hidden state (OPT-350M projects that to another width)."""
        return self.task == "classification" and self.layout.final_width == self.layout.width

    def _stage(self, lo: int, hi: int, hidden: Tensor | None, inputs: Inputs, around: Around | None = None) -> Tensor:
        finished = self._has_final_state and hi == self.num_blocks
        reached: list[Tensor] = []

        def step(index: int, call: BlockCall) -> Any:
            if not lo <= index < hi:
                return self.layout.skip(index, call.hidden)
            arrived = hidden if index == lo else None
            if around is None:
                output = call.run(arrived)
            else:
                output = around(index, call.run, call.hidden if arrived is None else arrived)
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
        """Two stages of a tiny text must equal one; some families hand on more than hidden states."""
        ids = probe_ids(self.body)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        (lo, hi), training = self.held, self.model.training
        cut = (lo + hi) // 2
        self.model.train(False)
        try:
            start = None if lo == 0 else self._probe_states(ids)
            whole = self._stage(lo, hi, start, inputs)
            first = self._stage(lo, cut, start, inputs)
            second = self._stage(cut, hi, first, self.without_text(inputs))
        finally:
            self.model.train(training)
        check_equal(self.model, "stages", second, whole)
        self._split_checked = True

    def _probe_states(self, ids: Tensor) -> Tensor:
        numbers = torch.arange(ids.numel() * self.hidden_size, dtype=torch.float32, device=self.device)
        return torch.sin(numbers).to(self.model.dtype).view(*ids.shape, self.hidden_size)
