"""The side networks of a run: one for all devices, or one for each, trained from what is cached."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flower_plugin.errors import CacheError, DataError

from .checkpoint import load_checkpoint, newest_epoch, save_epoch
from .network import SideNetwork, SideNetworkConfig, new_side_network
from .packing import pack_network
from .recipe import SampleKey, TrainConfig, derive_seed, split_held_out
from .trainer import ActivationReader, EpochMetrics, Evaluation, Trainer

Scope = Literal["global", "personal"]
GLOBAL = "global"
Samples = Mapping[str, Sequence[SampleKey]]


@dataclass(frozen=True)
class RoundMetrics:
    """One epoch over all side networks; means are over samples or tokens, times in seconds.

    The held-out figures are of the training samples that choose the best epoch; ``None`` where there are none.
    `skipped_tokens` had no finite loss and were left out of their steps; `lost_samples` were gone from the cache.
    """

    loss: float
    accuracy: float
    samples: int
    tokens: int
    skipped_steps: int
    seconds: float
    read_seconds: float
    holdout_loss: float | None
    holdout_accuracy: float | None
    skipped_tokens: int = 0
    lost_samples: int = 0


def has_checkpoint(folder: Path) -> bool:
    """Whether there is an epoch in a folder that `SideTuning.load` can go on from; drafts do not count."""
    return bool(newest_epoch(folder))


class SideTuning:
    """Trains one side network (scope ``global``) or one for each tenant (scope ``personal``).

    Parameters
    ----------
    network_config : SideNetworkConfig
        Shape of each network. All start from the same weights.
    train_config : TrainConfig
        The recipe.
    scope : "global" or "personal"
        Whose samples train a network.
    reader : ActivationReader
        Cached activations.
    head : callable, optional
        The backbone's frozen head (causal LM).
    device : str
        Where to train.
    """

    def __init__(
        self,
        network_config: SideNetworkConfig,
        train_config: TrainConfig,
        scope: Scope,
        reader: ActivationReader,
        head: Callable[[Tensor], Tensor] | None = None,
        device: str = "cpu",
    ) -> None:
        self.network_config = network_config
        self.train_config = train_config
        self.scope = scope
        self._reader = reader
        self._head = head
        self._device = device
        self._trainers: dict[str, Trainer] = {}
        self._partial: list[EpochMetrics] = []
        self._arrived: dict[str, set[bytes]] = {}

    def owner(self, tenant: str) -> str:
        """Name of the network that a tenant's samples train."""
        return GLOBAL if self.scope == "global" else tenant

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of all networks that were trained."""
        return tuple(self._trainers)

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return max((trainer.epoch for trainer in self._trainers.values()), default=0)

    @property
    def best_epoch(self) -> int:
        """The epoch whose weights are kept (the latest of all networks'); 0 before the first."""
        return max((t.best.epoch if t.best else t.epoch for t in self._trainers.values()), default=0)

    @property
    def exhausted(self) -> bool:
        """Whether no network has gained for longer than the patience."""
        return bool(self._trainers) and all(trainer.exhausted for trainer in self._trainers.values())

    def serves(self, tenant: str) -> bool:
        """Whether there is a network for a tenant.

        Always in scope ``global``; else once samples of the tenant trained one, and before the first epoch,
        when all networks are the same.
        """
        return self.scope == "global" or self.epoch == 0 or tenant in self._trainers

    def network(self, owner: str) -> SideNetwork:
        """A network with its best weights so far, apart from the one in training; a new one before training."""
        network = self._new_network()
        if owner in self._trainers:
            network.load_state_dict(self._trainers[owner].best_state())
        return network.eval()

    def packed(self, owner: str) -> NDArray[np.uint8]:
        """The same as one array of bytes, for a message."""
        return pack_network(self.network(owner))

    def arrive(self, samples: Samples, expected: int) -> None:
        """Train on samples that have just come, as a part of the current epoch.

        Parameters
        ----------
        samples : Mapping
            Tenant -> its samples.
        expected : int
            Samples that the whole epoch will have, held-out ones included.
        """
        for owner, theirs in self._by_owner(samples).items():
            train, _ = self._split(theirs)
            keys = [key for tenant in train for key in train[tenant]]
            share = expected if self.scope == "global" else len(keys)
            if keys:
                self._partial.append(self._trainer(owner).train_arrivals(keys, share))
            for tenant, arrived in theirs.items():
                self._arrived.setdefault(tenant, set()).update(key.digest for key in arrived)

    def finish_round(self, samples: Samples) -> RoundMetrics:
        """Train on what has not been trained on in this epoch, evaluate, and keep the best weights.

        Raises
        ------
        DataError
            There were samples to train on, but no step could be taken.
        """
        metrics, evaluations = self._partial, []
        for owner, theirs in self._by_owner(samples).items():
            train, held_out = self._split(theirs)
            if owner not in self._trainers and not any(train.values()):
                continue
            trainer = self._trainer(owner)
            rest = {tenant: self._not_arrived(tenant, keys) for tenant, keys in train.items()}
            if not self._arrived.keys() & theirs.keys():
                if any(train.values()):
                    metrics.append(trainer.train_epoch(train))
            else:
                late = [key for keys in rest.values() for key in keys]
                if late:
                    metrics.append(trainer.train_arrivals(late, len(late)))
                trainer.finish_epoch()
            if held_out:
                evaluations.append(trainer.judge(held_out))
        self._partial, self._arrived = [], {}
        _require_a_step(metrics)
        return _summarise(metrics, evaluations)

    def save(self, folder: Path) -> None:
        """Save every network with all that its training needs to go on: all of them, or none.

        Raises
        ------
        CacheError
            They cannot be written; what was saved before is intact.
        """
        if self._trainers:
            save_epoch(self._trainers, folder, self.epoch)

    def load(self, folder: Path) -> None:
        """Go on from the newest epoch that `save` wrote as a whole.

        Raises
        ------
        CacheError
            There is none, or it is damaged, or of another run.
        """
        found = newest_epoch(folder)
        if not found:
            raise CacheError(f"there is no checkpoint in {folder}; start a new run")
        for owner, path in found.items():
            load_checkpoint(self._trainer(owner), path)

    def _trainer(self, owner: str) -> Trainer:
        if owner not in self._trainers:
            self._trainers[owner] = Trainer(
                self._new_network(), self._reader, self.train_config, head=self._head, device=self._device
            )
        return self._trainers[owner]

    def _new_network(self) -> SideNetwork:
        return new_side_network(self.network_config, derive_seed("network", self.train_config.seed))

    def _by_owner(self, samples: Samples) -> dict[str, dict[str, Sequence[SampleKey]]]:
        owners: dict[str, dict[str, Sequence[SampleKey]]] = {}
        for tenant, keys in samples.items():
            if keys:
                owners.setdefault(self.owner(tenant), {})[tenant] = keys
        return owners

    def _split(self, samples: Samples) -> tuple[dict[str, list[SampleKey]], list[SampleKey]]:
        return split_held_out(samples, self.train_config.holdout, self.train_config.seed)

    def _not_arrived(self, tenant: str, keys: Sequence[SampleKey]) -> list[SampleKey]:
        arrived = self._arrived.get(tenant, set())
        return [key for key in keys if key.digest not in arrived]


def _summarise(metrics: Sequence[EpochMetrics], evaluations: Sequence[Evaluation]) -> RoundMetrics:
    tokens = sum(part.tokens for part in metrics)
    held = sum(part.counted for part in evaluations)

    def mean(values: Sequence[tuple[float, int]], total: int) -> float:
        return sum(value * weight for value, weight in values if weight) / total if total else float("nan")

    return RoundMetrics(
        loss=mean([(part.loss, part.tokens) for part in metrics], tokens),
        accuracy=mean([(part.accuracy, part.tokens) for part in metrics], tokens),
        samples=sum(part.samples for part in metrics),
        tokens=tokens,
        skipped_steps=sum(part.skipped_steps for part in metrics),
        seconds=sum(part.seconds for part in metrics) + sum(part.seconds for part in evaluations),
        read_seconds=sum(part.read_seconds for part in metrics) + sum(part.read_seconds for part in evaluations),
        holdout_loss=mean([(part.loss, part.counted) for part in evaluations], held) if held else None,
        holdout_accuracy=mean([(part.accuracy, part.counted) for part in evaluations], held) if held else None,
        skipped_tokens=sum(part.skipped_tokens for part in metrics),
        lost_samples=sum(part.lost_samples for part in metrics),
    )


def _require_a_step(metrics: Sequence[EpochMetrics]) -> None:
    if metrics and not any(part.steps for part in metrics):
        lost, skipped = sum(part.lost_samples for part in metrics), sum(part.skipped_tokens for part in metrics)
        raise DataError(
            f"no step of epoch {metrics[0].epoch + 1} could be taken: {lost} samples were gone from the cache"
            f" (raise its quota), and {skipped} cached tokens had no finite loss (is the backbone's dtype too"
            " narrow, or the learning rate too high?)"
        )
