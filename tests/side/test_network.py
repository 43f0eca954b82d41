"""The side network: its start, its shape, its locality, and its life as bytes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flower_plugin.errors import ConfigError, PayloadError
from flower_plugin.side.network import SideNetwork, SideNetworkConfig, VectorNorm, new_side_network
from flower_plugin.side.packing import FORMAT, pack_network, pack_tensors, unpack_network

CLASSIFIER = SideNetworkConfig(width=24, taps=(0, 2, 5), num_labels=3, vectors=2)
LANGUAGE_MODEL = SideNetworkConfig(width=32, taps=(1, 3, 7, 9))


def states_for(config: SideNetworkConfig, rows: int = 7, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, len(config.taps), config.width, generator=generator) + 1


def stirred(config: SideNetworkConfig, seed: int = 0) -> SideNetwork:
    """A network away from its start, as training would leave it."""
    network = new_side_network(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_step_zero_is_the_backbone_bit_for_bit(mode: str, calibrated: bool) -> None:
    network = new_side_network(LANGUAGE_MODEL, seed=3)
    network.train(mode == "train")
    states = states_for(LANGUAGE_MODEL, 64)
    if calibrated:
        network.calibrate(states)
    assert torch.equal(network(states), states[:, -1])


def test_a_new_classifier_has_no_opinion() -> None:
    network = new_side_network(CLASSIFIER, seed=3)
    assert torch.equal(network(states_for(CLASSIFIER)), torch.zeros(7, 3))


@pytest.mark.parametrize("config", [CLASSIFIER, LANGUAGE_MODEL])
def test_token_local(config: SideNetworkConfig) -> None:
    network = stirred(config)
    states = states_for(config, 9)
    together = network(states)
    alone = torch.cat([network(row[None]) for row in states])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_every_parameter_learns() -> None:
    # After a first step has moved the layers that start at zero, no parameter may be left out of the gradient.
    for config in (CLASSIFIER, LANGUAGE_MODEL):
        network = stirred(config).train()
        network(states_for(config)).square().sum().backward()
        still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert still == []


def test_every_tap_has_the_same_share_at_the_start() -> None:
    network = new_side_network(SideNetworkConfig(width=16, taps=(0, 1, 2, 3, 4, 5)), 0).eval()
    with torch.no_grad():
        network.up.weight.copy_(torch.ones_like(network.up.weight))
    states = states_for(network.config)
    parts = torch.stack([tap(states[:, i]) for i, tap in enumerate(network.taps)])
    expected = network.up(parts.mean(0))
    torch.testing.assert_close(network.delta(states), expected, rtol=1e-4, atol=1e-5)


def test_calibration_standardises_features_with_wild_scales() -> None:
    norm = VectorNorm(24, 2)
    rows = torch.randn(500, 24) * torch.logspace(-2, 2, 24) + 5
    norm.calibrate(rows)
    mapped = norm(rows)
    assert mapped.mean(0).abs().max() < 1e-3
    assert mapped.std(0).max() <= 1.01
    assert mapped.std(0).median() > 0.5


def test_calibration_survives_constant_features() -> None:
    norm = VectorNorm(8, 1)
    norm.calibrate(torch.ones(10, 8))
    assert bool(norm(torch.ones(3, 8)).isfinite().all())


def test_joined_vectors_are_normalised_apart() -> None:
    norm = VectorNorm(8, 2)
    rows = torch.randn(3, 8)
    louder = torch.cat([rows[:, :4], 1000 * rows[:, 4:]], dim=1)
    torch.testing.assert_close(norm(rows)[:, :4], norm(louder)[:, :4])
    torch.testing.assert_close(norm(rows), nn.LayerNorm(4)(rows.view(3, 2, 4)).view(3, 8))


def test_the_seed_alone_fixes_the_start() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (new_side_network(CLASSIFIER, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.taps[0].down.weight, other.taps[0].down.weight)


@pytest.mark.parametrize("shape", [(4, 3, 23), (4, 2, 24), (3, 24), (4, 3, 24, 1)])
def test_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expects states"):
        new_side_network(CLASSIFIER, 0)(torch.zeros(shape))


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0}, {"width": True}, {"width": 24.0}, {"taps": ()}, {"taps": (2, 1)}, {"taps": (1, 1)},
        {"taps": (-1, 2)}, {"vectors": 5}, {"num_labels": 0}, {"reduction": 0}, {"side_width": 0},
        {"dropout": 1.0}, {"dropout": float("nan")}, {"input_dropout": -0.1}, {"gate_temperature": 0.0},
        {"expansion": 0}, {"width": 1 << 21},
    ],
)  # fmt: skip
def test_bad_configs_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SideNetworkConfig(**{**CLASSIFIER.to_dict(), **change})  # type: ignore[arg-type]


def test_config_survives_json_and_names_strangers() -> None:
    assert SideNetworkConfig.from_dict(json.loads(json.dumps(CLASSIFIER.to_dict()))) == CLASSIFIER
    with pytest.raises(ConfigError, match="rank"):
        SideNetworkConfig.from_dict({**CLASSIFIER.to_dict(), "rank": 8})
    with pytest.raises(ConfigError, match="taps"):
        SideNetworkConfig.from_dict({"width": 8})


def test_width_follows_the_reduction() -> None:
    assert SideNetworkConfig(width=576, taps=(0, 29)).stream_width == 72
    assert SideNetworkConfig(width=576, taps=(0, 29), side_width=10).stream_width == 10
    assert SideNetworkConfig(width=4, taps=(0,)).stream_width == 1


@pytest.mark.parametrize("config", [CLASSIFIER, LANGUAGE_MODEL, SideNetworkConfig(width=8, taps=(3,))])
def test_packed_and_back_is_the_same_network(config: SideNetworkConfig) -> None:
    network = stirred(config)
    packed = pack_network(network)
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    back = unpack_network(packed)
    assert back.config == config
    assert not back.training
    assert torch.equal(back(states_for(config)), network(states_for(config)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    packed = pack_network(new_side_network(SideNetworkConfig(width=8, taps=(1, 3)), 0)).copy()
    if data.draw(st.booleans()):
        packed = packed[: data.draw(st.integers(0, len(packed) - 1))]
    else:
        packed[data.draw(st.integers(0, min(len(packed) - 1, 1500)))] ^= data.draw(st.integers(1, 255))
    try:
        network = unpack_network(packed)
    except PayloadError:
        return
    assert all(bool(p.isfinite().all()) for p in network.parameters())


def lie(**changes: object) -> np.ndarray:
    """A packed network whose tensors or facts are not what they should be."""
    network = new_side_network(CLASSIFIER, 0)
    tensors = dict(network.state_dict())
    facts = {"format": FORMAT, "config": CLASSIFIER.to_dict()}
    tensors |= {name: value for name, value in changes.items() if isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in tensors.items() if changes.get(name, value) is not None}
    facts |= {name: value for name, value in changes.items() if name in facts}
    return np.frombuffer(pack_tensors(tensors, facts), np.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"gates": None},
        {"gates": torch.zeros(3)},
        {"gates": torch.zeros(2, dtype=torch.float64)},
        {"gates": torch.tensor([0.0, float("inf")])},
        {"gates": torch.tensor([0.0, float("nan")])},
        {"stranger": torch.zeros(1)},
        {"format": "side-network-0"},
        {"config": {**CLASSIFIER.to_dict(), "width": 48}},
        {"config": {**CLASSIFIER.to_dict(), "width": 1 << 20, "side_width": 1 << 20}},
        {"config": {**CLASSIFIER.to_dict(), "taps": list(range(1 << 12))}},
        {"config": {**CLASSIFIER.to_dict(), "dropout": "much"}},
        {"config": ["width"]},
        {"config": None},
    ],
    ids=str,
)
def test_lying_bytes_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PayloadError):
        unpack_network(lie(**changes))


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_bytes_that_are_no_network_are_refused(size: int) -> None:
    with pytest.raises(PayloadError):
        unpack_network(np.full(size, 255, np.uint8))
