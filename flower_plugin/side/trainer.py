"""Trains a side network from cached activations, on a CPU or one GPU, the same way each time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_plugin.errors import ConfigError, DataError

from .network import SideNetwork
from .recipe import (
    SampleKey,
    TrainConfig,
    derive_seed,
    epoch_order,
    even_batches,
    learning_rate_at,
)

Head = Callable[[Tensor], Tensor]


class ActivationReader(Protocol):
    """Source of cached activations."""

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        """Return states float32 [tokens, taps, width], targets int64 [tokens] and tokens per sample [samples]."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over loss tokens, and where the time went (seconds)."""

    loss: float
    accuracy: float
    samples: int
    tokens: int
    seconds: float
    read_seconds: float


@dataclass(frozen=True)
class EpochMetrics:
    """What one pass over some cached samples did; times in seconds."""

    epoch: int
    loss: float
    accuracy: float
    samples: int
    tokens: int
    steps: int
    skipped_steps: int
    learning_rate: float
    seconds: float
    read_seconds: float


@dataclass(frozen=True)
class Snapshot:
    """Weights worth keeping, the epochs trained until then, and the held-out figures that chose them."""

    epoch: int
    loss: float
    accuracy: float
    weights: dict[str, Tensor]


@dataclass
class _Tally:
    """Sums over the steps of one pass."""

    loss: float = 0.0
    correct: int = 0
    counted: int = 0
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    skipped: int = 0
    read_seconds: float = 0.0

    @property
    def mean_loss(self) -> float:
        return self.loss / self.counted if self.counted else float("nan")

    @property
    def accuracy(self) -> float:
        return self.correct / self.counted if self.counted else float("nan")


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
        Causal LM only: the backbone's frozen head, hidden [n, width] -> logits [n, vocabulary]. It must map each row
        by itself, since rows are given to it in chunks.
    device : str or torch.device
        Where to train. On a GPU the forward pass runs under bf16 autocast; weights stay float32.

    Notes
    -----
    All randomness derives from (seed, epoch), so a run resumed at an epoch's start equals one never stopped, bit for
    bit on one machine. A step whose loss or gradient is not finite is skipped and counted.
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
        self.head = head
        self.optimizer = new_optimizer(network, config)
        self.averaged: dict[str, Tensor] = {}
        self.best: Snapshot | None = None
        self.history: list[dict[str, float]] = []
        self.epoch = 0
        self.shifts = 0
        self.progress = 0.0

    def train_epoch(self, keys_by_tenant: Mapping[str, Sequence[SampleKey]]) -> EpochMetrics:
        """Train once on each sample, tenants interleaved by their share, then move on to the next epoch.

        Raises
        ------
        DataError
            If there is no sample, or a target does not fit the network.
        """
        order = epoch_order(keys_by_tenant, self.config.seed, self.epoch)
        metrics = self._train(order, ("epoch",), self.epoch, self.epoch + 1)
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
        start = self.progress
        end = min(self.epoch + 1.0, start + len(keys) / max(expected, len(keys), 1))
        metrics = self._train(order, ("arrivals", self.shifts), start, end)
        self.shifts += 1
        return metrics

    def finish_epoch(self) -> None:
        """Move on to the next epoch: its order, random numbers and place on the schedule."""
        self.epoch += 1
        self.shifts = 0
        self.progress = float(self.epoch)

    @torch.no_grad()
    def evaluate(self, keys: Sequence[SampleKey]) -> Evaluation:
        """Return loss and accuracy of the kept weights (the moving average if there is one) over `keys`."""
        begin = time.perf_counter()
        tally = _Tally()
        self.network.eval()
        with self._kept_weights():
            for batch in even_batches(keys, self.config.batch_size):
                states, targets = self._read(batch, tally)
                loss, correct = self._score(self._forward(states), targets)
                tally.loss += loss
                tally.correct += correct
                tally.counted += len(targets)
        return Evaluation(
            tally.mean_loss, tally.accuracy, tally.samples, tally.tokens,
            time.perf_counter() - begin, tally.read_seconds,
        )  # fmt: skip

    def keep_if_best(self, held_out: Evaluation) -> bool:
        """Keep the weights as the best snapshot if their held-out loss is the lowest so far."""
        if self.best is not None and not held_out.loss < self.best.loss:
            return False
        self.best = Snapshot(self.epoch, held_out.loss, held_out.accuracy, self.kept_state())
        return True

    @property
    def exhausted(self) -> bool:
        """Whether the best held-out loss is more than `patience` epochs old."""
        if self.config.patience is None or self.best is None:
            return False
        return self.epoch - self.best.epoch >= self.config.patience

    def kept_state(self) -> dict[str, Tensor]:
        """Return a copy of the weights to keep, on the CPU: the moving average if there is one, else the last."""
        source = self.averaged or self.network.state_dict()
        return {name: tensor.detach().cpu().clone() for name, tensor in source.items()}

    def best_state(self) -> dict[str, Tensor]:
        """Return the weights of the best snapshot, or those to keep now if nothing was held out."""
        return self.kept_state() if self.best is None else self.best.weights

    def _train(
        self, order: Sequence[SampleKey], purpose: tuple[str | int, ...], start: float, end: float
    ) -> EpochMetrics:
        if not order:
            raise DataError(
                "There is no cached sample to train on: check holdout and that devices sent samples."
            )
        begin = time.perf_counter()
        tally = _Tally()
        self.network.train()
        batches = even_batches(order, self.config.batch_size)
        rate = 0.0
        with self._seeded(*purpose):
            for index, batch in enumerate(batches):
                states, targets = self._read(batch, tally)
                self.progress = start + (end - start) * (index + 1) / len(batches)
                rate = learning_rate_at(self.config, self.progress / self.config.epochs)
                self._step(states, targets, rate, tally)
        return EpochMetrics(
            self.epoch, tally.mean_loss, tally.accuracy, tally.samples, tally.tokens, tally.steps, tally.skipped,
            rate, time.perf_counter() - begin, tally.read_seconds,
        )  # fmt: skip

    def _step(self, states: Tensor, targets: Tensor, rate: float, tally: _Tally) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self._forward(states)
        loss, correct = self._backward(outputs, targets)
        parameters = list(self.network.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        if not (torch.isfinite(norm).item() and torch.isfinite(torch.tensor(loss)).item()):
            tally.skipped += 1
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._update_average()
        tally.steps += 1
        tally.loss += loss * len(targets)
        tally.correct += correct
        tally.counted += len(targets)

    def _forward(self, states: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            outputs: Tensor = self.network(states)
        return outputs.float()

    def _backward(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """Backpropagate the mean loss; return it with the number of right answers.

        The head's logits exist for `head_chunk` tokens at a time: its gradient on the hidden state is gathered chunk
        by chunk, then goes through the side network in one pass, which is exact since the loss is a sum over tokens.
        """
        if self.head is None:
            loss = cross_entropy(outputs, targets, label_smoothing=self.config.label_smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item(), int((outputs.argmax(-1) == targets).sum())
        hidden = outputs.detach().requires_grad_()
        gradient = torch.empty_like(hidden)
        total, correct = 0.0, 0
        for low in range(0, len(targets), self.config.head_chunk):
            rows = slice(low, low + self.config.head_chunk)
            part = hidden[rows]
            logits = self.head(part).float()
            loss = cross_entropy(logits, targets[rows], reduction="sum") / len(targets)
            (gradient[rows],) = torch.autograd.grad(loss, part)
            total += loss.item()
            correct += int((logits.argmax(-1) == targets[rows]).sum())
        outputs.backward(gradient)
        return total, correct

    def _score(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """Return the summed loss and the number of right answers of one batch."""
        total, correct = 0.0, 0
        for low in range(0, len(targets), self.config.head_chunk):
            rows = slice(low, low + self.config.head_chunk)
            logits = outputs[rows] if self.head is None else self.head(outputs[rows]).float()
            total += cross_entropy(logits, targets[rows], reduction="sum").item()
            correct += int((logits.argmax(-1) == targets[rows]).sum())
        return total, correct

    def _read(self, keys: Sequence[SampleKey], tally: _Tally) -> tuple[Tensor, Tensor]:
        begin = time.perf_counter()
        states, targets, _ = self.reader.read(keys)
        tally.read_seconds += time.perf_counter() - begin
        tally.samples += len(keys)
        tally.tokens += len(targets)
        labels = self.network.config.num_labels
        if len(states) != len(targets) or not len(targets):
            raise DataError(f"Cached batch has {len(states)} states but {len(targets)} targets.")
        if int(targets.min()) < 0 or (labels is not None and int(targets.max()) >= labels):
            raise DataError(
                f"A cached target is outside 0..{'' if labels is None else labels - 1}: "
                f"found {int(targets.min())}..{int(targets.max())}; check num_labels and label names."
            )
        return states.to(self.device), targets.to(self.device, torch.int64)

    def _update_average(self) -> None:
        if not self.config.average:
            return
        state = self.network.state_dict()
        if not self.averaged:
            self.averaged = {name: tensor.detach().clone() for name, tensor in state.items()}
            return
        for name, tensor in state.items():
            self.averaged[name].lerp_(tensor, 1 - self.config.average)

    @contextmanager
    def _kept_weights(self) -> Iterator[None]:
        """Evaluate with the averaged weights, then put the trained ones back."""
        if not self.averaged:
            yield
            return
        trained = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.network.load_state_dict(self.averaged)
        try:
            yield
        finally:
            self.network.load_state_dict(trained)

    @contextmanager
    def _seeded(self, *purpose: str | int) -> Iterator[None]:
        """Seed dropout for one pass and leave the caller's random state as it was."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self.config.seed, self.epoch, *purpose))
            yield


def new_optimizer(network: SideNetwork, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def group_by_tenant(keys: Sequence[SampleKey]) -> dict[str, list[SampleKey]]:
    """Group keys by tenant, in their order."""
    grouped: dict[str, list[SampleKey]] = {}
    for key in keys:
        grouped.setdefault(key.tenant, []).append(key)
    return grouped
