"""A trained side network with all that is needed to use it: one folder, safetensors and JSON."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from flower_plugin.errors import ConfigError, PayloadError

from .network import SideNetwork
from .packing import pack_network, unpack_network

SETTINGS = "side_tuned.json"
WEIGHTS = "side_network.safetensors"
CONFIG = "side_config.json"


class SideTunedSettings(BaseModel):
    """How a side network sits beside its backbone.

    Attributes
    ----------
    backbone : str
        Where the run found the backbone.
    fingerprint : str
        Of that backbone and its tokenizer.
    task : str
        ``classification`` or ``causal-lm``.
    taps : tuple of int
        Tapped blocks.
    token_rule : str
        Pooling, or ``loss`` for a language model.
    label_names : tuple of str
        Classes in the order of the logits.
    max_length : int
        Tokens a sample during training.
    """

    model_config = ConfigDict(frozen=True)

    backbone: str
    fingerprint: str
    task: Literal["classification", "causal-lm"]
    taps: tuple[int, ...]
    token_rule: str
    label_names: tuple[str, ...]
    max_length: int


def save_side_tuned(network: SideNetwork, settings: SideTunedSettings, folder: Path) -> Path:
    """Write network and settings to ``folder`` (made if need be) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(pack_network(network).tobytes())
    (folder / CONFIG).write_text(json.dumps(network.config.to_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / SETTINGS).write_text(settings.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return folder


def load_settings(folder: Path) -> SideTunedSettings:
    """Read the settings of an exported side network.

    Raises
    ------
    ConfigError
        The folder holds none, or they are damaged.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise ConfigError(f"{folder} holds no side network: {SETTINGS} is missing; give a folder that a run wrote")
    try:
        return SideTunedSettings.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: {error.errors()[0]['msg']}") from error


def load_network(folder: Path) -> SideNetwork:
    """Read the side network of an export; its config is the one in the header of the weights.

    Raises
    ------
    ConfigError
        The file is missing or damaged.
    """
    path = folder / WEIGHTS
    try:
        return unpack_network(np.frombuffer(path.read_bytes(), np.uint8))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except PayloadError as error:
        raise ConfigError(f"{path}: {error}") from error
