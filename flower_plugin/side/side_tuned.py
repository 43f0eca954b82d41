"""The finished model: a frozen backbone and its side network, used like a Hugging Face model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flower_plugin.backbone import (
    Backbone,
    BlockCall,
    block_hidden,
    fingerprint,
    intercepted,
    load_backbone,
    with_hidden,
)
from flower_plugin.errors import ConfigError

from .export import SideTunedSettings, load_network, load_settings
from .network import SideNetwork
from .tokens import gather_pooled


@dataclass(frozen=True)
class ClassifierOutput:
    """Logits [batch, classes]; the mean cross entropy if labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class SideTunedModel(nn.Module):
    """A backbone with a side network beside it.

    Parameters
    ----------
    backbone : Backbone
        The frozen model.
    network : SideNetwork
        What was trained.
    settings : SideTunedSettings
        How they fit together.
    """

    def __init__(self, backbone: Backbone, network: SideNetwork, settings: SideTunedSettings) -> None:
        super().__init__()
        if settings.taps[-1] != backbone.num_blocks - 1:
            raise ConfigError(
                f"the side network was trained beside {settings.taps[-1] + 1} blocks;"
                f" this backbone has {backbone.num_blocks}"
            )
        self.backbone = backbone.model
        self.side = network.to(backbone.device).eval()
        self.settings = settings
        self._view = backbone

    @property
    def tokenizer(self) -> Any:
        """The backbone's tokenizer."""
        return self._view.tokenizer

    @property
    def label_names(self) -> tuple[str, ...]:
        """Classes in the order of the logits."""
        return self.settings.label_names

    def forward(self, *, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Run the model.

        Parameters
        ----------
        labels : Tensor, optional
            Classification: [batch] class indices. Causal LM: [batch, length] token ids, -100 where no loss is.
        **inputs
            What the backbone takes: ``input_ids`` [batch, length], ``attention_mask`` and the like.

        Returns
        -------
        ClassifierOutput or the backbone's own output
            ``.logits`` [batch, classes] or [batch, length, vocabulary], and ``.loss`` if labels were given.
        """
        if self.settings.task == "classification":
            return self._classify(labels, inputs)
        with self._beside():
            return self.backbone(**inputs, **({} if labels is None else {"labels": labels}))

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text as the backbone's own ``generate`` does, its key/value cache included.

        Raises
        ------
        ConfigError
            The model is a classifier.
        """
        if self.settings.task != "causal-lm":
            raise ConfigError("a classifier does not generate; use forward(**inputs).logits")
        with self._beside():
            generate: Any = self._view.model.generate
            return generate(*args, **kwargs)

    def _classify(self, labels: Tensor | None, inputs: dict[str, Any]) -> ClassifierOutput:
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        gather = gather_pooled(self.settings.token_rule, mask)
        states = torch.stack(self._view.forward_taps(inputs, self.settings.taps, gather), dim=1)
        logits = self.side(states)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ClassifierOutput(logits, loss)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within, every forward pass of the backbone has the side network's part added to its last block."""
        taps, blocks = self.settings.taps, self._view.num_blocks
        tapped: list[Tensor] = []

        def run(index: int, call: BlockCall) -> Any:
            output, index = call.run(), index % blocks
            if index == 0:
                tapped.clear()
            if index not in taps:
                return output
            hidden = block_hidden(output)
            tapped.append(hidden.flatten(0, 1))
            if index != taps[-1]:
                return output
            states = torch.stack(tapped, dim=1).float()
            return with_hidden(output, self.side(states).view_as(hidden).to(hidden.dtype))

        with intercepted(self._view.blocks, run):
            yield


def load_side_tuned(backbone: str | Backbone, folder: str | Path, device: str = "cpu") -> SideTunedModel:
    """Load what a run trained.

    Parameters
    ----------
    backbone : str or Backbone
        Where the backbone is (see the run-config key ``backbone``), or a loaded one.
    folder : str or Path
        A folder that a run wrote: ``side_network.safetensors`` and its config.
    device : str
        Where to load a backbone that is given by its place.

    Raises
    ------
    ConfigError
        The folder holds no side network.
    BackboneError
        The backbone cannot be found or loaded.
    """
    settings = load_settings(Path(folder))
    network = load_network(Path(folder))
    if isinstance(backbone, str):
        if fingerprint(backbone) != settings.fingerprint:
            warnings.warn(
                f"{backbone!r} is not the backbone that this side network was trained beside"
                f" ({settings.backbone!r}): expect other results",
                stacklevel=2,
            )
        backbone = load_backbone(backbone, settings.task, device=device)
    return SideTunedModel(backbone, network, settings)
