"""Pictures of a run, drawn from its summary and events."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

Event = Mapping[str, Any]
DEVICE, SERVER, FAINT = "#d1495b", "#00798c", "#bbbbbb"


def draw_pictures(folder: Path, events: Sequence[Event], summary: Mapping[str, Any]) -> list[Path]:
    """Draw quality by epoch, bytes against sending everything, and device time by epoch.

    Returns
    -------
    list of Path
        The PNG files.
    """
    epochs = [event for event in events if event["event"] == "epoch"]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    return [
        _picture(folder / "quality_by_epoch.png", lambda axes: _quality(axes, epochs, evaluations)),
        _picture(folder / "bytes_per_sample.png", lambda axes: _bytes(axes, summary)),
        _picture(folder / "device_time_by_epoch.png", lambda axes: _device_time(axes, epochs)),
    ]


def _picture(path: Path, draw: Any) -> Path:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    draw(figure.add_subplot())
    figure.savefig(path, dpi=120)
    return path


def _quality(axes: Axes, epochs: Sequence[Event], evaluations: Sequence[Event]) -> None:
    name = "accuracy" if any("accuracy" in event for event in [*epochs, *evaluations]) else "loss"
    inside = [(event["round"], event[f"holdout_{name}"]) for event in epochs if f"holdout_{name}" in event]
    if inside:
        axes.plot(*zip(*inside, strict=True), color=SERVER, label="held-out training samples (server)")
    outside = [(event["round"], event[name]) for event in evaluations if name in event]
    if outside:
        axes.plot(*zip(*outside, strict=True), "o", color=DEVICE, label="held-out samples of the devices")
    axes.set(xlabel="epoch", ylabel=name, title=f"{name.capitalize()} by epoch")
    axes.legend()


def _bytes(axes: Axes, summary: Mapping[str, Any]) -> None:
    labels = ["all tokens, fp16", "loss tokens, fp16", f"loss tokens, {summary['codec']}"]
    values = [
        summary["bytes_per_sample_everything"],
        summary["bytes_per_sample_fp16"],
        summary["bytes_per_sample"],
    ]
    bars = axes.bar(labels, values, color=[FAINT, FAINT, SERVER])
    axes.bar_label(bars, [f"{value:,.0f}" for value in values])
    axes.set(yscale="log", ylabel="bytes a sample", title="What one sample costs on the wire")


def _device_time(axes: Axes, epochs: Sequence[Event]) -> None:
    rounds = [event["round"] for event in epochs]
    axes.bar(rounds, [event["device_seconds"] for event in epochs], color=DEVICE, label="all devices together")
    axes.plot(rounds, [event["seconds"] for event in epochs], color=SERVER, label="server")
    axes.set(xlabel="epoch", ylabel="seconds", title="Who works when")
    axes.legend()
