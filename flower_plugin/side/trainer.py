"""Trains a side network from cached activations, on a CPU or one GPU, the same way each time."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from flower_plugin.errors import ConfigError, DataError

from .metrics import EpochMetrics, Evaluation, Snapshot, Tally
from .network import SideNetwork
from .objective import Head, Objective, check_batch, new_optimizer
from .recipe import (
    SampleKey,
    TrainConfig,
    derive_seed,
    epoch_order,
    even_batches,
    group_by_tenant,
    learning_rate_at,
    name_samples,
)

__all__ = ["ActivationReader", "EpochMetrics", "Evaluation", "Snapshot", "Trainer"]

CALIBRATION_SAMPLES = 1024


class ActivationReader(Protocol):
    """Source of cached activations."""

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        """Give states [tokens, taps, width] float32, targets [tokens] int64, tokens per sample [samples]."""
        ...


class Trainer:
    """Trains one side network from a reader of cached activations.

    Parameters
    ----------
    network : SideNetwork
        Trained in place; only its own parameters ever get a gradient.
    reader : ActivationReader
        Where cached samples come from.
    config : TrainConfig
        The recipe.
    head : callable or None
        Causal LM only: the backbone's frozen head, hidden [n, width] -> logits [n, vocabulary]. It must map
        each row by itself, since rows are given to it in chunks.
    device : str or torch.device
        Where to train. On a GPU the side network runs under bf16 autocast; weights stay float32.

    Notes
    -----
    All randomness derives from (seed, epoch), so a run resumed at an epoch's start equals one never stopped,
    bit for bit on one machine. A step whose loss or gradient is not finite is taken again without the tokens
    that are to blame, and skipped if that does not help; both are counted. So are samples that are gone.
    """

    def __init__(
        self,
        network: SideNetwork,
        reader: ActivationReader,
        config: TrainConfig,
        *,
        head: Head | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if (head is None) == (network.classifier is None):
            raise ConfigError(
                "A causal LM's side network (num_labels=None) needs the backbone's head; "
                "a classifier has its own and takes none."
            )
        self.device = torch.device(device)
        self.network = network.to(self.device)
        self.reader = reader
        self.config = config
        self.optimizer = new_optimizer(network, config)
        self.averaged: dict[str, Tensor] = {}
        self.best: Snapshot | None = None
        self.epoch = 0
        self.shifts = 0
        self.progress = 0.0
        self._objective = Objective(head, config)

    def train_epoch(self, keys_by_tenant: Mapping[str, Sequence[SampleKey]]) -> EpochMetrics:
        """Train once on each sample, tenants interleaved by their share, then move on to the next epoch.

        Raises
        ------
        DataError
            If no sample is named, or a target does not fit the network.
        """
        order = epoch_order(keys_by_tenant, self.config.seed, self.epoch)
        metrics = self._train(order, "epoch", self.epoch + 1.0)
        self.finish_epoch()
        return metrics

    def train_arrivals(self, keys: Sequence[SampleKey], expected: int) -> EpochMetrics:
        """Train on samples that have just arrived, as a part of the current epoch.

        Parameters
        ----------
        keys : sequence of SampleKey
            What has arrived since the last call.
        expected : int
            Samples the whole epoch will have: places these steps on the learning-rate schedule.

        Notes
        -----
        Call `finish_epoch` when everything has arrived. The weights depend on what arrived in which call.
        """
        order = epoch_order(group_by_tenant(keys), self.config.seed, self.epoch)
        end = min(self.epoch + 1.0, self.progress + len(keys) / max(expected, len(keys), 1))
        metrics = self._train(order, f"arrivals {self.shifts}", end)
        self.shifts += 1
        return metrics

    def finish_epoch(self) -> None:
        """Move on to the next epoch: its order, random numbers and place on the schedule."""
        self.epoch += 1
        self.shifts = 0
        self.progress = float(self.epoch)

    def evaluate(self, keys: Sequence[SampleKey]) -> Evaluation:
        """Return loss and accuracy of the kept weights (the moving average if there is one) over `keys`.

        Tokens without a finite loss are left out and counted; NaN where no token is left.
        """
        return self._evaluate(keys, self.averaged)

    def judge(self, keys: Sequence[SampleKey]) -> Evaluation:
        """Evaluate on the held-out samples `keys`, and keep the weights unless they are worse than the best.

        Where these are not the samples that the best weights were judged by, those are judged again first.
        """
        held_out = self.evaluate(keys)
        if self.best is not None and self.best.lowest.subject != held_out.subject:
            again = self._evaluate(keys, self.best.weights)
            self.best = replace(self.best, loss=again.loss, accuracy=again.accuracy, lowest=again)
        self.keep_if_best(held_out)
        return held_out

    @torch.no_grad()
    def _evaluate(self, keys: Sequence[SampleKey], weights: Mapping[str, Tensor]) -> Evaluation:
        begin = time.perf_counter()
        tally = Tally()
        losses = [torch.empty(0)]
        self.network.eval()
        with self._using(weights):
            for batch in even_batches(keys, self.config.batch_size):
                states, targets = self._read(batch, tally)
                if len(targets):
                    each, right = self._score(states, targets)
                    tally.add_tokens(each, right)
                    losses.append(each)
        subject = name_samples(keys, tally.samples)
        return tally.evaluation(torch.cat(losses), subject, time.perf_counter() - begin)

    def keep_if_best(self, held_out: Evaluation) -> bool:
        """Keep the weights as the best snapshot unless their held-out loss is worse than the lowest so far.

        Worse is: by more than one standard error of the difference, token by token. Among weights that the
        held-out samples cannot tell apart the newest are kept, as their learning rate had fallen furthest.
        """
        best = self.best
        if not math.isfinite(held_out.loss) or (best is not None and best.is_better_than(held_out)):
            return False
        lowest = best.lowest if best is not None and best.lowest.loss <= held_out.loss else held_out
        self.best = Snapshot(self.epoch, held_out.loss, held_out.accuracy, self.kept_state(), lowest)
        return True

    @property
    def exhausted(self) -> bool:
        """Whether the best held-out loss is `patience` epochs old."""
        if self.config.patience is None or self.best is None:
            return False
        return self.epoch - self.best.epoch >= self.config.patience

    def kept_state(self) -> dict[str, Tensor]:
        """Return a CPU copy of the weights to keep: the moving average if there is one, or the last."""
        source = self.averaged or self.network.state_dict()
        return {name: tensor.detach().cpu().clone() for name, tensor in source.items()}

    def best_state(self) -> dict[str, Tensor]:
        """Return the weights of the best snapshot, or those to keep now if nothing was held out."""
        return self.kept_state() if self.best is None else self.best.weights

    def _train(self, order: Sequence[SampleKey], purpose: str, end: float) -> EpochMetrics:
        if not order:
            raise DataError("No cached sample to train on: check holdout and that devices sent samples.")
        begin = time.perf_counter()
        tally = Tally()
        start, rate = self.progress, 0.0
        if not any(self.optimizer.state.values()):  # No step was taken yet.
            self._calibrate(order, tally)
        self.network.train()
        batches = even_batches(order, self.config.batch_size)
        with self._seeded(purpose):
            for index, batch in enumerate(batches):
                states, targets = self._read(batch, tally)
                self.progress = start + (end - start) * (index + 1) / len(batches)
                rate = learning_rate_at(self.config, self.progress / self.config.epochs)
                self._train_on(states, targets, rate, tally)
        return tally.epoch_metrics(self.epoch, len(order), rate, time.perf_counter() - begin)

    def _calibrate(self, order: Sequence[SampleKey], tally: Tally) -> None:
        """Start the norms from the first samples."""
        apart = Tally()
        states, _ = self._read(order[:CALIBRATION_SAMPLES], apart)
        tally.read_seconds += apart.read_seconds
        self.network.calibrate(states)

    def _train_on(self, states: Tensor, targets: Tensor, rate: float, tally: Tally) -> None:
        """Take a step without the tokens that would spoil it; a batch may be empty."""
        good = self.network.usable(states)
        taken = self._step_on(good, states, targets, rate, tally)
        if not taken and bool(good.any()):
            finite = good & self._score(states, targets)[0].isfinite().to(self.device)
            if not torch.equal(finite, good):
                good, taken = finite, self._step_on(finite, states, targets, rate, tally)
        tally.skipped_tokens += len(good) - int(good.sum())
        tally.skipped += not taken

    def _step_on(self, good: Tensor, states: Tensor, targets: Tensor, rate: float, tally: Tally) -> bool:
        if bool(good.all()):
            return len(good) > 0 and self._step(states, targets, rate, tally)
        return bool(good.any()) and self._step(states[good], targets[good], rate, tally)

    @torch.no_grad()
    def _score(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each token (NaN where its state is of no use) and whether its answer is right: [tokens], CPU."""
        losses, right = self._objective.score(self._forward(states), targets)
        return losses.where(self.network.usable(states).cpu(), math.nan), right

    def _step(self, states: Tensor, targets: Tensor, rate: float, tally: Tally) -> bool:
        """Take a step and return true; or leave everything as it is, where loss or gradient is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, correct = self._objective.backward(self._forward, states, targets)
        norm = clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            return False
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._update_average()
        tally.steps += 1
        tally.add(loss, correct, len(targets))
        return True

    def _forward(self, states: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            outputs: Tensor = self.network(states)
        return outputs.float()

    def _read(self, keys: Sequence[SampleKey], tally: Tally) -> tuple[Tensor, Tensor]:
        begin = time.perf_counter()
        states, targets, tokens = self.reader.read(keys)
        tally.read_seconds += time.perf_counter() - begin
        tally.samples += len(tokens)
        tally.tokens += len(targets)
        check_batch(states, targets, self.network.config.num_labels)
        return states.detach().to(self.device), targets.to(self.device, torch.int64)

    def _update_average(self) -> None:
        if not self.config.average:
            return
        state = {name: tensor.detach() for name, tensor in self.network.state_dict().items()}
        if not self.averaged:
            self.averaged = {name: tensor.clone() for name, tensor in state.items()}
        for name, tensor in state.items():
            self.averaged[name].lerp_(tensor, 1 - self.config.average)

    @contextmanager
    def _using(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other weights (none: the trained ones) for a while, then put the trained ones back."""
        if not weights:
            yield
            return
        trained = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.network.load_state_dict(weights)
        try:
            yield
        finally:
            self.network.load_state_dict(trained)

    @contextmanager
    def _seeded(self, purpose: str) -> Iterator[None]:
        """Seed dropout and mixing for one pass; the caller's random state stays as it was."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self.config.seed, self.epoch, purpose))
            yield
