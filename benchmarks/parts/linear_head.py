"""A tuned linear head on the frozen backbone: logistic regression on its masked-mean last hidden state."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_plugin.backbone import Backbone, load_backbone
from flower_plugin.side.collect import pad_id
from flower_plugin.side.examples import Example, collate, length_buckets
from flower_plugin.side.tokens import make_gather

from .settings import Federation

STRENGTHS = tuple(10.0**power for power in (-3, -2.5, -2, -1.5, -1, -0.5, 0))


@dataclass(frozen=True)
class LinearOutcome:
    """Accuracy on the held-out samples, and the L2 strength that training samples chose."""

    accuracy: float
    strength: float


def run_linear(federation: Federation, seed: int) -> LinearOutcome:
    """Fit on all phones' training samples; the L2 strength is chosen by 5-fold cross-validation on them."""
    backbone = load_backbone(federation.config.backbone, federation.config.task)
    phones = [federation.examples(i, backbone.tokenizer) for i in range(federation.phones)]
    train, targets = _features(backbone, [e for phone in phones for e in phone.train])
    test, answers = _features(backbone, [e for phone in phones for e in phone.test])
    centre, spread = train.mean(0), train.std(0).clamp(min=1e-6)
    train, test = (train - centre) / spread, (test - centre) / spread
    strength = max(STRENGTHS, key=lambda value: _cross_validated(train, targets, value, seed))
    return LinearOutcome(_accuracy(_fit(train, targets, strength), test, answers), strength)


def _features(backbone: Backbone, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Masked means [samples, width] and class indices [samples]."""
    rows: list[Tensor] = [torch.empty(0)] * len(examples)
    for bucket in length_buckets(examples, 32):
        batch = collate([examples[i] for i in bucket], pad_id(backbone))
        last = (backbone.num_blocks - 1,)
        (pooled,) = backbone.forward_taps(batch.inputs, last, make_gather("mean", batch))
        for index, row in zip(bucket, pooled, strict=True):
            rows[index] = row
    return torch.stack(rows), torch.tensor([int(example.targets[0]) for example in examples])


def _cross_validated(x: Tensor, y: Tensor, strength: float, seed: int, folds: int = 5) -> float:
    fold = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)) % folds
    heads = [_fit(x[fold != k], y[fold != k], strength) for k in range(folds)]
    return sum(_accuracy(head, x[fold == k], y[fold == k]) for k, head in enumerate(heads)) / folds


def _fit(x: Tensor, y: Tensor, strength: float) -> torch.nn.Linear:
    """Minimise the mean cross entropy plus strength * |W|^2 by L-BFGS; x [samples, width], y [samples]."""
    head = torch.nn.Linear(x.shape[1], int(y.max()) + 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(head(x), y) + strength * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return head


@torch.no_grad()
def _accuracy(head: torch.nn.Linear, x: Tensor, y: Tensor) -> float:
    return float((head(x).argmax(1) == y).float().mean())
