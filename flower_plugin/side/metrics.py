"""What training and evaluation report, and the weights that they keep."""

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy over loss tokens, where the time went (seconds), and each token's loss [tokens].

    `skipped_tokens` of the `tokens` had no finite loss: they are not in the means. `subject` names the samples,
    in their order: only losses of one subject can be compared token by token.
    """

    loss: float
    accuracy: float
    samples: int
    tokens: int
    seconds: float
    read_seconds: float
    losses: Tensor | None = field(default=None, repr=False, compare=False)
    skipped_tokens: int = 0
    subject: str = ""

    @property
    def counted(self) -> int:
        """Tokens that the means are of."""
        return self.tokens - self.skipped_tokens


@dataclass(frozen=True)
class EpochMetrics:
    """What one pass over some cached samples did; times in seconds.

    `samples` were read, `lost_samples` asked for in vain. `tokens` were trained on; `skipped_tokens` had no
    finite loss, and their steps went without them. `skipped_steps` were not taken at all.
    """

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
    skipped_tokens: int = 0
    lost_samples: int = 0


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

        The difference is taken token by token, over those with finite losses; where the held-out samples are
        not the same, means decide.
        """
        mine, theirs = self.lowest.losses, other.losses
        if mine is None or theirs is None or mine.shape != theirs.shape or self.lowest.subject != other.subject:
            return other.loss >= self.lowest.loss
        difference = theirs - mine
        difference = difference[difference.isfinite()]
        if len(difference) < 2:
            return other.loss >= self.lowest.loss
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
    skipped_tokens: int = 0
    read_seconds: float = 0.0

    def add(self, mean_loss: float, correct: int, tokens: int) -> None:
        """Count one batch."""
        self.loss += mean_loss * tokens
        self.correct += correct
        self.counted += tokens

    def add_tokens(self, losses: Tensor, right: Tensor) -> None:
        """Count a batch token by token, [tokens] each; those without a finite loss are only numbered."""
        finite = losses.isfinite()
        counted = int(finite.sum())
        self.skipped_tokens += len(losses) - counted
        if counted:
            self.add(losses[finite].mean().item(), int(right[finite].sum()), counted)

    def evaluation(self, losses: Tensor, subject: str, seconds: float) -> Evaluation:
        """The sums as an evaluation; of each token's loss [tokens], and of the samples named so."""
        return Evaluation(
            loss=self.mean_loss,
            accuracy=self.accuracy,
            samples=self.samples,
            tokens=self.tokens,
            seconds=seconds,
            read_seconds=self.read_seconds,
            losses=losses,
            skipped_tokens=self.skipped_tokens,
            subject=subject,
        )

    def epoch_metrics(self, epoch: int, asked: int, learning_rate: float, seconds: float) -> EpochMetrics:
        """The sums as metrics of an epoch that asked for so many samples."""
        return EpochMetrics(
            epoch=epoch,
            loss=self.mean_loss,
            accuracy=self.accuracy,
            samples=self.samples,
            tokens=self.counted,
            steps=self.steps,
            skipped_steps=self.skipped,
            learning_rate=learning_rate,
            seconds=seconds,
            read_seconds=self.read_seconds,
            skipped_tokens=self.skipped_tokens,
            lost_samples=asked - self.samples,
        )

    @property
    def mean_loss(self) -> float:
        """Mean over the counted tokens; NaN if there is none."""
        return self.loss / self.counted if self.counted else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of right answers among the counted tokens; NaN if there is none."""
        return self.correct / self.counted if self.counted else float("nan")
