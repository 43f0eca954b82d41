"""The main job as people meet it first: the demo, on a few articles."""

import json
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from loopback import ENVIRONMENT, ROOT, RUN_SECONDS
from simulation import processes_of

PHONES = 4


def test_the_demo_runs_on_real_input_and_leaves_nothing_running(tmp_path):
    output = tmp_path / "demo"
    settings = ("train-samples=80", "test-samples=40", "num-rounds=3", "max-length=64")
    command = [sys.executable, ROOT / "demo" / "run.py", "--output", output]
    command += [option for setting in settings for option in ("--set", setting)]
    result = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    log = result.stdout + result.stderr
    assert result.returncode == 0, log
    (path,) = output.glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["devices"], summary["samples"], summary["epochs"]) == (PHONES, 80, 3), log
    assert summary["stage_two_device_messages"] == 0
    assert summary["faults"] == 0
    assert summary["accuracy_after"] > summary["accuracy_before"]
    for picture in ("quality_by_epoch.png", "bytes_per_sample.png", "device_time_by_epoch.png"):
        with Image.open(path.parent / picture) as image:
            assert min(image.size) > 200
    # The table is shown, and the person is told where the results are.
    assert "device messages in stage two" in log
    assert str(path.parent) in log
    assert (path.parent / "side_networks" / "global" / "side_config.json").exists()
    assert processes_of(output / "flower") == []
