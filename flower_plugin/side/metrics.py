"""What training and evaluation report, and the weights that they keep."""

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over loss tokens, where the time went (seconds), and each token's loss [tokens]."""

    loss: float
    accuracy: float
    samples: int
    tokens: int
    seconds: float
    read_seconds: float
    losses: Tensor | None = field(default=None, repr=False, compare=False)


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
    """Weights worth keeping, the epochs trained until then, and the held-out figures that chose them.

    `lowest` is the held-out evaluation with the lowest loss of all epochs so far.
    """

    epoch: int
    loss: float
    accuracy: float
    weights: dict[str, Tensor]
    lowest: Evaluation

    def is_better_than(self, other: Evaluation) -> bool:
        """Whether the lowest loss is below another by more than one standard error of their difference.

        The difference is taken token by token; where the held-out samples are not the same, means decide.
        """
        mine, theirs = self.lowest.losses, other.losses
        if mine is None or theirs is None or mine.shape != theirs.shape or len(mine) < 2:
            return other.loss >= self.lowest.loss
        difference = theirs - mine
        error = difference.std().item() / math.sqrt(len(difference))
        return difference.mean().item() > error


@dataclass
class Tally:
    """Sums over the steps of one pass."""

    loss: float = 0.0
    correct: int = 0
    counted: int = 0
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    skipped: int = 0
    read_seconds: float = 0.0

    def add(self, mean_loss: float, correct: int, tokens: int) -> None:
        """Count one batch."""
        self.loss += mean_loss * tokens
        self.correct += correct
        self.counted += tokens

    @property
    def mean_loss(self) -> float:
        """Mean over the counted tokens; NaN if there is none."""
        return self.loss / self.counted if self.counted else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of right answers among the counted tokens; NaN if there is none."""
        return self.correct / self.counted if self.counted else float("nan")
