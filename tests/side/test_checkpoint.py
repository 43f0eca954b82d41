"""Checkpoints: a run that goes on equals one never stopped, and a bad file is refused with a reason."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flower_plugin.errors import CacheError
from flower_plugin.side.checkpoint import load_checkpoint, save_checkpoint
from flower_plugin.side.network import SideNetworkConfig, new_side_network
from flower_plugin.side.recipe import SampleKey, TrainConfig, split_held_out
from flower_plugin.side.trainer import EpochMetrics, Trainer

CLASSIFIER = SideNetworkConfig(width=16, taps=(0, 2), num_labels=3, dropout=0.2, input_dropout=0.2)
LANGUAGE_MODEL = SideNetworkConfig(width=16, taps=(0, 2), dropout=0.2)
RECIPE = TrainConfig(epochs=4, batch_size=8, holdout=0.25)


class MemoryReader:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(50, 2, 16, generator=generator)
        self.targets = torch.randint(3, (50,), generator=generator)
        self.keys = {t: [SampleKey(t, bytes([t == "b", i]) * 8) for i in range(25)] for t in ("a", "b")}

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.tensor([25 * key.digest[0] + key.digest[1] for key in keys])
        return self.states[rows], self.targets[rows], torch.ones(len(rows), dtype=torch.int64)


def trainer_of(network: SideNetworkConfig = CLASSIFIER, config: TrainConfig = RECIPE, seed: int = 0) -> Trainer:
    head = None
    if network.num_labels is None:
        torch.manual_seed(5)
        head = nn.Linear(16, 3).requires_grad_(False)
    return Trainer(new_side_network(network, seed), MemoryReader(), config, head=head)


def run(trainer: Trainer, epochs: int) -> list[EpochMetrics]:
    reader = trainer.reader
    assert isinstance(reader, MemoryReader)
    train, held = split_held_out(reader.keys, trainer.config.holdout, trainer.config.seed)
    done = []
    for _ in range(epochs):
        done.append(trainer.train_epoch(train))
        trainer.keep_if_best(trainer.evaluate(held))
    return done


def figures(metrics: list[EpochMetrics]) -> list[EpochMetrics]:
    return [replace(m, seconds=0.0, read_seconds=0.0) for m in metrics]


def assert_equal(one: Trainer, two: Trainer) -> None:
    assert (one.epoch, one.progress, one.shifts) == (two.epoch, two.progress, two.shifts)
    pairs = [(one.network.state_dict(), two.network.state_dict()), (one.best_state(), two.best_state())]
    pairs.append((one.averaged, two.averaged))
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for p, q in zip(one.network.parameters(), two.network.parameters(), strict=True):
        mine, theirs = one.optimizer.state[p], two.optimizer.state[q]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("network", [CLASSIFIER, LANGUAGE_MODEL])
@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_equals_uninterrupted(tmp_path: Path, network: SideNetworkConfig, average: float, stop: int) -> None:
    config = replace(RECIPE, average=average)
    whole = trainer_of(network, config)
    expected = run(whole, 4)
    first = trainer_of(network, config)
    run(first, stop)
    save_checkpoint(first, tmp_path / "side")
    # Another start and another random state: both must be of no consequence.
    torch.manual_seed(99)
    resumed = trainer_of(network, config, seed=7)
    load_checkpoint(resumed, tmp_path / "side")
    assert_equal(resumed, first)
    assert figures(run(resumed, 4 - stop)) == figures(expected[stop:])
    assert_equal(resumed, whole)


def test_resumed_amid_arrivals_equals_uninterrupted(tmp_path: Path) -> None:
    def arrive(trainer: Trainer, tenant: str) -> None:
        reader = trainer.reader
        assert isinstance(reader, MemoryReader)
        trainer.train_arrivals(reader.keys[tenant], expected=50)

    whole, first, resumed = trainer_of(), trainer_of(), trainer_of(seed=7)
    arrive(whole, "a")
    arrive(first, "a")
    save_checkpoint(first, tmp_path / "side")
    load_checkpoint(resumed, tmp_path / "side")
    for trainer in (whole, resumed):
        arrive(trainer, "b")
        trainer.finish_epoch()
        run(trainer, 1)
    assert_equal(resumed, whole)


def test_before_the_first_epoch(tmp_path: Path) -> None:
    fresh = trainer_of()
    save_checkpoint(fresh, tmp_path / "side")
    resumed = trainer_of(seed=7)
    load_checkpoint(resumed, tmp_path / "side")
    assert resumed.best is None
    run(fresh, 1)
    run(resumed, 1)
    assert_equal(resumed, fresh)


def test_more_epochs_may_be_asked_for_but_nothing_else_may_change(tmp_path: Path) -> None:
    trainer = trainer_of()
    run(trainer, 1)
    save_checkpoint(trainer, tmp_path / "side")
    load_checkpoint(trainer_of(config=replace(RECIPE, epochs=9, patience=2)), tmp_path / "side")
    with pytest.raises(CacheError, match="learning_rate"):
        load_checkpoint(trainer_of(config=replace(RECIPE, learning_rate=0.5)), tmp_path / "side")
    with pytest.raises(CacheError, match="reduction"):
        load_checkpoint(trainer_of(replace(CLASSIFIER, reduction=2)), tmp_path / "side")


@pytest.mark.parametrize("keep", [0, 5, 500, -1])
def test_a_cut_file_is_refused_and_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "side"
    trainer = trainer_of()
    run(trainer, 1)
    save_checkpoint(trainer, path)
    path.write_bytes(path.read_bytes()[:keep])
    untouched, other = trainer_of(), trainer_of()
    with pytest.raises(CacheError, match="side"):
        load_checkpoint(other, path)
    assert_equal(other, untouched)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="nowhere"):
        load_checkpoint(trainer_of(), tmp_path / "nowhere")


def test_a_write_that_fails_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "side"
    trainer = trainer_of()
    run(trainer, 1)
    save_checkpoint(trainer, path)
    before = path.read_bytes()
    run(trainer, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="No space left"):
        save_checkpoint(trainer, path)
    assert path.read_bytes() == before


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        trainer = trainer_of()
        run(trainer, 2)
        save_checkpoint(trainer, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
