"""Peak memory above idle of a device's work; ``python -m parts.memory side|lora`` in a fresh process each.

Idle is a process that has loaded the model, tokenised its texts and read one short text (the first pass of a
process sets up thread pools and kernels, which is no part of the work). The peak is the kernel's own record
of the largest resident set (``VmHWM``), set back before the work starts.
"""

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flower_plugin.backbone import Backbone, load_backbone
from flower_plugin.side.codec import get_codec
from flower_plugin.side.collect import TapRule, collect
from flower_plugin.side.examples import Example, collate, length_buckets
from flower_plugin.side.shipment import pack
from flower_plugin.side.taps import plan_taps

from .lora import LoraModel, LoraRecipe, new_optimizer, train_step
from .settings import Federation, reviews


def peak_above_idle(work: str) -> int:
    """Bytes, measured in a process of its own."""
    command = [sys.executable, "-m", "parts.memory", work]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def _measure(work: str) -> int:
    federation = reviews(0)
    backbone = load_backbone(federation.config.backbone, federation.config.task)
    examples = federation.examples(0, backbone.tokenizer).train
    prepare = {"side": _side, "lora": _lora}[work]
    run = prepare(backbone, examples, federation)
    _read_short_text(backbone)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present resident set
    idle = _status("VmRSS")
    run()
    return _status("VmHWM") - idle


def _side(backbone: Backbone, examples: tuple[Example, ...], federation: Federation) -> Callable[[], None]:
    config = federation.config
    rule = TapRule(plan_taps(config.taps, backbone.num_blocks), config.token_rule, get_codec(config.codec))

    def work() -> None:
        pack(collect(backbone, examples, rule, config.device_batch_size).shipment)

    return work


def _lora(backbone: Backbone, examples: tuple[Example, ...], federation: Federation) -> Callable[[], None]:
    """An epoch over the same batches."""
    model = LoraModel(backbone, LoraRecipe(), 2)
    model.train()
    size = federation.config.device_batch_size

    def work() -> None:
        optimizer = new_optimizer(model, LoraRecipe())
        for bucket in length_buckets(examples, size):
            train_step(model, optimizer, collate([examples[i] for i in bucket], model.pad_id))

    return work


def _read_short_text(backbone: Backbone) -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with torch.inference_mode():
        backbone.body(input_ids=ids, attention_mask=torch.ones_like(ids))


def _status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this measurement needs Linux")


if __name__ == "__main__":
    print(json.dumps({"bytes": _measure(sys.argv[1])}))
