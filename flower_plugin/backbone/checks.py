"""What every backbone must be, checked where one is made."""

from typing import Any

import torch
from torch import Tensor, nn

from flower_plugin.errors import BackboneError

# A split or a head that was put together rightly differs by rounding alone.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def check_task(task: str) -> None:
    """Raise BackboneError for a task that is not known."""
    if task not in ("classification", "causal-lm"):
        raise BackboneError(f"task {task!r} is unknown: give 'classification' or 'causal-lm'")


def refuse_encoder_decoder(config: Any) -> None:
    """Raise BackboneError for a model with an encoder and a decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise BackboneError(
            f"{getattr(config, 'model_type', 'the model')} has an encoder and a decoder, which is not"
            " supported: use an encoder (BERT-like) or a decoder (GPT-like) backbone"
        )


def check_equal(model: nn.Module, part: str, made: Tensor, own: Tensor) -> None:
    """Raise BackboneError unless what the view computed equals what the model computes by itself."""
    scale = float(own.float().abs().max()) or 1.0
    difference = float((made.float() - own.float()).abs().max()) / scale
    if not difference <= _TOLERANCE.get(own.dtype, 5e-2):
        raise BackboneError(
            f"{type(model).__name__} is not supported: its {part} as found differ from the model's own by"
            f" {difference:.1e} (relative). This family passes more than hidden states between its parts."
        )
