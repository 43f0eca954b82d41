"""Some blocks of a backbone alone: a phone that runs a stage never holds the whole model."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flower_plugin.errors import BackboneError

from .checkpoint import Checkpoint, stored_name
from .checks import check_task
from .layout import Layout, Task, token_embedding
from .load import load_backbone, load_config, load_tokenizer, model_folder
from .skeleton import build_skeleton, put_tensor, tensor_of
from .source import BackboneSource, resolve
from .view import Backbone

log = getLogger(__name__)


def load_part(
    spec: str | BackboneSource,
    task: Task,
    lo: int,
    hi: int,
    *,
    with_text: bool,
    dtype: torch.dtype = torch.float32,
    cache_folder: Path | None = None,
) -> Backbone:
    """Load blocks ``lo`` to ``hi - 1`` of a backbone; the weights of all others are never read.

    Parameters
    ----------
    spec, dtype, cache_folder
        As for `load_backbone`. A GGUF file is converted whole before its parts are read.
    lo, hi
        The blocks, 0 <= lo <= hi <= number of blocks; none when the two are equal.
    with_text
        Whether embedding and head are wanted, which a phone needs for its own texts. Otherwise every table with a
        row for each token of the vocabulary is a row of zeros that is shown once for each token.

    Returns
    -------
    Backbone
        Its `run_blocks` takes stages within [lo, hi); its `embed` and `head` work with ``with_text`` only. Equal to
            the whole model's. Weights that have the wanted dtype stay mapped from their file.

    Raises
    ------
    BackboneError
        The range is wrong, or the files are missing or broken.

    Notes
    -----
    Where the checkpoint names or lays out a wanted tensor differently from the model (GPT-NeoX's head, the experts
    of Qwen3-MoE), the whole model is loaded once, and dropped again; the log says so.
    """
    check_task(task)
    source = resolve(spec) if isinstance(spec, str) else spec
    folder = model_folder(source, cache_folder)
    config = load_config(folder)
    auto: Any = AutoModelForCausalLM if task == "causal-lm" else AutoModel
    model, layout = _without_weights(config, auto, dtype)
    if not 0 <= lo <= hi <= len(layout.blocks):
        count = len(layout.blocks)
        raise BackboneError(f"blocks {lo} to {hi} of {count}: give 0 <= lo <= hi <= {count}")
    weights = _Weights(source, task, Checkpoint(folder), cache_folder)
    _fill(model, layout, (lo, hi), weights, with_text=with_text, dtype=dtype)
    part = Backbone(model, load_tokenizer(source, cache_folder) if with_text else None, task, layout)
    part.held = (lo, hi)
    return part


def _without_weights(config: PretrainedConfig, auto: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Layout]:
    """Return the model with its computed buffers (rotary tables) but parameters on the meta device, and its layout."""
    skeleton, layout = build_skeleton(deepcopy(config), auto)  # which sets the config to eager attention
    names = {module: name for name, module in skeleton.named_modules()}
    try:
        with init_empty_weights(include_buffers=False), _default_dtype(dtype):
            model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    except Exception as error:  # models raise errors of all kinds for configs that do not fit
        raise BackboneError(f"no {config.model_type!r} model can be built from this config: {error}") from error
    model.train(False).requires_grad_(False)
    model.tie_weights()
    blocks = tuple(model.get_submodule(names[block]) for block in layout.blocks)
    return model, replace(layout, blocks=blocks)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Buffers are made in the dtype that `from_pretrained` makes them in: the default one, whatever the weights'."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Weights:
    """A checkpoint's tensors by the names that they have in the model."""

    def __init__(self, source: BackboneSource, task: Task, checkpoint: Checkpoint, cache_folder: Path | None) -> None:
        self._source = source
        self._task: Task = task
        self._checkpoint = checkpoint
        self._cache_folder = cache_folder
        self._names = checkpoint.names()

    def has(self, aliases: tuple[str, ...], prefix: str) -> bool:
        """Return whether the checkpoint stores the tensor that has one of these names."""
        return bool(stored_name(self._names, aliases, prefix))

    def parameter(self, aliases: tuple[str, ...], prefix: str) -> Tensor:
        """Return the parameter that has one of these names, mapped from its file where it is stored as it is."""
        place = stored_name(self._names, aliases, prefix)
        return self._checkpoint.tensor(place) if place else tensor_of(self._whole, aliases[0])

    def buffer(self, name: str, prefix: str) -> Tensor | None:
        """Return a stored buffer; None: the model has computed it."""
        place = stored_name(self._names, (name,), prefix)
        return self._checkpoint.tensor(place) if place else None

    @cached_property
    def _whole(self) -> PreTrainedModel:
        log.warning(
            "%s stores some tensors differently from the model: it is loaded whole once, to find them",
            self._source.spec,
        )
        return load_backbone(self._source, self._task, cache_folder=self._cache_folder).model


def _fill(
    model: PreTrainedModel,
    layout: Layout,
    held: tuple[int, int],
    weights: _Weights,
    *,
    with_text: bool,
    dtype: torch.dtype,
) -> None:
    """Give the held blocks and what is around the blocks its weights."""
    wanted = {id(tensor) for block in layout.blocks[slice(*held)] for tensor in _tensors(block).values()}
    in_blocks = {id(tensor) for block in layout.blocks for tensor in _tensors(block).values()}
    vocabulary = len(token_embedding(model))
    for aliases in _tied(model):
        name, tensor = aliases[0], tensor_of(model, aliases[0])
        if id(tensor) in in_blocks and id(tensor) not in wanted:
            continue
        if not tensor.is_meta:
            stored = weights.buffer(name, model.base_model_prefix)
            if stored is not None:
                tensor.copy_(_checked(stored, name, tensor))
            continue
        unread = not with_text and id(tensor) not in in_blocks and len(tensor) == vocabulary
        if unread or ("pooler" in name and not weights.has(aliases, model.base_model_prefix)):
            # Nothing that a pooler makes is used here, and many checkpoints lack it.
            filled = torch.zeros((1, *tensor.shape[1:]), dtype=dtype).expand(tensor.shape)
        else:
            filled = _checked(weights.parameter(aliases, model.base_model_prefix), name, tensor)
        parameter = nn.Parameter(filled.to(dtype) if filled.is_floating_point() else filled, requires_grad=False)
        for alias in aliases:
            put_tensor(model, alias, parameter)


def _checked(tensor: Tensor, name: str, like: Tensor) -> Tensor:
    if tensor.shape != like.shape:
        raise BackboneError(
            f"tensor {name!r} is {list(tensor.shape)} in the checkpoint; its config wants {list(like.shape)}"
        )
    return tensor


def _tied(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of parameters and buffers, those of one tensor together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _tensors(model).items():
        groups.setdefault(id(tensor), []).append(name)
    return [tuple(group) for group in groups.values()]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)
