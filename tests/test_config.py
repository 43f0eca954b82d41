"""The run config: validated before any device works, and documented by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from flower_plugin.config import known_keys, parse_run_config
from flower_plugin.config_table import config_table, with_table
from flower_plugin.errors import ConfigError
from flower_plugin.references import load_object

README = Path(__file__).parents[1] / "README.md"


def test_defaults_need_only_a_backbone():
    assert parse_run_config({"backbone": "x"}).task == "classification"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("task", "translation", "'classification' or 'causal-lm'"),
        ("codec", "int7", "'fp32', 'fp16', 'bf16', 'int8' or 'nf4'"),
        ("taps", "0", "block indices"),
        ("taps", "one", "block indices"),
        ("taps", True, "valid string"),
        ("pooling", "mean+mean", "cls, last, mean, max"),
        ("max-length", 3, "greater than or equal to 4"),
        ("scope", "both", "'global' or 'personal'"),
        ("dropout", 1.0, "less than 1"),
        ("byte-budget-mb", 0, "greater than 0"),
        ("num-rounds", "many", "valid integer"),
        ("backbone", "  ", "empty"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as raised:
        parse_run_config({"backbone": "x", key: value})
    assert allowed in str(raised.value)
    assert key in str(raised.value)


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as raised:
        parse_run_config({"codec": "x", "tasks": "classification"})
    text = str(raised.value)
    assert "'backbone' is missing" in text
    assert "'codec'" in text
    assert "'tasks' is not a key" in text


def test_dotted_keys_belong_to_the_user():
    assert parse_run_config({"backbone": "x", "mine.key": 3}).backbone == "x"


def test_the_readme_table_is_the_model():
    text = README.read_text()
    assert with_table(text) == text, "run `make docs`"


def test_every_key_is_in_the_table():
    assert all(f"| `{key}` |" in config_table() for key in known_keys())


def test_reading_the_config_loads_neither_torch_nor_transformers():
    code = (
        "import sys, flower_plugin, flower_plugin.server_app, flower_plugin.clients;"
        "from flower_plugin.config import parse_run_config; parse_run_config({'backbone': 'x'});"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestReferences:
    def test_a_name_of_the_checkout_is_found_in_the_installed_package(self):
        from flower_plugin.strategies import EcoMobiLLM

        assert load_object("strategies:EcoMobiLLM", "strategy").__name__ == EcoMobiLLM.__name__

    @pytest.mark.parametrize("reference", ["strategies", "strategies:", ":x", "no.such.module:x", "strategies:Nothing"])
    def test_what_cannot_be_found_names_the_key(self, reference):
        with pytest.raises(ConfigError, match="'strategy'"):
            load_object(reference, "strategy")


def test_the_app_lists_every_key_so_that_each_can_be_overridden():
    import tomllib

    values = tomllib.loads((README.parent / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert set(values) == set(known_keys())
    assert parse_run_config(values).task == "classification"
