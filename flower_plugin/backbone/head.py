"""A causal LM's head alone: final norm, projection, scale and soft cap, without the rest of the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flower_plugin.errors import BackboneError, PayloadError

from .checkpoint import Checkpoint, stored_name
from .layout import run_head
from .load import load_backbone, load_config, model_folder
from .skeleton import build_skeleton, head_tensors, put_tensor, tensor_of
from .source import BackboneSource, resolve

_FORMAT = "flower-plugin-head/1"
_MAX_HEADER_BYTES = 4 << 20
_MAX_BLOCKS = 1024


class BackboneHead(nn.Module):
    """The head of a causal LM: hidden states [rows, width] -> logits [rows, vocabulary].

    The model's own forward runs on the meta device up to its last block, so only the head's tensors exist.
    They are frozen; the logits are differentiable in the hidden states. Equal to `Backbone.head`.

    Parameters
    ----------
    config
        The model's config.
    tensors
        The head's tensors by one of their names in the model.

    Raises
    ------
    BackboneError
        A tensor is missing, or is none of the head's, or has another shape.
    """

    def __init__(self, config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        model, layout = build_skeleton(config, AutoModelForCausalLM)
        wanted = head_tensors(model, layout)
        if tensors.keys() != wanted.keys():
            raise BackboneError(
                f"this head is made of {sorted(wanted)}, but got {sorted(tensors)}: take it from a"
                " checkpoint of the same model"
            )
        if len({tensor.dtype for tensor in tensors.values()}) != 1:
            raise BackboneError("the tensors of a head must have one dtype")
        self.names = tuple(wanted)
        self.tensors = nn.ParameterList()
        for name in wanted:
            tensor = tensors[name]
            shape = tensor_of(model, name).shape
            if tensor.shape != shape or not tensor.is_floating_point():
                raise BackboneError(
                    f"head tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; the config wants floating"
                    f" point {list(shape)}"
                )
            parameter = nn.Parameter(tensor, requires_grad=False)
            self.tensors.append(parameter)
            put_tensor(model, name, parameter)
        # Not registered as submodules: the rest of the model has no weights to move or to save.
        self._skeleton = (model, layout)

    @property
    def width(self) -> int:
        """Width of the hidden states it takes."""
        return self._skeleton[1].width

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of raw last-block outputs [rows, width]."""
        model, layout = self._skeleton
        weight = self.tensors[0]
        return run_head(model, layout, hidden.to(weight.device, weight.dtype), torch.device("meta"))

    def to_bytes(self) -> bytes:
        """Return the head as safetensors bytes, the config as JSON in their metadata."""
        tensors = {name: value.detach().contiguous() for name, value in zip(self.names, self.tensors, strict=True)}
        return save(tensors, {"format": _FORMAT, "config": self.config.to_json_string(use_diff=False)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Make a head from the bytes of `to_bytes`, which may come from anyone.

        Raises
        ------
        PayloadError
            The bytes are no such head, or their tensors do not fit their config.
        """
        config = _config_in(data)
        try:
            return cls(config, load(data))
        except (SafetensorError, BackboneError, KeyError, ValueError) as error:
            raise PayloadError(f"the bytes are no usable head: {error}") from error


def load_head(
    spec: str | BackboneSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    cache_folder: Path | None = None,
) -> BackboneHead:
    """Load the head of a causal LM; no other tensor of the checkpoint is materialised.

    Parameters are as for `load_backbone`. Where the checkpoint names a tensor differently from the model,
    the whole model is loaded once instead, and dropped.

    Raises
    ------
    BackboneError
        The checkpoint is missing or broken, or is no causal LM.
    """
    source = resolve(spec) if isinstance(spec, str) else spec
    folder = model_folder(source, cache_folder)
    config = load_config(folder)
    model, layout = build_skeleton(config, AutoModelForCausalLM)
    wanted = head_tensors(model, layout)
    checkpoint = Checkpoint(folder)
    places = {name: stored_name(checkpoint.names(), tied, model.base_model_prefix) for name, tied in wanted.items()}
    if all(places.values()):
        tensors = {name: checkpoint.tensor(place) for name, place in places.items()}
    else:
        whole = load_backbone(source, "causal-lm", cache_folder=cache_folder).model
        tensors = {name: tensor_of(whole, name) for name in wanted}
    moved = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    return BackboneHead(config, moved)


def _config_in(data: bytes) -> PretrainedConfig:
    """Read the config from safetensors metadata; nothing in it may make this process load or build much."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise PayloadError(f"the bytes are no head: a header of {length} bytes in {len(data)} bytes")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        if metadata["format"] != _FORMAT:
            raise PayloadError(f"the head has format {metadata['format']!r}; this version reads {_FORMAT!r}")
        settings = json.loads(metadata["config"])
        plain = {k: v for k, v in settings.items() if not k.startswith("_") and k not in _UNTRUSTED}
        _check_sizes(plain)
        config = AutoConfig.for_model(**plain)
    except PayloadError:
        raise
    except Exception as error:  # hostile JSON makes the config classes raise errors of all kinds
        raise PayloadError(f"the head's config cannot be used: {type(error).__name__}: {error}") from error
    if getattr(config, "num_hidden_layers", 0) > _MAX_BLOCKS:
        raise PayloadError(f"the head's config has {config.num_hidden_layers} blocks; at most {_MAX_BLOCKS}")
    return config


# These make transformers fetch code, kernels or quantisers.
_UNTRUSTED = frozenset({"auto_map", "quantization_config", "attn_implementation", "experts_implementation"})


def _check_sizes(settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(value)
        elif isinstance(value, int) and "layer" in key and value > _MAX_BLOCKS:
            raise PayloadError(f"the head's config has {key} = {value}; at most {_MAX_BLOCKS}")
        elif isinstance(value, int) and abs(value) >= 1 << 31:
            raise PayloadError(f"the head's config has {key} = {value}, which is too large")
