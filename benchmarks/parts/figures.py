"""The groups of figures: each runs what it needs and returns the keys of the table and the raw numbers."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .linear_head import run_linear
from .lora import LoraRecipe, run_lora
from .memory import peak_above_idle
from .settings import articles, chats, reviews
from .side import SideOutcome, run_side
from .timing import tap_overhead
from .wire import all_tokens, wire_bytes

Figures = dict[str, float]
Say = Callable[[str], None]

# LoRA's best of five rounds on the test samples counts, which favours it; the rates are not tuned further.
REVIEWS_LORA = LoraRecipe()
CHATS_LORA = LoraRecipe(learning_rate=2e-3, batch_size=4, rounds=1, dropout=0.05)


def reviews_figures(folder: Path, seeds: int, say: Say) -> Figures:
    """Rotten Tomatoes: accuracies of all, device seconds, and what a cached epoch costs."""
    figures: Figures = {}
    sides: list[SideOutcome] = []
    for seed in range(seeds):
        side, measured = _one_seed_of_reviews(folder / f"reviews-{seed}", seed, say)
        sides.append(side)
        figures |= {f"reviews_{name}_seed_{seed}": value for name, value in measured.items()}
    names = ("side_accuracy", "side_fp32_accuracy", "linear_accuracy", "lora_accuracy")
    seconds = ("side_device_seconds", "lora_device_seconds")
    means = {
        name: statistics.mean(figures[f"reviews_{name}_seed_{seed}"] for seed in range(seeds))
        for name in (*names, *seconds)
    }
    return {
        "accuracy_side_over_lora": means["side_accuracy"] / means["lora_accuracy"],
        "accuracy_side_over_linear": means["side_accuracy"] / means["linear_accuracy"],
        "accuracy_int8_over_fp32": means["side_accuracy"] / means["side_fp32_accuracy"],
        "device_seconds_side_over_lora": means["side_device_seconds"] / means["lora_device_seconds"],
        "stage_two_device_messages": sum(side.late_messages for side in sides),
        **_cached_epochs(sides),
        **{f"reviews_{name}": value for name, value in means.items()},
        **figures,
    }


def _one_seed_of_reviews(folder: Path, seed: int, say: Say) -> tuple[SideOutcome, Figures]:
    side = run_side(reviews(seed), folder)
    exact = run_side(reviews(seed, codec="fp32"), folder)
    say(f"reviews, seed {seed}: side network {side.report['accuracy_after']:.3f}")
    linear = run_linear(reviews(seed), seed)
    say(f"reviews, seed {seed}: linear head {linear.accuracy:.3f}")
    lora = run_lora(reviews(seed), REVIEWS_LORA, seed)
    best = max(lora.accuracy[1:])
    say(f"reviews, seed {seed}: LoRA {best:.3f} at its best epoch")
    return side, {
        "side_accuracy": side.report["accuracy_after"],
        "side_fp32_accuracy": exact.report["accuracy_after"],
        "side_best_epoch": side.report["best_epoch"],
        "side_device_seconds": side.report["device_seconds"],
        "side_bytes": side.wire_bytes,
        "linear_accuracy": linear.accuracy,
        "linear_l2": linear.strength,
        "lora_accuracy": best,
        "lora_best_epoch": lora.accuracy.index(best, 1),
        "lora_device_seconds": lora.device_seconds,
        "lora_bytes": lora.bytes_sent,
    }


def bbc_figures(folder: Path, seeds: int, say: Say) -> Figures:
    """BBC News: accuracy before and after."""
    figures: Figures = {}
    for seed in range(seeds):
        side = run_side(articles(seed), folder / f"bbc-{seed}")
        say(f"BBC News, seed {seed}: {side.report['accuracy_after']:.3f}")
        figures[f"bbc_accuracy_seed_{seed}"] = side.report["accuracy_after"]
        figures[f"bbc_bytes_per_sample_seed_{seed}"] = side.report["bytes_per_sample"]
    mean = statistics.mean(figures[f"bbc_accuracy_seed_{seed}"] for seed in range(seeds))
    return {"accuracy_bbc": mean, **figures}


def bytes_figures(folder: Path, seeds: int, say: Say) -> Figures:
    """Bytes by codec and by which tokens travel."""
    sizes = {codec: wire_bytes(folder, codec) for codec in ("fp16", "int8", "nf4")}
    one = wire_bytes(folder, "int8", pooling="mean")
    every = all_tokens("int8")
    say(f"bytes of 400 reviews: {sizes}")
    return {
        "bytes_int8_over_fp16": sizes["int8"] / sizes["fp16"],
        "bytes_nf4_over_fp16": sizes["nf4"] / sizes["fp16"],
        "bytes_one_token_times_mean_length": one / every.size * every.mean_length,
        "bytes_mean_length": every.mean_length,
        "bytes_one_token": one,
        "bytes_all_tokens": every.size,
        "bytes_default_pooling_times_mean_length": sizes["int8"] / every.size * every.mean_length,
        **{f"bytes_{codec}": size for codec, size in sizes.items()},
    }


def tap_figures(folder: Path, seeds: int, say: Say) -> Figures:
    """What taps, codec and packing add to a forward pass, on snippets and on articles."""
    reviewed, bbc = tap_overhead(reviews(0)), tap_overhead(articles(0), samples=64)
    say(f"stage one over a plain forward pass: {statistics.median(reviewed):.3f} on snippets")
    return {
        "tap_overhead": statistics.median(reviewed),
        "tap_overhead_largest": max(reviewed),
        "tap_overhead_bbc": statistics.median(bbc),
    }


def memory_figures(folder: Path, seeds: int, say: Say) -> Figures:
    """Peak memory above idle, each in fresh processes; the largest of three for side-tuning, LoRA's least."""
    side = max(peak_above_idle("side") for _ in range(3))
    lora = min(peak_above_idle("lora") for _ in range(3))
    say(f"peak above idle: {side / 1e6:.0f} MB, LoRA {lora / 1e6:.0f} MB")
    return {
        "device_rss_side_over_lora": side / lora,
        "device_rss_side_mb": side / 1e6,
        "device_rss_lora_mb": lora / 1e6,
    }


def chat_figures(folder: Path, seeds: int, say: Say) -> Figures:
    """Chitchat with SmolLM2: drop of the held-out loss at equal device forward passes."""
    side = run_side(chats(0), folder / "chats")
    say(f"chats: held-out loss {side.report['loss_before']:.3f} -> {side.report['loss_after']:.3f}")
    lora = run_lora(chats(0), CHATS_LORA, 0)
    say(f"chats: LoRA {lora.loss[0]:.3f} -> {lora.loss[-1]:.3f}")
    drop, lora_drop = side.report["loss_before"] - side.report["loss_after"], lora.loss[0] - lora.loss[-1]
    return {
        "loss_drop_side_over_lora": drop / lora_drop,
        "chat_loss_before": side.report["loss_before"],
        "chat_loss_side": side.report["loss_after"],
        "chat_loss_lora": lora.loss[-1],
        "chat_best_epoch": side.report["best_epoch"],
        "chat_side_device_seconds": side.report["device_seconds"],
        "chat_lora_device_seconds": lora.device_seconds,
        "chat_side_bytes": side.wire_bytes,
        "chat_lora_bytes": lora.bytes_sent,
        "chat_stage_two_device_messages": side.late_messages,
    }


GROUPS: Mapping[str, Callable[[Path, int, Say], Figures]] = {
    "bytes": bytes_figures,
    "tap": tap_figures,
    "memory": memory_figures,
    "bbc": bbc_figures,
    "reviews": reviews_figures,
    "chat": chat_figures,
}


def _cached_epochs(sides: Sequence[SideOutcome]) -> Figures:
    """Seconds of a cached epoch against those of the devices' one pass over the same samples."""
    epochs = [epoch for side in sides for epoch in side.cached_epochs]
    seconds = statistics.median(epoch["seconds"] for epoch in epochs)
    device = statistics.mean(side.report["device_seconds"] for side in sides)
    return {
        "cached_epoch_over_device_epoch": seconds / device,
        "cache_read_share": sum(e["read_seconds"] for e in epochs) / sum(e["seconds"] for e in epochs),
        "cached_epoch_seconds": seconds,
        "device_epoch_seconds": device,
    }
