"""A side network as bytes, of friendly and of hostile origin."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.errors import PayloadError
from flower_plugin.side.network import SideNetwork, SideNetworkConfig, new_side_network
from flower_plugin.side.packing import FACTS, pack_network, pack_tensors, unpack_network

CONFIG = SideNetworkConfig(width=16, taps=(0, 2), num_labels=3)


def bytes_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("labels", [3, None])
def test_a_round_trip_keeps_every_weight_and_the_config(labels):
    network = new_side_network(SideNetworkConfig(width=16, taps=(0, 2), num_labels=labels), seed=1)
    again = unpack_network(pack_network(network))
    assert again.config == network.config
    assert not again.training
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_equal_networks_give_equal_bytes():
    packed = [pack_network(new_side_network(CONFIG, seed=1)).tobytes() for _ in range(5)]
    assert len(set(packed)) == 1


@given(st.data())
def test_damage_is_a_payload_error_or_a_network(data):
    packed = bytearray(pack_network(new_side_network(CONFIG, seed=0)).tobytes())
    where = data.draw(st.integers(0, len(packed) - 1))
    packed[where] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for bad in (bytes(packed), bytes(packed[:cut])):
        try:
            network = unpack_network(bytes_of(bad))
        except PayloadError:
            continue
        assert all(tensor.isfinite().all() for tensor in network.state_dict().values())


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data):
    with pytest.raises(PayloadError):
        unpack_network(bytes_of(data))


def test_a_config_that_promises_a_giant_is_refused_before_it_is_built():
    facts = {
        "format": "side-network-1",
        "config": {"width": 1 << 20, "taps": list(range(1000)), "side_width": 1 << 20},
    }
    with pytest.raises(PayloadError, match="missing"):
        unpack_network(bytes_of(pack_tensors({"up.weight": torch.zeros(2)}, facts)))


def test_not_finite_weights_are_refused():
    network = SideNetwork(CONFIG)
    network.up.bias.data[0] = float("nan")
    with pytest.raises(PayloadError, match=r"'up\.bias' holds NaN"):
        unpack_network(pack_network(network))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": {}},
        {"__metadata__": {FACTS: "[]"}},
        {"__metadata__": {FACTS: '{"format": "side-network-1"}'}},
        {"__metadata__": {FACTS: '{"format": "side-network-1", "config": {"width": "a", "taps": [0]}}'}},
        {"__metadata__": {FACTS: '{"format": "side-network-1", "config": {"width": 4, "taps": [null]}}'}},
        {"__metadata__": {FACTS: "[" * 100_000}},
    ],
)
def test_odd_headers_are_refused(header):
    text = json.dumps(header).encode()
    with pytest.raises(PayloadError):
        unpack_network(bytes_of(struct.pack("<Q", len(text)) + text))
