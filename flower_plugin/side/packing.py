"""A side network as bytes: safetensors with the config in its header, for messages and folders."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flower_plugin.errors import ConfigError, PayloadError

from .network import SideNetwork, SideNetworkConfig

FORMAT = "side-network-1"
FACTS = "facts"
MAX_HEADER_BYTES = 1 << 20
Bytes = NDArray[np.uint8]


def pack_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Tensors and JSON values as one safetensors blob; equal contents give equal bytes."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    # One entry: safetensors writes several in any order.
    return save(plain, {FACTS: json.dumps(facts, sort_keys=True)})


def unpack_tensors(data: bytes, format_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `pack_tensors` made; its facts must name the format.

    Raises
    ------
    PayloadError
        The bytes are damaged, or of another format.
    """
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise PayloadError(f"{len(data)} bytes with a header of {size}: these are no packed tensors")
    try:
        facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][FACTS])
        tensors = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise PayloadError(f"packed tensors are damaged: {type(error).__name__}: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != format_name:
        raise PayloadError(f"these bytes are not of format {format_name!r}; install the same flower-plugin")
    return tensors, facts


def pack_network(network: SideNetwork) -> Bytes:
    """A side network as uint8 [bytes]."""
    facts = {"format": FORMAT, "config": network.config.to_dict()}
    return np.frombuffer(pack_tensors(network.state_dict(), facts), np.uint8)


def unpack_network(packed: Bytes) -> SideNetwork:
    """Rebuild a side network from bytes of any origin, in eval mode.

    Shapes are compared on the meta device first: nothing is allocated that the bytes do not hold.

    Raises
    ------
    PayloadError
        The bytes are damaged, of another format, or their tensors do not fit their config or are not finite.
    """
    tensors, facts = unpack_tensors(packed.tobytes(), FORMAT)
    try:
        config = SideNetworkConfig.from_dict(facts["config"])
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise PayloadError(f"a side network's config is not usable: {error}") from error
    with torch.device("meta"):
        network = SideNetwork(config)
    fill(network, tensors)
    return network.eval()


def fill(network: SideNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Give a network on the meta device its tensors.

    Raises
    ------
    PayloadError
        A tensor is missing, unknown, of another shape or dtype, or not finite.
    """
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in network.state_dict().items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if expected != found:
        wrong = sorted(set(expected.items()) ^ set(found.items()), key=str)
        raise PayloadError(f"the tensors do not fit the config: {wrong[0][0]!r} is missing, unknown or misshapen")
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise PayloadError(f"{bad[0]!r} holds NaN or infinity")
    network.load_state_dict(dict(tensors), assign=True)
