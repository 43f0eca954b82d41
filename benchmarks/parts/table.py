"""The figures, their targets, and the table at the end."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

_RELATIONS = {">=": operator.ge, "<=": operator.le, "=": operator.eq}


@dataclass(frozen=True)
class Target:
    """What a figure must be."""

    relation: Literal[">=", "<=", "="]
    bound: float

    def met(self, value: float) -> bool:
        """Whether a value is as it must be; NaN never is."""
        return bool(_RELATIONS[self.relation](value, self.bound))


TARGETS: Mapping[str, Target] = {
    "accuracy_side_over_lora": Target(">=", 0.97),
    "accuracy_side_over_linear": Target(">=", 1.03),
    "accuracy_bbc": Target(">=", 0.95),
    "accuracy_int8_over_fp32": Target(">=", 0.99),
    "bytes_one_token_times_mean_length": Target("<=", 1.05),
    "bytes_int8_over_fp16": Target("<=", 0.53),
    "bytes_nf4_over_fp16": Target("<=", 0.30),
    "stage_two_device_messages": Target("=", 0),
    "device_seconds_side_over_lora": Target("<=", 0.15),
    "tap_overhead": Target("<=", 1.08),
    "device_rss_side_over_lora": Target("<=", 0.35),
    "cached_epoch_over_device_epoch": Target("<=", 0.05),
    "cache_read_share": Target("<=", 0.2),
    "loss_drop_side_over_lora": Target(">=", 1.0),
}


def missed(figures: Mapping[str, float]) -> list[str]:
    """The measured keys whose target is not met."""
    return [key for key, target in TARGETS.items() if key in figures and not target.met(figures[key])]


def print_table(figures: Mapping[str, float], console: Console) -> None:
    """Print each key with its value and target, then the raw numbers behind them."""
    table = Table("key", "value", "must be", "ok", title="Eco-MobiLLM, federated LoRA, linear head")
    for key, target in TARGETS.items():
        if key in figures:
            ok = "[green]yes[/]" if target.met(figures[key]) else "[red]no[/]"
            table.add_row(key, f"{figures[key]:.4g}", f"{target.relation} {target.bound:g}", ok)
    console.print(table)
    raw = Table("measured", "value")
    for key, value in figures.items():
        if key not in TARGETS:
            raw.add_row(key, f"{value:.6g}" if isinstance(value, int | float) else str(value))
    console.print(raw)
