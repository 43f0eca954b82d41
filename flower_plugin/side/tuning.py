"""The side networks of a run: one for all devices, or one for each, trained from what is cached."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .checkpoint import load_checkpoint, save_checkpoint
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
        """Names of all networks there are."""
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
        """Whether there is a network for a tenant: always in scope ``global``, else once it sent samples."""
        return self.scope == "global" or self.epoch == 0 or tenant in self._trainers

    def network(self, owner: str) -> SideNetwork:
        """A network with its best weights so far, apart from the one in training."""
        network = SideNetwork(self.network_config)
        network.load_state_dict(self._trainer(owner).best_state())
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
        """Train on what has not been trained on in this epoch, evaluate, and keep the best weights."""
        metrics, evaluations = self._partial, []
        for owner, theirs in self._by_owner(samples).items():
            trainer = self._trainer(owner)
            train, held_out = self._split(theirs)
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
                evaluations.append(trainer.evaluate(held_out))
                trainer.keep_if_best(evaluations[-1])
        self._partial, self._arrived = [], {}
        return _summarise(metrics, evaluations)

    def save(self, folder: Path) -> None:
        """Save every network with all that its training needs to go on."""
        for owner, trainer in self._trainers.items():
            save_checkpoint(trainer, folder / owner)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        for path in sorted(folder.iterdir()):
            load_checkpoint(self._trainer(path.name), path)

    def _trainer(self, owner: str) -> Trainer:
        if owner not in self._trainers:
            network = new_side_network(self.network_config, derive_seed("network", self.train_config.seed))
            self._trainers[owner] = Trainer(
                network, self._reader, self.train_config, head=self._head, device=self._device
            )
        return self._trainers[owner]

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
    held = sum(part.tokens for part in evaluations)

    def mean(values: Sequence[tuple[float, int]], total: int) -> float:
        return sum(value * weight for value, weight in values) / total if total else float("nan")

    return RoundMetrics(
        loss=mean([(part.loss, part.tokens) for part in metrics], tokens),
        accuracy=mean([(part.accuracy, part.tokens) for part in metrics], tokens),
        samples=sum(part.samples for part in metrics),
        tokens=tokens,
        skipped_steps=sum(part.skipped_steps for part in metrics),
        seconds=sum(part.seconds for part in metrics) + sum(part.seconds for part in evaluations),
        read_seconds=sum(part.read_seconds for part in metrics) + sum(part.read_seconds for part in evaluations),
        holdout_loss=mean([(part.loss, part.tokens) for part in evaluations], held) if held else None,
        holdout_accuracy=mean([(part.accuracy, part.tokens) for part in evaluations], held) if held else None,
    )
