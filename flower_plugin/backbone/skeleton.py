"""A model without weights: built on the meta device, to look at its parts or to hold its head alone."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from flower_plugin.errors import BackboneError

from .layout import BlockCall, Layout, intercepted, probe, switched_off

_POSITIONS = re.compile(r"wpe|(embed_)?positions?(_embed|_embeddings?)?|pos_embed(dings?)?")
# Families whose attention biases are made for a fixed number of tokens, and where their config says it.
_BIASED = {"mpt": "max_seq_len"}


def build_skeleton(config: PretrainedConfig, auto: Any) -> tuple[PreTrainedModel, Layout]:
    """Return a config's model on the meta device (shapes and code, no memory for weights) and its layout.

    Raises
    ------
    BackboneError
        The config has no such model or is not consistent, or the model has no blocks.
    """
    try:
        return _build(config, auto, torch.float32)
    except BackboneError as error:
        try:
            # The one dtype in which grouped matrix products of experts run on the meta device.
            return _build(config, auto, torch.bfloat16)
        except BackboneError:
            raise error from error.__cause__  # what is wrong with the model, not with this second attempt


def _build(config: PretrainedConfig, auto: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Layout]:
    try:
        with torch.device("meta"):
            # Eager attention asks least about the values of masks, which the meta device does not have.
            model = auto.from_config(config, attn_implementation="eager", dtype=dtype)
    except Exception as error:  # models raise errors of all kinds for configs that do not fit
        name = getattr(config, "model_type", "unknown")
        raise BackboneError(f"no model can be built from this config of family {name!r}: {error}") from error
    model.eval().requires_grad_(False)
    with _Yes():
        return model, probe(model, causal=False).layout


def most_tokens(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model's table of positions reaches; None where positions are computed.

    A table is an embedding, or a buffer of computed vectors (GPT-J), that is named after positions. Some families
    leave its first rows out: those up to the padding index (RoBERTa), or a fixed number of them (OPT).
    """
    config = model.config
    if config.model_type in _BIASED:
        return int(getattr(config, _BIASED[config.model_type]))
    sizes = [
        table.num_embeddings - _first_position(table)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and _names_positions(name)
    ]
    sizes += [len(table) for name, table in model.named_buffers() if table.dim() == 2 and _names_positions(name)]
    said = getattr(config, "max_position_embeddings", None)
    if sizes and isinstance(said, int) and said > 0:
        sizes.append(said)  # a table may have more rows than the family uses (Nystromformer)
    return min(sizes, default=None)


def _names_positions(name: str) -> bool:
    return _POSITIONS.fullmatch(name.rpartition(".")[2]) is not None


def _first_position(table: nn.Embedding) -> int:
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


def head_tensors(model: PreTrainedModel, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return the tensors that a skeleton touches after its last block: name -> all names that it is tied to.

    Unties the skeleton: a tied embedding stays without weights when the head gets them.
    """
    tied = _untie(model)
    places = {id(tensor): name for name, tensor in _named_tensors(model)}
    touched = _Touched()

    def pass_over(index: int, call: BlockCall) -> Any:
        touched.recording = index == len(layout.blocks) - 1
        return layout.skip(index, call.hidden)

    ids = torch.zeros((1, 1), dtype=torch.long, device="meta")
    with touched, torch.no_grad(), intercepted(layout.blocks, pass_over):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **switched_off(model))
    return {name: tied[name] for key, name in places.items() if key in touched.tensors}


def put_tensor(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a model's parameter or buffer to a parameter."""
    owner_name, _, attribute = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    owner._buffers.pop(attribute, None)
    owner.register_parameter(attribute, parameter)


def _untie(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Give each place of a skeleton a tensor of its own; return for each name all that shared its tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    tied = {name: tuple(group) for group in names.values() for name in group}
    for group in names.values():
        for name in group[1:]:
            tensor = torch.empty_like(tensor_of(model, name))
            put_tensor(model, name, nn.Parameter(tensor, requires_grad=False))
    return tied


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return a model's parameter or buffer."""
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    if not isinstance(tensor, Tensor):
        raise BackboneError(f"{name!r} of {type(model).__name__} is no tensor")
    return tensor


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


class _Yes(TorchFunctionMode):
    """Answers yes to questions about values, which the meta device lacks: is a mask all ones?."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class _Touched(TorchFunctionMode):
    """Records which tensors take part in functions while ``recording`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.tensors: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reading a tensor's dtype or shape does not need its values.
        if self.recording and getattr(func, "__name__", "") != "__get__":
            self.tensors.update(id(value) for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))
