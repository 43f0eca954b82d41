"""What a side network is trained for: the cross entropy of a classifier, or of the backbone's own head; and how."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_plugin.errors import DataError

from .network import SideNetwork
from .recipe import TrainConfig

Head = Callable[[Tensor], Tensor]


class Objective:
    """Loss of a classifier (`head` None) or of a causal LM through its frozen head.

    Parameters
    ----------
    head : callable or None
        hidden [n, width] -> logits [n, vocabulary], row by row.
    config : TrainConfig
        Mixing, label smoothing and the size of a chunk.
    """

    def __init__(self, head: Head | None, config: TrainConfig) -> None:
        self._head = head
        self._config = config

    def backward(self, network: Callable[[Tensor], Tensor], states: Tensor, targets: Tensor) -> tuple[float, int]:
        """Backpropagate the mean loss of a batch; return it with the number of right answers."""
        if self._head is None:
            return self._backward_classifier(network, states, targets)
        return self._backward_language_model(self._head, network(states), targets)

    @torch.no_grad()
    def score(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and whether its answer is right: both [tokens], on the CPU."""
        losses, right = [], []
        for rows in self._chunks(len(targets)):
            logits = outputs[rows] if self._head is None else self._head(outputs[rows]).float()
            losses.append(cross_entropy(logits, targets[rows], reduction="none").cpu())
            right.append((logits.argmax(-1) == targets[rows]).cpu())
        return torch.cat([torch.empty(0), *losses]), torch.cat([torch.empty(0, dtype=torch.bool), *right])

    def _backward_classifier(
        self, network: Callable[[Tensor], Tensor], states: Tensor, targets: Tensor
    ) -> tuple[float, int]:
        """Mix each row with another one (mixup, Zhang et al. 2018): both targets count, by their share.

        Cached vectors repeat exactly in every epoch and are soon known by heart; mixed ones never repeat.
        """
        share, partner = self._mixing(len(targets))
        partner = partner.to(states.device)
        logits = network(states.lerp(states[partner], 1 - share) if share < 1 else states)
        smoothing = self._config.label_smoothing
        loss = share * cross_entropy(logits, targets, label_smoothing=smoothing)
        if share < 1:
            loss = loss + (1 - share) * cross_entropy(logits, targets[partner], label_smoothing=smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), _right(logits, targets)

    def _backward_language_model(self, head: Head, hidden: Tensor, targets: Tensor) -> tuple[float, int]:
        """Logits exist for `head_chunk` tokens at a time.

        The gradient on the hidden state is gathered chunk by chunk, then goes through the side network in one
        pass: exact, since the loss is a sum over tokens.
        """
        leaf = hidden.detach().requires_grad_()
        gradient = torch.empty_like(leaf)
        total, correct = 0.0, 0
        for rows in self._chunks(len(targets)):
            part = leaf[rows]
            logits = head(part).float()
            loss = cross_entropy(logits, targets[rows], reduction="sum") / len(targets)
            (gradient[rows],) = torch.autograd.grad(loss, part)
            total += loss.item()
            correct += _right(logits, targets[rows])
        hidden.backward(gradient)  # type: ignore[no-untyped-call]
        return total, correct

    def _mixing(self, rows: int) -> tuple[float, Tensor]:
        """Draw the share of each row's own vector, 1/2 or more, and its partner."""
        if not self._config.mixup or rows < 2:
            return 1.0, torch.arange(rows)
        alpha = torch.tensor(self._config.mixup)
        share = torch.distributions.Beta(alpha, alpha).sample().item()
        return max(share, 1 - share), torch.randperm(rows)

    def _chunks(self, rows: int) -> list[slice]:
        size = self._config.head_chunk
        return [slice(low, low + size) for low in range(0, rows, size)]


def _right(logits: Tensor, targets: Tensor) -> int:
    return int((logits.argmax(-1) == targets).sum())


def check_batch(states: Tensor, targets: Tensor, num_labels: int | None) -> None:
    """Refuse a batch that no loss can be computed of.

    Raises
    ------
    DataError
        Not as many targets [tokens] as states [tokens, taps, width], or one that is no class.
    """
    if len(states) != len(targets):
        raise DataError(f"A cached batch has {len(states)} states but {len(targets)} targets.")
    low, high = (int(targets.min()), int(targets.max())) if len(targets) else (0, 0)
    if low < 0 or (num_labels is not None and high >= num_labels):
        raise DataError(
            f"Cached targets {low} to {high} do not fit {num_labels or 'the'} classes: check the label names."
        )


def new_optimizer(network: SideNetwork, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
