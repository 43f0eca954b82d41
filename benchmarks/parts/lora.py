"""Federated LoRA, what a Flower user would do today: PEFT adapters on each phone, averaged by FedAvg.

PEFT LoRA (Hu et al. 2021) of rank 8 and alpha 16 on the query and value projections; for classification also
a new head on the masked mean of the last hidden state. One local epoch a round.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flower_plugin.server_app.local_grid import LocalGrid
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flower_plugin.backbone import Backbone, load_backbone
from flower_plugin.side.collect import pad_id
from flower_plugin.side.examples import Collated, Example, collate

from .settings import Federation, PhoneExamples

TARGETS = (["query", "value"], ["q_proj", "v_proj"])


@dataclass(frozen=True)
class LoraRecipe:
    """How LoRA is trained; the learning rate decays linearly over the rounds."""

    learning_rate: float = 2e-3
    head_rate: float = 5e-3
    weight_decay: float = 0.01
    dropout: float = 0.1
    batch_size: int = 16
    rounds: int = 5
    rank: int = 8
    alpha: int = 16


@dataclass
class LoraOutcome:
    """What a run gave. Entry 0 of the lists is the state before training, entry i the one after round i."""

    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    device_seconds: float = 0.0
    device_cpu_seconds: float = 0.0
    bytes_sent: int = 0
    messages: int = 0


class LoraModel(nn.Module):
    """A backbone with LoRA adapters, and a new head for ``num_labels`` classes (0: a causal LM)."""

    def __init__(self, backbone: Backbone, recipe: LoraRecipe, num_labels: int) -> None:
        super().__init__()
        leaves = {name.rsplit(".", 1)[-1] for name, _ in backbone.model.named_modules()}
        targets = next(names for names in TARGETS if leaves.issuperset(names))
        config = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=recipe.dropout, target_modules=targets)
        self.body: Any = get_peft_model(backbone.model, config)
        self.classifier = nn.Linear(backbone.hidden_size, num_labels) if num_labels else None
        self.pad_id = pad_id(backbone)

    def forward(self, batch: Collated) -> Tensor:
        """Logits [targets, classes or vocabulary] of a batch."""
        if self.classifier is None:
            logits: Tensor = self.body(**batch.inputs, use_cache=False).logits
            return logits[batch.rows, batch.columns]
        hidden = self.body(**batch.inputs).last_hidden_state
        mask = batch.inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        out: Tensor = self.classifier(mean)
        return out

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that travel: adapters and head."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def arrays(self) -> ArrayRecord:
        """The travelling parameters as Flower arrays."""
        return ArrayRecord({name: p.detach().clone() for name, p in self.trained().items()})

    @torch.no_grad()
    def set_arrays(self, arrays: ArrayRecord) -> None:
        """Load what `arrays` made."""
        values = arrays.to_torch_state_dict()
        for name, parameter in self.trained().items():
            parameter.copy_(values[name])


def new_optimizer(model: LoraModel, recipe: LoraRecipe, factor: float = 1.0) -> torch.optim.AdamW:
    """AdamW with one rate for the adapters and one for the head."""
    head = [p for name, p in model.trained().items() if name.startswith("classifier")]
    adapters = [p for name, p in model.trained().items() if not name.startswith("classifier")]
    groups = [{"params": adapters, "lr": recipe.learning_rate * factor}]
    if head:
        groups.append({"params": head, "lr": recipe.head_rate * factor})
    return torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)


def train_step(model: LoraModel, optimizer: torch.optim.Optimizer, batch: Collated) -> float:
    """One step on one batch; return its loss."""
    optimizer.zero_grad(set_to_none=True)
    loss = cross_entropy(model(batch), batch.targets)
    loss.backward()
    nn.utils.clip_grad_norm_(list(model.trained().values()), 1.0)
    optimizer.step()
    return float(loss.detach())


def shuffled_batches(examples: Sequence[Example], size: int, seed: int) -> list[list[Example]]:
    """Random batches of like length (sorted in groups of eight batches), which spares LoRA most padding."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(examples))
    batches: list[list[Example]] = []
    for low in range(0, len(order), size * 8):
        group = sorted(order[low : low + size * 8], key=lambda i: len(examples[i].input_ids))
        batches += [[examples[i] for i in group[at : at + size]] for at in range(0, len(group), size)]
    return [batches[i] for i in random.permutation(len(batches))]


@torch.inference_mode()
def evaluate(model: LoraModel, examples: Sequence[Example]) -> dict[str, float]:
    """Mean loss and accuracy over all targets."""
    model.eval()
    ordered = sorted(examples, key=lambda example: len(example.input_ids))
    loss, right, count = 0.0, 0, 0
    for low in range(0, len(ordered), 32):
        batch = collate(ordered[low : low + 32], model.pad_id)
        logits = model(batch).float()
        loss += float(cross_entropy(logits, batch.targets, reduction="sum"))
        right += int((logits.argmax(-1) == batch.targets).sum())
        count += len(batch.targets)
    return {"loss": loss / count, "accuracy": right / count, "num-examples": float(count)}


def lora_app(model: LoraModel, phones: Mapping[int, PhoneExamples], recipe: LoraRecipe, seed: int) -> ClientApp:
    """The phones' app. All phones of a process share one model in memory, and each sets its weights first."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        phone = int(context.node_config["partition-id"])
        current = int(message.content["config"]["server-round"])
        model.set_arrays(message.content["arrays"])
        model.train()
        optimizer = new_optimizer(model, recipe, 1 - (current - 1) / recipe.rounds)
        wall, cpu, losses = time.perf_counter(), time.process_time(), []
        torch.manual_seed(seed * 1000 + current * 10 + phone)
        for examples in shuffled_batches(phones[phone].train, recipe.batch_size, seed * 1000 + current):
            losses.append(train_step(model, optimizer, collate(examples, model.pad_id)))
        metrics = {
            "num-examples": float(len(phones[phone].train)),
            "loss": math.fsum(losses) / len(losses),
            "seconds": time.perf_counter() - wall,
            "cpu-seconds": time.process_time() - cpu,
        }
        return _reply(message, metrics, {"arrays": model.arrays()})

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        model.set_arrays(message.content["arrays"])
        phone = int(context.node_config["partition-id"])
        return _reply(message, evaluate(model, phones[phone].test), {})

    return app


def run_lora(federation: Federation, recipe: LoraRecipe, seed: int) -> LoraOutcome:
    """Train federated LoRA; evaluate on the phones' held-out samples before it and after each round."""
    backbone = load_backbone(federation.config.backbone, federation.config.task)
    phones = {i: federation.examples(i, backbone.tokenizer) for i in range(federation.phones)}
    torch.manual_seed(seed)
    model = LoraModel(backbone, recipe, len(phones[0].labels))
    initial = model.arrays()
    nodes = {i + 1: {"partition-id": i, "num-partitions": federation.phones} for i in phones}
    grid = LocalGrid(lora_app(model, phones, recipe, seed), nodes, {})
    before = _weighted([evaluate(model, phone.test) for phone in phones.values()])
    outcome = LoraOutcome([before["accuracy"]], [before["loss"]])
    strategy = _CountingFedAvg(outcome, min_available_nodes=federation.phones)
    result = strategy.start(grid, initial, recipe.rounds, train_config=ConfigRecord())
    for number in range(1, recipe.rounds + 1):
        metrics = result.evaluate_metrics_clientapp[number]
        outcome.accuracy.append(float(metrics["accuracy"]))
        outcome.loss.append(float(metrics["loss"]))
    outcome.messages = sum(kind == "train" for kind, _ in grid.log)
    return outcome


class _CountingFedAvg(FedAvg):
    """Flower's FedAvg, which also adds up what the phones sent and how long they worked."""

    def __init__(self, outcome: LoraOutcome, **settings: Any) -> None:
        super().__init__(**settings)
        self._outcome = outcome

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a phone failed: {reply.error.reason}")
            arrays, metrics = reply.content["arrays"], reply.content["metrics"]
            self._outcome.bytes_sent += sum(len(array.data) for array in arrays.values())
            self._outcome.device_seconds += float(metrics["seconds"])
            self._outcome.device_cpu_seconds += float(metrics["cpu-seconds"])
        return super().aggregate_train(server_round, replies)


def _reply(message: Message, metrics: Mapping[str, float], records: Mapping[str, ArrayRecord]) -> Message:
    return Message(RecordDict({**records, "metrics": MetricRecord(dict(metrics))}), reply_to=message)


def _weighted(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total = sum(part["num-examples"] for part in parts)
    names = ("loss", "accuracy")
    return {name: sum(part[name] * part["num-examples"] for part in parts) / total for name in names}
