"""Stage one on a device: what is kept of a forward pass, and what is left out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.backbone import load_backbone
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import TapRule, collect, encoded_bytes, fit_budget
from flower_plugin.side.examples import Example
from flower_plugin.side.shipment import pack

FP32 = get_codec("fp32")


def example(number: int, length: int, tokens: int = 1) -> Example:
    ids = np.array([2, *(4 + (number + k) % 16 for k in range(length - 2)), 3], np.int32)
    positions = np.arange(length - tokens - 1, length - 1, dtype=np.int32)
    return Example(number.to_bytes(16, "little"), ids, positions, ids[positions + 1])


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return load_backbone(str(tiny_llama), "causal-lm")


@pytest.fixture(scope="module")
def bert(tiny_bert):
    return load_backbone(str(tiny_bert), "classification")


def hidden_states(backbone, sample):
    """Outputs of all blocks for one sample alone, as the model itself gives them."""
    ids = torch.tensor(sample.input_ids[None].astype(np.int64))
    with torch.no_grad():
        return backbone.body(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
        ).hidden_states


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_language_models_loss_tokens_are_those_of_each_sample_alone(llama, batch_size):
    samples = [example(number, 5 + number % 4, 1 + number % 3) for number in range(7)]
    shipment = collect(llama, samples, TapRule((0, 1), "loss", FP32), batch_size).shipment
    assert list(shipment.digests) == [sample.digest for sample in samples]
    states = torch.split(shipment.decode(), shipment.tokens.tolist())
    for sample, kept in zip(samples, states, strict=True):
        layers = hidden_states(llama, sample)
        for place, tap in enumerate((0, 1)):
            torch.testing.assert_close(kept[:, place], layers[tap + 1][0, sample.loss_positions], atol=1e-5, rtol=1e-4)


def test_a_classifiers_vectors_are_those_of_each_sample_alone(bert):
    samples = [example(number, 4 + number) for number in range(5)]
    shipment = collect(bert, samples, TapRule((0, 2), "mean+cls", FP32), 4).shipment
    for sample, kept in zip(samples, shipment.decode(), strict=True):
        layers = hidden_states(bert, sample)
        for place, tap in enumerate((0, 2)):
            expected = torch.cat([layers[tap + 1][0].mean(0), layers[tap + 1][0, 0]])
            torch.testing.assert_close(kept[place], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_a_sample_with_unusable_activations_is_refused_and_the_others_are_sent(bert, monkeypatch, value):
    samples = [example(number, 6) for number in range(4)]
    forward = bert.forward_taps

    def spoilt(inputs, taps, gather):
        states = [tap.clone() for tap in forward(inputs, taps, gather)]
        states[0][1, 3] = value
        return states

    clean = collect(bert, samples, TapRule((0, 2), "mean", FP32), 4).shipment
    monkeypatch.setattr(bert, "forward_taps", spoilt)
    collected = collect(bert, samples, TapRule((0, 2), "mean", FP32), 4)
    assert collected.refused == (samples[1].digest,)
    assert collected.shipment.digests == tuple(samples[k].digest for k in (0, 2, 3))
    assert np.array_equal(collected.shipment.rows, clean.rows[[0, 2, 3]])


@given(lengths=st.lists(st.tuples(st.integers(4, 12), st.integers(1, 3)), max_size=12), budget=st.integers(100, 4000))
def test_a_shift_is_the_longest_prefix_that_fits(lengths, budget):
    samples = [example(number, length, tokens) for number, (length, tokens) in enumerate(lengths)]
    rule = TapRule((0, 2), "loss", get_codec("int8"))
    now, later = fit_budget(samples, rule, 32, budget)
    sizes = {sample.digest: encoded_bytes(sample, rule, 32) for sample in samples}
    assert [*now, *later] == [sample for sample in samples if sizes[sample.digest] + 80 <= budget]
    assert 80 + sum(sizes[sample.digest] for sample in now) <= budget
    if later:
        assert 80 + sum(sizes[sample.digest] for sample in [*now, later[0]]) > budget


def test_the_forecast_of_bytes_is_what_is_packed(llama):
    samples = [example(number, 6, 1 + number % 3) for number in range(5)]
    rule = TapRule((0, 1, 2), "loss", get_codec("nf4"))
    payload, index = pack(collect(llama, samples, rule, 4).shipment)
    assert len(payload) + len(index) - 80 == sum(encoded_bytes(sample, rule, 32) for sample in samples)


def test_progress_is_told(bert):
    told = []
    collect(bert, [example(number, 6) for number in range(5)], TapRule((2,), "mean", FP32), 2, told.append)
    assert told == [2, 4, 5]
