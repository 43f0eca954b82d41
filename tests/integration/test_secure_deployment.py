"""TLS, authenticated devices and a database, with the scripts of docs/deployment.md."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loopback import (
    CONNECTION,
    DEVICES,
    ENVIRONMENT,
    LOOPBACK,
    ROOT,
    FlowerProcesses,
    Loopback,
    Wiring,
    small_run,
)


def certificate_script() -> str:
    """``make_certificates.sh`` as it stands in the document."""
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(#!/bin/sh\n.*?)```", text, flags=re.DOTALL)
    return script


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="needs openssl and ssh-keygen")
def test_the_documented_certificates_and_keys_work(tmp_path, tiny_bert, write_reviews, monkeypatch):
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    subprocess.run(
        ["sh", "-c", certificate_script(), "make_certificates.sh", "localhost", LOOPBACK],
        cwd=tmp_path, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    trust = tmp_path / "ca.crt"
    wiring = Wiring(
        superlink=(
            *("--ssl-ca-certfile", str(trust), "--ssl-certfile", str(tmp_path / "server.crt")),
            *("--ssl-keyfile", str(tmp_path / "server.key")),
            *("--enable-supernode-auth", "--database", str(tmp_path / "state.db")),
        ),
        connection=(f'root-certificates = "{trust}"',),
        device=lambda device: (
            *("--root-certificates", str(trust)),
            *("--auth-supernode-private-key", str(tmp_path / f"key-{device}")),
        ),
    )
    with FlowerProcesses(tmp_path / "flower") as flower:
        federation = Loopback(flower, tmp_path, wiring)
        ids = [register(flower, tmp_path / f"key-{device}") for device in range(DEVICES)]
        for device in range(DEVICES):
            shutil.copy(write_reviews("rows.jsonl", range(8 * device, 8 * device + 8)), federation.data_file(device))
            federation.start_device(device)
        federation.start_run("secure", small_run(tmp_path, tiny_bert, identity='"node"'))
        output = federation.finish_run("secure")
        federation.kill_devices()
    (path,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["devices"], summary["samples"], summary["faults"]) == (DEVICES, 36, 0), output
    ledger = json.loads((path.parent / "ledger.json").read_text())
    assert set(ledger["digests"]) == {f"node-{node}" for node in ids}


def register(flower: FlowerProcesses, key: Path) -> str:
    """Make a device's key pair, register its public half, and return the device's node id."""
    flower.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)], timeout=60)
    command = ["flwr", "supernode", "register", f"{key}.pub", CONNECTION]
    result = flower.run(command, timeout=120)
    found = re.search(r"SuperNode (\d+) registered", result.stdout)
    assert found, result.stdout + result.stderr
    return found.group(1)
