"""Gathering: the right vectors, from either padding side, and nothing of the padding."""

import numpy as np
import pytest
import torch

from flower_plugin.errors import ConfigError
from flower_plugin.side.examples import Example, collate
from flower_plugin.side.tokens import (
    gather_pooled,
    make_gather,
    parse_pooling,
    pooled_width,
)

LENGTHS = (5, 2, 3)
WIDTH = 8


def batch_and_hidden(side: str):
    """A padded batch, its hidden states with NaN in the padding, and the real vectors of each sample."""
    nowhere = np.zeros(0, np.int32)
    examples = [Example(b"", np.ones(n, np.int32), nowhere, np.zeros(1, np.int32)) for n in LENGTHS]
    batch = collate(examples, 0, side)
    hidden = torch.full((3, 5, WIDTH), torch.nan)
    generator = torch.Generator().manual_seed(0)
    real = [torch.randn(n, WIDTH, generator=generator) for n in LENGTHS]
    for row, vectors in enumerate(real):
        hidden[row, batch.inputs["attention_mask"][row].bool()] = vectors
    return batch, hidden, real


EXPECTED = {
    "cls": lambda vectors: vectors[0],
    "last": lambda vectors: vectors[-1],
    "mean": lambda vectors: vectors.mean(0),
    "max": lambda vectors: vectors.amax(0),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", ["cls", "last", "mean", "max", "mean+max", "max+cls+mean+last"])
def test_pooling_sees_real_tokens_only(rule, side):
    batch, hidden, real = batch_and_hidden(side)
    pooled = make_gather(rule, batch)(hidden)
    expected = [torch.cat([EXPECTED[part](vectors) for part in rule.split("+")]) for vectors in real]
    torch.testing.assert_close(pooled, torch.stack(expected))
    assert pooled.shape[1] == pooled_width(rule, WIDTH)


@pytest.mark.parametrize("rule", ["cls", "last", "mean", "max"])
def test_pooling_without_padding_is_the_same(rule):
    hidden = torch.randn(2, 4, WIDTH)
    pooled = gather_pooled(rule, torch.ones(2, 4, dtype=torch.int64))(hidden)
    torch.testing.assert_close(pooled, torch.stack([EXPECTED[rule](vectors) for vectors in hidden]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_positions_are_gathered_in_the_order_of_the_targets(side):
    ids = [np.arange(4, dtype=np.int32), np.arange(10, 12, dtype=np.int32)]
    spots = [np.array([1, 3], np.int32), np.array([0], np.int32)]
    examples = [Example(b"", i, s, i[s]) for i, s in zip(ids, spots, strict=True)]
    batch = collate(examples, 77, side)
    hidden = batch.inputs["input_ids"].unsqueeze(-1).expand(-1, -1, WIDTH).to(torch.bfloat16)
    gathered = make_gather("loss", batch)(hidden)
    assert gathered.dtype == torch.float32
    assert gathered[:, 0].tolist() == batch.targets.tolist() == [1, 3, 10]


@pytest.mark.parametrize("rule", ["loss", "cls", "last", "mean", "max"])
def test_the_result_keeps_nothing_of_the_hidden_states(rule):
    examples = [Example(b"", np.ones(3, np.int32), np.array([2], np.int32), np.array([1], np.int32))]
    hidden = torch.ones(1, 3, WIDTH)
    kept = make_gather(rule, collate(examples, 0))(hidden)
    assert kept.untyped_storage().nbytes() == WIDTH * 4
    hidden.zero_()
    assert (kept == 1).all()


def test_a_mean_in_half_precision_is_summed_in_single():
    hidden = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    assert gather_pooled("mean", torch.ones(1, 4096))(hidden).item() == 1.0


@pytest.mark.parametrize("rule", ["", "median", "mean+", "mean+mean", "loss+mean"])
def test_unknown_rules_are_refused(rule):
    with pytest.raises(ConfigError, match="cls, last, mean, max"):
        parse_pooling(rule)


def test_widths():
    assert pooled_width("loss", 576) == 576
    assert pooled_width("mean+max+cls", 384) == 1152


def test_a_sample_of_padding_only_is_refused():
    with pytest.raises(ConfigError, match="real token"):
        gather_pooled("mean", torch.tensor([[1, 1], [0, 0]]))
