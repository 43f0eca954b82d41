"""Side networks of a run: who has one, and that a stop at any moment costs nothing but time."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flower_plugin.errors import CacheError, DataError
from flower_plugin.side import checkpoint
from flower_plugin.side.network import SideNetworkConfig
from flower_plugin.side.packing import pack_network
from flower_plugin.side.recipe import SampleKey, TrainConfig, split_held_out
from flower_plugin.side.tuning import RoundMetrics, Scope, SideTuning, has_checkpoint

NETWORK = SideNetworkConfig(width=16, taps=(0, 2), num_labels=3, dropout=0.2)
RECIPE = TrainConfig(epochs=4, batch_size=8, holdout=0.25)
TENANTS = ("a", "b", "c")
SCOPES = ("global", "personal")


class Stop(BaseException):
    """A kill: nothing catches it."""


class MemoryReader:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(60, 2, 16, generator=generator)
        self.targets = torch.randint(3, (60,), generator=generator)
        self.gone: set[SampleKey] = set()
        self.keys = {
            tenant: [SampleKey(tenant, bytes([number, i]) * 8) for i in range(20)]
            for number, tenant in enumerate(TENANTS)
        }

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        there = [20 * key.digest[0] + key.digest[1] for key in keys if key not in self.gone]
        rows = torch.tensor(there, dtype=torch.int64)
        return self.states[rows], self.targets[rows], torch.ones(len(rows), dtype=torch.int64)


def tuning_of(scope: Scope, reader: MemoryReader | None = None, config: TrainConfig = RECIPE) -> SideTuning:
    return SideTuning(NETWORK, config, scope, reader or MemoryReader())


def run(tuning: SideTuning, epochs: int, reader: MemoryReader | None = None) -> list[RoundMetrics]:
    keys = (reader or MemoryReader()).keys
    return [replace(tuning.finish_round(keys), seconds=0.0, read_seconds=0.0) for _ in range(epochs)]


def assert_equal(one: SideTuning, two: SideTuning) -> None:
    assert sorted(one.owners) == sorted(two.owners)
    assert (one.epoch, one.best_epoch, one.exhausted) == (two.epoch, two.best_epoch, two.exhausted)
    for owner in one.owners:
        assert checkpoint._packed(one._trainers[owner]) == checkpoint._packed(two._trainers[owner])


@pytest.mark.parametrize("scope", SCOPES)
def test_stopped_at_any_moment_of_saving_and_resumed_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: Scope
) -> None:
    whole = tuning_of(scope)
    expected = run(whole, 4)
    sync, synced = os.fsync, 0

    def stopping(at: int) -> None:
        def fsync(descriptor: int) -> None:
            nonlocal synced
            synced += 1
            if synced == at:
                raise Stop
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    moments = 0
    while True:
        folder, moments = tmp_path / str(moments), moments + 1
        first = tuning_of(scope)
        run(first, 2)
        first.save(folder)
        run(first, 1)
        synced = 0
        stopping(moments)
        try:
            first.save(folder)
            finished = True
        except Stop:
            finished = False
        monkeypatch.setattr(os, "fsync", sync)
        resumed = tuning_of(scope)
        resumed.load(folder)
        assert resumed.epoch in (2, 3)
        assert {trainer.epoch for trainer in resumed._trainers.values()} == {resumed.epoch}
        done = resumed.epoch
        assert run(resumed, 4 - done) == expected[done:]
        assert_equal(resumed, whole)
        resumed.save(folder)
        assert [path.name for path in folder.iterdir()] == ["epoch-000004"]
        if finished:
            break
    assert moments >= 2 + len(whole.owners)


@pytest.mark.parametrize("scope", SCOPES)
def test_resumed_figures_equal_uninterrupted_ones(tmp_path: Path, scope: Scope) -> None:
    expected = run(tuning_of(scope), 4)
    first, resumed = tuning_of(scope), tuning_of(scope)
    assert run(first, 2) == expected[:2]
    first.save(tmp_path)
    resumed.load(tmp_path)
    assert run(resumed, 2) == expected[2:]


def test_drafts_and_strangers_are_no_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    assert not has_checkpoint(folder)
    draft = folder / "epoch-000009.new"
    draft.mkdir(parents=True)
    (draft / "global").write_bytes(b"cut")
    (folder / "global.new").write_bytes(b"cut")
    (folder / "epoch-000008").mkdir()
    (folder / "epoch-000007").write_bytes(b"a file")
    assert not has_checkpoint(folder)
    with pytest.raises(CacheError, match="no checkpoint"):
        tuning_of("global").load(folder)
    tuning = tuning_of("global")
    run(tuning, 1)
    tuning.save(folder)
    assert has_checkpoint(folder)
    assert not draft.exists()
    resumed = tuning_of("global")
    resumed.load(folder)
    assert resumed.owners == ("global",)
    assert_equal(resumed, tuning)


def test_an_epoch_may_be_saved_twice(tmp_path: Path) -> None:
    tuning, resumed = tuning_of("personal"), tuning_of("personal")
    run(tuning, 1)
    for _ in range(3):
        tuning.save(tmp_path)
        tuning.arrive({"a": MemoryReader().keys["a"][:5]}, 60)
    tuning.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    resumed.load(tmp_path)
    assert_equal(resumed, tuning)


def test_a_full_disk_keeps_the_epoch_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, resumed = tuning_of("personal"), tuning_of("personal")
    run(tuning, 1)
    tuning.save(tmp_path)
    run(tuning, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="No space left"):
        tuning.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.epoch == 1


@pytest.mark.parametrize("scope", SCOPES)
def test_out_of_patience_stays_so_when_resumed(tmp_path: Path, scope: Scope) -> None:
    config = replace(RECIPE, patience=1, epochs=60, learning_rate=0.05)
    tuning, resumed = tuning_of(scope, config=config), tuning_of(scope, config=config)
    for _ in range(60):
        run(tuning, 1)
        if tuning.exhausted:
            break
    assert tuning.exhausted
    tuning.save(tmp_path)
    assert not resumed.exhausted
    resumed.load(tmp_path)
    assert resumed.exhausted


def test_before_training_everybody_is_served_the_same_new_network_and_nobody_has_one() -> None:
    tuning = tuning_of("personal")
    assert all(tuning.serves(tenant) for tenant in (*TENANTS, "stranger"))
    new = tuning.packed("stranger")
    assert new.tobytes() == tuning.packed("a").tobytes()
    assert tuning.owners == ()
    run(tuning, 1)
    assert sorted(tuning.owners) == list(TENANTS)
    assert tuning.serves("a")
    assert not tuning.serves("stranger")
    assert tuning.packed("a").tobytes() != new.tobytes()
    assert pack_network(tuning.network("stranger")).tobytes() == new.tobytes()
    assert sorted(tuning.owners) == list(TENANTS)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_tenant_without_training_samples_gets_no_network(arrives: bool) -> None:
    keys = MemoryReader().keys
    _, held_out = split_held_out({"b": keys["b"]}, RECIPE.holdout, RECIPE.seed)
    assert held_out
    samples = {"a": keys["a"], "b": held_out, "c": []}
    tuning = tuning_of("personal")
    if arrives:
        for tenant, theirs in samples.items():
            tuning.arrive({tenant: theirs}, 20)
    tuning.finish_round(samples)
    assert tuning.owners == ("a",)
    assert not tuning.serves("b")
    assert not tuning.serves("c")


def test_one_tenant_of_bad_samples_costs_the_others_nothing() -> None:
    reader = MemoryReader()
    reader.states[20:40] = math.nan
    tuning, clean = tuning_of("personal", reader), tuning_of("personal")
    (metrics,) = run(tuning, 1, reader)
    run(clean, 1)
    for owner in ("a", "c"):
        assert tuning.packed(owner).tobytes() == clean.packed(owner).tobytes()
    assert math.isfinite(metrics.loss)
    assert metrics.holdout_loss is not None
    assert math.isfinite(metrics.holdout_loss)
    assert metrics.skipped_tokens > 0


@pytest.mark.parametrize("scope", SCOPES)
def test_an_epoch_without_any_good_step_says_so(scope: Scope) -> None:
    reader = MemoryReader()
    reader.states.fill_(math.nan)
    with pytest.raises(DataError, match=r"no step of epoch 1 .* tokens had no finite loss"):
        run(tuning_of(scope, reader), 1, reader)


def test_samples_that_are_gone_are_lost_and_no_reason_to_stop() -> None:
    reader = MemoryReader()
    tuning = tuning_of("global", reader)
    run(tuning, 1)
    reader.gone = set(reader.keys["b"])
    (metrics,) = run(tuning, 1, reader)
    train, _ = split_held_out(reader.keys, RECIPE.holdout, RECIPE.seed)
    assert metrics.lost_samples == len(train["b"])
    assert metrics.samples == len(train["a"]) + len(train["c"])
    reader.gone = {key for keys in reader.keys.values() for key in keys}
    with pytest.raises(DataError, match=r"samples were gone from the cache"):
        run(tuning, 1, reader)


def test_new_held_out_samples_do_not_freeze_the_best_epoch() -> None:
    reader = MemoryReader()
    tuning = tuning_of("global", reader)
    few = {"a": reader.keys["a"]}
    for _ in range(2):
        tuning.finish_round(few)
    best = tuning._trainers["global"].best
    assert best is not None
    best.lowest.losses.fill_(0.0)
    tuning._trainers["global"].best = replace(best, lowest=replace(best.lowest, loss=0.0))
    tuning.finish_round(few)
    assert tuning.best_epoch == best.epoch  # nothing is better than nought, on the same samples
    tuning.finish_round(reader.keys)
    now = tuning._trainers["global"].best
    assert now is not None
    assert now.lowest.loss > 0.0
    _, held_out = split_held_out(reader.keys, RECIPE.holdout, RECIPE.seed)
    assert now.lowest.samples == len(held_out)
