"""The recipe's pure parts, and training: what it learns, skips, repeats and leaves alone."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flower_plugin.errors import ConfigError, DataError
from flower_plugin.side.network import SideNetworkConfig, new_side_network
from flower_plugin.side.recipe import (
    SampleKey,
    TrainConfig,
    epoch_order,
    even_batches,
    interleave,
    learning_rate_at,
    split_held_out,
)
from flower_plugin.side.trainer import Evaluation, Trainer

CLASSIFIER = SideNetworkConfig(width=16, taps=(0, 2), num_labels=2, input_dropout=0.0)
LANGUAGE_MODEL = SideNetworkConfig(width=16, taps=(0, 2), input_dropout=0.0)
RECIPE = TrainConfig(epochs=4, batch_size=16, learning_rate=3e-3, mixup=1.0)


class MemoryReader:
    """Samples in memory whose class can be read off a direction of the first tap."""

    def __init__(self, samples: int = 120, tokens: int = 1, classes: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn(samples, tokens, 2, 16, generator=generator)
        direction = torch.randn(16, classes, generator=generator)
        self.targets = (self.states[:, :, 0] @ direction).argmax(-1)
        self.keys = [SampleKey(f"phone-{i % 3}", i.to_bytes(16, "little")) for i in range(samples)]
        self.asked: list[SampleKey] = []

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        self.asked += keys
        rows = torch.tensor([int.from_bytes(key.digest, "little") for key in keys])
        counts = torch.full((len(keys),), self.states.shape[1])
        return self.states[rows].flatten(0, 1), self.targets[rows].flatten(), counts

    @property
    def by_tenant(self) -> dict[str, list[SampleKey]]:
        grouped: dict[str, list[SampleKey]] = {}
        for key in self.keys:
            grouped.setdefault(key.tenant, []).append(key)
        return grouped


def classifier(reader: MemoryReader, config: TrainConfig = RECIPE, seed: int = 0) -> Trainer:
    return Trainer(new_side_network(CLASSIFIER, seed), reader, config)


def weights(trainer: Trainer) -> list[Tensor]:
    return [tensor.clone() for tensor in trainer.network.state_dict().values()]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


tenant_counts = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(deadline=None)
@given(tenant_counts, st.randoms())
def test_every_prefix_holds_each_owners_share_within_one(counts: list[int], random: object) -> None:
    priority = list(range(len(counts)))
    random.shuffle(priority)  # type: ignore[attr-defined]
    order = interleave(counts, priority)
    assert Counter(order) == Counter({i: n for i, n in enumerate(counts) if n})
    seen = [0] * len(counts)
    for position, owner in enumerate(order, start=1):
        seen[owner] += 1
        for count, got in zip(counts, seen, strict=True):
            assert abs(got - position * count / len(order)) < 1


@settings(deadline=None)
@given(tenant_counts, st.integers(0, 5), st.integers(0, 5), st.integers(1, 17))
def test_an_epoch_holds_each_sample_once_and_each_batch_its_fair_share(
    counts: list[int], seed: int, epoch: int, batch_size: int
) -> None:
    keys = {f"t{i}": [SampleKey(f"t{i}", bytes([i, j]) * 8) for j in range(count)] for i, count in enumerate(counts)}
    order = epoch_order(keys, seed, epoch)
    assert sorted(order) == sorted(key for theirs in keys.values() for key in theirs)
    batches = even_batches(order, batch_size)
    assert [key for batch in batches for key in batch] == order
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert not batches or max(map(len, batches)) - min(map(len, batches)) <= 1
    for batch in batches:
        for i, count in enumerate(counts):
            got = sum(key.tenant == f"t{i}" for key in batch)
            assert abs(got - len(batch) * count / len(order)) < 2


def test_order_depends_on_seed_and_epoch_but_not_on_arrival_or_names() -> None:
    keys = MemoryReader().by_tenant
    arrived_otherwise = {tenant: theirs[::-1] for tenant, theirs in keys.items()}
    order = epoch_order(keys, 1, 2)
    assert epoch_order(arrived_otherwise, 1, 2) == order
    assert epoch_order(keys, 1, 3) != order
    assert epoch_order(keys, 2, 2) != order
    renamed = {
        f"{9 - i}": [SampleKey(f"{9 - i}", key.digest) for key in theirs] for i, theirs in enumerate(keys.values())
    }
    assert [key.digest for key in epoch_order(renamed, 1, 2)] == [key.digest for key in order]


def test_a_large_order_is_made_quickly() -> None:
    order = interleave([1 + i for i in range(200)], list(range(200)))
    assert len(order) == 20_100


@settings(deadline=None)
@given(st.floats(0, 0.9), st.integers(0, 3))
def test_held_out_samples_stay_held_out_when_others_arrive(fraction: float, seed: int) -> None:
    keys = MemoryReader().by_tenant
    train, held = split_held_out(keys, fraction, seed)
    some = {tenant: theirs[::2] for tenant, theirs in keys.items()}
    some_train, some_held = split_held_out(some, fraction, seed)
    assert set(some_held) <= set(held)
    assert all(set(some_train[tenant]) <= set(train[tenant]) for tenant in some)
    assert sum(map(len, train.values())) + len(held) == 120
    assert fraction > 0 or not held


def test_held_out_share_is_about_the_fraction() -> None:
    keys = {"t": [SampleKey("t", i.to_bytes(16, "big")) for i in range(4000)]}
    _, held = split_held_out(keys, 0.1, 0)
    assert 330 < len(held) < 470


def test_learning_rate_warms_up_and_falls() -> None:
    cosine = TrainConfig(learning_rate=1.0, warmup=0.1)
    assert learning_rate_at(cosine, 0.05) == pytest.approx(0.5)
    assert learning_rate_at(cosine, 0.1) == pytest.approx(1.0)
    assert learning_rate_at(cosine, 0.55) == pytest.approx(0.5)
    assert learning_rate_at(cosine, 1.0) == pytest.approx(0.0)
    constant = TrainConfig(learning_rate=1.0, warmup=0.0, schedule="constant")
    assert {learning_rate_at(constant, x) for x in (0.0, 0.5, 1.0, 2.0)} == {1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"warmup": 1.0},
        {"schedule": "linear"}, {"holdout": 1.0}, {"patience": 0}, {"mixup": -1.0}, {"average": 1.0},
        {"label_smoothing": 1.0}, {"clip_norm": 0.0}, {"weight_decay": -1.0}, {"head_chunk": 0}, {"seed": -1},
    ],
)  # fmt: skip
def test_bad_recipes_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        TrainConfig(**change)  # type: ignore[arg-type]


def test_it_learns() -> None:
    reader = MemoryReader(400)
    trainer = classifier(reader, TrainConfig(epochs=12, batch_size=16, learning_rate=3e-3, mixup=1.0))
    train, held = split_held_out(reader.by_tenant, 0.25, 0)
    before = trainer.evaluate(held)
    metrics = [trainer.train_epoch(train) for _ in range(12)]
    after = trainer.evaluate(held)
    assert before.loss == pytest.approx(math.log(2), rel=1e-5)
    assert after.accuracy > 0.85
    assert metrics[-1].loss < metrics[0].loss
    assert metrics[-1].samples == sum(map(len, train.values()))
    assert metrics[-1].tokens == metrics[-1].samples
    assert [m.epoch for m in metrics] == list(range(12))
    assert 0 < metrics[-1].read_seconds < metrics[-1].seconds


def test_same_seed_same_weights_and_the_callers_random_state_is_left_alone() -> None:
    reader = MemoryReader()
    runs = [classifier(reader, TrainConfig(epochs=2, seed=seed)) for seed in (1, 1, 2)]
    state = torch.random.get_rng_state()
    for number, trainer in enumerate(runs):
        torch.manual_seed(number)
        before = torch.random.get_rng_state()
        trainer.train_epoch(reader.by_tenant)
        assert torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(state)
    assert same(weights(runs[0]), weights(runs[1]))
    assert not same(weights(runs[0]), weights(runs[2]))


def test_bad_samples_cost_themselves_not_their_step() -> None:
    reader = MemoryReader()
    reader.states[5, 0, 1, 3] = math.nan
    reader.states[40, 0, 0, 0] = math.inf
    trainer = classifier(reader, TrainConfig(epochs=2, batch_size=10))
    metrics = trainer.train_epoch(reader.by_tenant)
    assert (metrics.steps, metrics.skipped_steps) == (12, 0)
    assert (metrics.samples, metrics.tokens, metrics.skipped_tokens) == (120, 118, 2)
    assert math.isfinite(metrics.loss)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(trainer))


@pytest.mark.parametrize("value", [3e38, -3e38, 1e30, 1e20])
@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_huge_but_finite_rows_of_one_device_leave_the_others_their_training(value: float, task: str) -> None:
    reader = MemoryReader(400)
    torch.manual_seed(0)
    reader.states[::20] = value * torch.randn(20, 1, 2, 16).sign()
    config = TrainConfig(epochs=12, batch_size=16, learning_rate=3e-3, mixup=1.0)
    if task == "classification":
        trainer = classifier(reader, config)
    else:
        head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 2)).requires_grad_(False)
        trainer = Trainer(new_side_network(LANGUAGE_MODEL, 0), reader, config, head=head)
    train, held = split_held_out(reader.by_tenant, 0.25, 0)
    bad = sum(int.from_bytes(key.digest, "little") % 20 == 0 for keys in train.values() for key in keys)
    metrics = [trainer.train_epoch(train) for _ in range(12)]
    assert all(m.skipped_steps == 0 and math.isfinite(m.loss) for m in metrics)
    assert all(m.skipped_tokens == bad for m in metrics)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(trainer))
    good = [key for key in held if int.from_bytes(key.digest, "little") % 20]
    assert trainer.evaluate(good).accuracy > 0.8
    assert trainer.evaluate(held).loss == pytest.approx(trainer.evaluate(good).loss, rel=1e-4)


def test_one_bad_row_changes_calibration_no_more_than_its_absence() -> None:
    reader = MemoryReader(64)
    states, _, _ = reader.read(reader.keys)
    clean, spoilt = new_side_network(CLASSIFIER, 0), new_side_network(CLASSIFIER, 0)
    clean.calibrate(states)
    spoilt.calibrate(torch.cat([states, torch.full((1, 2, 16), 3e38) * torch.randn(16).sign()]))
    for one, two in zip(clean.parameters(), spoilt.parameters(), strict=True):
        assert torch.equal(one, two)


def test_all_bad_moves_nothing_and_what_comes_later_still_calibrates() -> None:
    reader = MemoryReader(40)
    reader.states[:20] = math.nan
    trainer = classifier(reader)
    before = weights(trainer)
    metrics = trainer.train_arrivals(reader.keys[:20], 40)
    assert (metrics.steps, metrics.skipped_steps, metrics.skipped_tokens) == (0, 2, 20)
    assert math.isnan(metrics.loss)
    assert same(before, weights(trainer))
    spoilt = trainer.evaluate(reader.keys[:20])
    assert (spoilt.samples, spoilt.tokens, spoilt.skipped_tokens, spoilt.counted) == (20, 20, 20, 0)
    assert not trainer.keep_if_best(spoilt)
    trainer.train_arrivals(reader.keys[20:], 40)
    assert not torch.equal(trainer.network.taps[0].norm.bias, torch.zeros(16))
    assert trainer.keep_if_best(trainer.evaluate(reader.keys[20:]))


def test_a_bad_held_out_token_is_left_out_of_the_mean() -> None:
    reader = MemoryReader()
    trainer = classifier(reader)
    trainer.train_epoch(reader.by_tenant)
    good = trainer.evaluate(reader.keys[1:])
    reader.states[0] = math.nan
    mixed = trainer.evaluate(reader.keys)
    assert mixed.loss == pytest.approx(good.loss, rel=1e-5)
    assert mixed.accuracy == pytest.approx(good.accuracy)
    assert (mixed.tokens, mixed.skipped_tokens, mixed.counted) == (120, 1, 119)


class ForgetfulReader(MemoryReader):
    """Some of its samples are gone."""

    gone: frozenset[SampleKey] = frozenset()

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        there = [key for key in keys if key not in self.gone]
        if not there:
            return torch.empty(0, 2, 16), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return super().read(there)


def test_samples_that_are_gone_are_counted_and_an_empty_batch_is_no_step() -> None:
    reader = ForgetfulReader(60)
    trainer = classifier(reader, TrainConfig(batch_size=10))
    reader.gone = frozenset(reader.keys[:13])
    metrics = trainer.train_arrivals(reader.keys[:10], 60)
    assert (metrics.samples, metrics.lost_samples, metrics.steps, metrics.skipped_steps) == (0, 10, 0, 1)
    metrics = trainer.train_arrivals(reader.keys[10:], 60)
    assert (metrics.samples, metrics.lost_samples, metrics.steps, metrics.skipped_steps) == (47, 3, 5, 0)
    evaluation = trainer.evaluate(reader.keys)
    assert (evaluation.samples, evaluation.tokens) == (47, 47)
    assert evaluation.loss == pytest.approx(trainer.evaluate(reader.keys[13:]).loss, rel=1e-5)
    assert math.isnan(trainer.evaluate(reader.keys[:13]).loss)


def test_the_best_is_judged_anew_when_the_held_out_samples_change() -> None:
    reader = MemoryReader(200)
    trainer = classifier(reader)
    easy, hard = reader.keys[:60], reader.keys[60:120]
    trainer.train_arrivals(easy * 8, 480)
    trainer.finish_epoch()
    trainer.judge(easy)
    kept = trainer.best
    assert kept is not None
    trainer.train_arrivals(hard, 60)
    trainer.finish_epoch()
    other = trainer.evaluate(hard)
    assert other.loss > kept.lowest.loss  # by means alone, no later epoch could ever win
    trainer.judge(hard)
    assert trainer.best is not None
    assert trainer.best.epoch == 2
    assert trainer.best.lowest.subject == other.subject != kept.lowest.subject


def test_a_best_that_is_still_better_on_other_samples_stays() -> None:
    reader = MemoryReader(200)
    trainer = classifier(reader)
    for _ in range(6):
        trainer.train_epoch(reader.by_tenant)
    trainer.judge(reader.keys[:60])
    nn.init.normal_(trainer.network.classifier.project.weight, std=9.0)
    trainer.finish_epoch()
    spoilt = weights(trainer)
    trainer.judge(reader.keys[:90])
    assert trainer.best is not None
    assert trainer.best.epoch == 6
    assert trainer.best.lowest.samples == 90
    assert same(spoilt, weights(trainer))


def test_a_first_evaluation_that_is_not_finite_blocks_no_later_one() -> None:
    reader = MemoryReader()
    trainer = classifier(reader)
    reader.states[:30] = math.nan
    trainer.judge(reader.keys[:30])
    assert trainer.best is None
    trainer.judge(reader.keys[30:60])
    assert trainer.best is not None
    trainer.judge(reader.keys[:30])  # the best cannot be judged by these either
    trainer.epoch = 3
    trainer.judge(reader.keys[60:])
    assert trainer.best.epoch == 3
    assert math.isfinite(trainer.best.lowest.loss)


def test_a_target_that_fits_no_class_is_named() -> None:
    reader = MemoryReader()
    reader.targets[3] = 2
    with pytest.raises(DataError, match="2 classes"):
        classifier(reader).train_epoch(reader.by_tenant)


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(DataError, match="No cached sample"):
        classifier(MemoryReader()).train_epoch({"phone-0": []})


@pytest.mark.parametrize("num_labels", [2, None])
def test_head_and_task_must_agree(num_labels: int | None) -> None:
    network = new_side_network(SideNetworkConfig(width=16, taps=(0, 2), num_labels=num_labels), 0)
    head = None if num_labels is None else nn.Linear(16, 2)
    with pytest.raises(ConfigError, match="head"):
        Trainer(network, MemoryReader(), RECIPE, head=head)


def frozen_head(vocabulary: int = 30) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, vocabulary, bias=False))
    return head.requires_grad_(False)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_head_in_chunks_gives_the_whole_gradient(chunk: int) -> None:
    reader = MemoryReader(8, tokens=5, classes=30)
    head = frozen_head()
    network = new_side_network(LANGUAGE_MODEL, 0)
    nn.init.normal_(network.up.weight, std=0.1)
    trainer = Trainer(network, reader, TrainConfig(head_chunk=chunk, clip_norm=1e9), head=head)
    states, targets, _ = reader.read(reader.keys)
    network.eval()
    loss, correct = trainer._objective.backward(network, states, targets)
    got = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    logits = head(network(states))
    whole = cross_entropy(logits, targets)
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    assert correct == int((logits.argmax(-1) == targets).sum())
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_language_model_learns_through_its_frozen_head() -> None:
    reader = MemoryReader(100, tokens=4)
    head = frozen_head()
    reader.targets = head(reader.states[:, :, 0]).argmax(-1)
    before_head = [p.clone() for p in head.parameters()]
    trainer = Trainer(
        new_side_network(LANGUAGE_MODEL, 0),
        reader,
        TrainConfig(epochs=10, batch_size=8, learning_rate=1e-2),
        head=head,
    )
    states, targets, _ = reader.read(reader.keys)
    before = trainer.evaluate(reader.keys)
    assert before.loss == pytest.approx(cross_entropy(head(states[:, -1]), targets).item(), rel=1e-5)
    for _ in range(10):
        metrics = trainer.train_epoch(reader.by_tenant)
    assert trainer.evaluate(reader.keys).loss < 0.9 * before.loss
    assert metrics.tokens == 400
    assert all(torch.equal(a, b) for a, b in zip(before_head, head.parameters(), strict=True))
    assert all(p.grad is None for p in head.parameters())


def test_no_gradient_leaves_the_side_network() -> None:
    reader = MemoryReader()
    reader.states.requires_grad_()
    trainer = classifier(reader, TrainConfig(epochs=1, mixup=0.0))
    trainer.train_epoch(reader.by_tenant)
    assert reader.states.grad is None


def test_best_snapshot_and_patience() -> None:
    trainer = classifier(MemoryReader(), TrainConfig(patience=2))

    def held_out(loss: float) -> Evaluation:
        return Evaluation(loss, 0.5, 10, 10, 0.0, 0.0)

    trainer.epoch = 1
    assert trainer.keep_if_best(held_out(0.6))
    kept = trainer.best_state()
    nn.init.ones_(trainer.network.up.weight)
    trainer.epoch = 2
    assert not trainer.keep_if_best(held_out(0.7))
    assert not trainer.exhausted
    trainer.epoch = 3
    assert not trainer.keep_if_best(held_out(math.nan))
    assert trainer.exhausted
    assert torch.equal(trainer.best_state()["up.weight"], kept["up.weight"])
    assert not torch.equal(kept["up.weight"], trainer.network.up.weight)


def test_the_newest_of_weights_that_held_out_samples_cannot_tell_apart_is_kept() -> None:
    trainer = classifier(MemoryReader())
    noise = torch.linspace(-1, 1, 100)

    def held_out(losses: Tensor) -> Evaluation:
        return Evaluation(losses.mean().item(), 0.5, 100, 100, 0.0, 0.0, losses)

    assert trainer.keep_if_best(held_out(torch.full((100,), 0.5)))
    assert trainer.keep_if_best(held_out(0.55 + noise))  # worse by 0.05, give or take 0.058
    assert not trainer.keep_if_best(held_out(0.57 + noise))  # still measured against the lowest, 0.5
    assert not trainer.keep_if_best(held_out(torch.full((100,), 0.501)))  # small but certain
    assert trainer.keep_if_best(held_out(torch.full((100,), 0.4)))
    assert trainer.keep_if_best(held_out(torch.full((7,), 0.39)))  # other samples: means decide
    assert not trainer.keep_if_best(held_out(torch.full((100,), 0.395)))


def test_arrivals_make_up_an_epoch() -> None:
    reader = MemoryReader()
    trainer = classifier(reader, TrainConfig(epochs=2, warmup=0.5, learning_rate=1.0))
    tenants = list(reader.by_tenant.values())
    rates = [trainer.train_arrivals(keys, expected=120).learning_rate for keys in tenants]
    trainer.finish_epoch()
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert trainer.epoch == 1
    assert trainer.train_epoch(reader.by_tenant).epoch == 1


def test_arrivals_beyond_what_was_expected_stay_in_their_epoch() -> None:
    reader = MemoryReader()
    trainer = classifier(reader)
    for keys in reader.by_tenant.values():
        trainer.train_arrivals(keys, expected=50)
    assert trainer.progress <= 1.0


def test_the_moving_average_is_what_is_judged_and_kept() -> None:
    reader = MemoryReader()
    trainer = classifier(reader, TrainConfig(epochs=2, average=0.9))
    trainer.train_epoch(reader.by_tenant)
    trained = weights(trainer)
    judged = trainer.evaluate(reader.keys)
    assert same(trained, weights(trainer))
    kept = trainer.kept_state()
    assert not torch.equal(kept["classifier.project.weight"], trainer.network.classifier.project.weight)
    other = Trainer(new_side_network(CLASSIFIER, 9), reader, RECIPE)
    other.network.load_state_dict(kept)
    assert other.evaluate(reader.keys).loss == pytest.approx(judged.loss, rel=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.1, 3))
def test_mixing_keeps_each_rows_own_target_in_the_lead(alpha: float) -> None:
    trainer = classifier(MemoryReader(), TrainConfig(mixup=alpha))
    share, partner = trainer._objective._mixing(9)
    assert 0.5 <= share <= 1
    assert sorted(partner.tolist()) == list(range(9))
