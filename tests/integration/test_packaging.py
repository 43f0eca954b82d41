"""What people install: a wheel with one new name, app bundles, and an app that is one pyproject.toml."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loopback import DEVICES, ENVIRONMENT, ROOT, small_run
from simulation import simulate

FOLDERS = ("flower_plugin", "strategies", "clients", "server_app")
TOOLS = Path(sys.executable).parent
MAX_BUNDLE_BYTES = 1_000_000

PYPROJECT = """
[project]
name = "my-federation"
version = "1.0.0"
description = "A user's own app."
license = "Apache-2.0"
dependencies = ["flower-plugin"]

[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "flower_plugin.server_app:app"
clientapp = "flower_plugin.clients:app"

[tool.flwr.app.config]
backbone = ""
data = ""
"""


def run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Run a program in a folder and return its output; it must succeed."""
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation"], source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder into which the wheel is installed, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "-t", target, wheel], target)
    return target


@pytest.fixture
def app_folder(tmp_path: Path) -> Path:
    """A user's app that is a pyproject.toml and nothing else."""
    folder = tmp_path / "my-federation"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    return folder


def test_a_wheel_installs_exactly_one_name(installed):
    assert [path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")] == ["flower_plugin"]
    assert (installed / "flower_plugin" / "py.typed").exists()


def test_the_wheel_holds_every_source_file(wheel):
    expected = {
        (path if folder == "flower_plugin" else Path("flower_plugin") / path).as_posix()
        for folder in FOLDERS
        for path in (file.relative_to(ROOT) for file in (ROOT / folder).rglob("*.py"))
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_installed_wheel_works_outside_the_checkout(installed, tmp_path):
    code = """
import json, flower_plugin, flower_plugin.strategies, flower_plugin.clients, flower_plugin.server_app
from flower_plugin.references import load_object
parts = [flower_plugin, flower_plugin.strategies, flower_plugin.clients, flower_plugin.server_app]
found = load_object("strategies:EcoMobiLLM", "strategy")
print(json.dumps([part.__file__ for part in parts] + [found.__module__, flower_plugin.load_side_tuned.__name__]))
"""
    *files, module, function = json.loads(run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed)))
    assert all(Path(file).is_relative_to(installed) for file in files)
    assert module == "flower_plugin.strategies.eco_mobillm"
    assert function == "load_side_tuned"


def test_the_app_bundle_is_small_and_holds_the_four_folders(tmp_path):
    run([TOOLS / "flwr", "build", "--app", ROOT], tmp_path, FLWR_HOME=str(tmp_path / "flower"))
    (bundle,) = tmp_path.glob("*.fab")
    assert bundle.stat().st_size < MAX_BUNDLE_BYTES
    names = [name for name in zipfile.ZipFile(bundle).namelist() if name.endswith(".py")]
    assert {name.split("/")[0] for name in names} == set(FOLDERS)
    sources = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert set(names) == sources


def test_an_app_of_one_pyproject_is_bundled(app_folder, tmp_path, installed):
    variables = {"FLWR_HOME": str(tmp_path / "flower"), "PYTHONPATH": str(installed)}
    run([TOOLS / "flwr", "build", "--app", app_folder], tmp_path, **variables)
    (bundle,) = tmp_path.glob("*.fab")
    assert "pyproject.toml" in zipfile.ZipFile(bundle).namelist()


def test_an_app_of_one_pyproject_runs_in_the_simulation(
    app_folder, tmp_path, installed, tiny_bert, write_reviews, monkeypatch
):
    data = write_reviews("reviews.jsonl", range(24))
    settings = small_run(tmp_path, tiny_bert, data=f'"{data}"', partition='"iid"', num_rounds="3")
    # `--run-config` changes only keys that stand in the file, so the app's own table has them all.
    table = "".join(f"{key} = {value}\n" for key, value in settings.items())
    text = PYPROJECT.replace('backbone = ""\ndata = ""\n', table)
    (app_folder / "pyproject.toml").write_text(text, encoding="utf-8")
    for key, value in {**ENVIRONMENT, "PYTHONPATH": str(installed)}.items():
        monkeypatch.setenv(key, value)
    output = simulate(app_folder, tmp_path / "flower", DEVICES)
    (path,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["devices"], summary["samples"], summary["epochs"]) == (DEVICES, 36, 3), output
    assert summary["stage_two_device_messages"] == 0
    assert (path.parent / "side_networks" / "global" / "side_config.json").exists()
