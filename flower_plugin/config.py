"""The run config: one validated model, from which the table in the README is generated."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import ConfigError

HOME_VARIABLE = "FLOWER_PLUGIN_HOME"

POOLINGS = ("cls", "last", "mean", "max")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class RunConfig(BaseModel):
    """Everything a run can be told, checked before any device works.

    Field names are written with dashes in ``pyproject.toml`` and on the command line.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=_kebab, populate_by_name=True, allow_inf_nan=False
    )

    backbone: str = Field(
        description="Hub id, local folder, `*.gguf` file, or `package:NAME/path` inside an installed package"
    )
    server_backbone: str = Field(
        "",
        description="The backbone's place on the server, if it is another one there; `none`: no checkpoint",
    )
    task: Literal["classification", "causal-lm"] = Field("classification", description="What is learned")
    strategy: str = Field("strategies:EcoMobiLLM", description="Object reference of the Flower strategy")
    data: str = Field(
        "flower_plugin.data:bbc_news",
        description="`module:function`, a `.jsonl`, `.csv` or `.parquet` path, or `datasets:NAME`",
    )
    label_names: str = Field("", description="Class names, comma-separated; empty: the union of what the devices have")
    max_length: int = Field(128, ge=4, le=131_072, description="Tokens a sample; longer texts are truncated")
    template: str = Field("", description="Chat template to use instead of the tokenizer's own")

    taps: str = Field(
        "4",
        description="Number of tapped blocks, evenly spaced, or their indices (`1,3,5`; the last is added)",
    )
    pooling: str = Field("mean", description="`cls`, `last`, `mean`, `max`, or several joined by `+`")
    codec: Literal["fp32", "fp16", "bf16", "int8", "nf4"] = Field(
        "int8", description="How activations travel and are cached"
    )
    byte_budget_mb: float = Field(
        64.0,
        gt=0,
        le=2048,
        description="Largest payload of one message, in MB; more is sent in several shifts",
    )
    device_batch_size: int = Field(16, ge=1, description="Samples in one forward pass on a device")

    num_rounds: int = Field(40, ge=1, description="Epochs; the first meets the devices, the others the cache")
    scope: Literal["global", "personal"] = Field(
        "global", description="One side network for all, or one for each device"
    )
    evaluate_every: int = Field(
        0, ge=0, description="Rounds between evaluations on the devices; 0: before and after training only"
    )
    refresh_every: int = Field(0, ge=0, description="Rounds between questions for new samples; 0: never after round 1")

    reduction: int = Field(8, ge=1, le=2**20, description="Side width = backbone width / reduction")
    side_width: int = Field(0, ge=0, le=2**20, description="Width of the side network; 0: from the reduction")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout in the side network's stream")
    input_dropout: float = Field(0.5, ge=0, lt=1, description="Dropout on the normalised taps (classification)")
    mixup: float = Field(3.0, ge=0, description="Mixing of cached samples, Beta(mixup, mixup); 0: none")
    learning_rate: float = Field(
        0.0, ge=0, description="Peak learning rate of AdamW; 0: 2e-4 for classification, 3e-3 for a language model"
    )
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="Learning-rate schedule")
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the steps with a rising learning rate")
    clip_norm: float = Field(1.0, gt=0, description="Largest gradient norm")
    batch_size: int = Field(
        0,
        ge=0,
        description="Samples in one step of training; 0: 64 for classification, 16 for a language model",
    )
    holdout: float = Field(0.1, ge=0, le=0.5, description="Share of training samples that choose the epoch")
    patience: int = Field(0, ge=0, description="Epochs without gain on the holdout before a stop; 0: no stop")
    seed: int = Field(0, ge=0, lt=2**62, description="Seed of everything random on the server")

    min_devices: int = Field(1, ge=1, description="Fewest devices to start, and to go on, with")
    wait_for_devices: float = Field(60.0, ge=0, description="Seconds to wait for `min-devices`")
    query_timeout: float = Field(300.0, gt=0, description="Seconds a device has to describe itself")
    shift_timeout: float = Field(3600.0, gt=0, description="Seconds a device has for one shift")
    evaluate_timeout: float = Field(1800.0, gt=0, description="Seconds a device has for one evaluation")
    identity: Literal["device", "node"] = Field(
        "device", description="Whose samples they are: the id a device keeps, or its (authenticated) node id"
    )

    cache_dir: str = Field("", description="The server's activation cache; empty: `activations` in the plugin's home")
    cache_quota_gb: float = Field(20.0, gt=0, le=1e6, description="Largest size of the cache; the oldest samples go")
    output_dir: str = Field("~/flower-plugin-runs", description="Where the server writes what a run gives")
    resume: bool = Field(False, description="Go on from the checkpoint in `output-dir`")

    partition: Literal["", "none", "iid", "dirichlet", "natural"] = Field(
        "", description="How data is dealt to the devices; empty: a built-in source `iid`, a device's file `none`"
    )
    partition_alpha: float = Field(0.5, ge=1e-3, le=1e6, description="Concentration of the Dirichlet partition")
    partition_seed: int = Field(0, ge=0, lt=2**62, description="Seed of the partition and of the held-out split")
    test_fraction: float = Field(0.2, ge=0, lt=1, description="Share of a device's samples that it holds out")
    train_samples: int = Field(0, ge=0, description="Training samples over all devices; 0: all there are")
    test_samples: int = Field(0, ge=0, description="Held-out samples over all devices; 0: all there are")
    samples_per_device: int = Field(0, ge=0, description="Training samples of one device at most; 0: all")
    test_samples_per_device: int = Field(0, ge=0, description="Held-out samples of one device at most; 0: all")
    sender_offset: int = Field(0, ge=0, description="`chitchat`: rank of the first device's sender")
    text_column: str = Field("", description="Column of the text; empty: `text`")
    label_column: str = Field("", description="Column of the class; empty: `label`")
    prompt_column: str = Field("", description="Column of the prompt; empty: `prompt`")
    response_column: str = Field("", description="Column of the response; empty: `response`")
    messages_column: str = Field("", description="Column of a conversation; empty: `messages`")
    split_column: str = Field("", description="Column that holds `train` or `test`; empty: `split`")
    group_column: str = Field("", description="Column that the `natural` partition goes by")

    @field_validator("taps", mode="before")
    @classmethod
    def _taps_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("taps")
    @classmethod
    def _taps_are_numbers(cls, value: str) -> str:
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdigit() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
            raise ValueError("a number of taps from 1 up, or block indices such as '1,3,5'")
        return ",".join(parts)

    @field_validator("pooling")
    @classmethod
    def _pooling_is_known(cls, value: str) -> str:
        parts = value.split("+")
        if len(set(parts)) != len(parts) or not set(parts) <= set(POOLINGS):
            raise ValueError(f"one or several different ones of {', '.join(POOLINGS)}, joined by '+'")
        return value

    @field_validator("label_names")
    @classmethod
    def _labels_occur_once(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if len(set(names)) != len(names):
            raise ValueError("a class name occurs twice")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        if self.task == "classification" and self.template:
            raise ValueError("'template' is for the task causal-lm only; leave it empty")
        for name in ("backbone", "data", "strategy"):
            if not getattr(self, name).strip():
                raise ValueError(f"'{name}' is empty")
        return self

    @property
    def byte_budget(self) -> int:
        """Largest payload of one message, in bytes."""
        return int(self.byte_budget_mb * 1_000_000)

    @property
    def cache_folder(self) -> Path:
        """The server's activation cache."""
        return expand(self.cache_dir) if self.cache_dir else plugin_home() / "activations"

    @property
    def token_rule(self) -> str:
        """Which tokens travel: the loss positions of a language model, or the pooled vectors."""
        return "loss" if self.task == "causal-lm" else self.pooling

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names that the run config fixes; empty where the devices decide."""
        return tuple(name.strip() for name in self.label_names.split(",") if name.strip())


def parse_run_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate a Flower run config.

    Parameters
    ----------
    values : Mapping
        Dashed keys to values, as Flower hands them to an app. Keys with a dot belong to the user
        (``my.key``): they are left alone here and reach the user's data function.

    Returns
    -------
    RunConfig
        The validated config.

    Raises
    ------
    ConfigError
        Names each key, what was given and what is allowed.
    """
    try:
        return RunConfig.model_validate({key: value for key, value in values.items() if "." not in key})
    except ValidationError as error:
        lines = [_explain(dict(problem)) for problem in error.errors()]
        raise ConfigError("The run config cannot be used:\n" + "\n".join(f"  - {line}" for line in lines)) from None


def _explain(problem: dict[str, Any]) -> str:
    key = _kebab(".".join(str(part) for part in problem["loc"])) or "run config"
    if problem["type"] == "missing":
        return f"'{key}' is missing; set it in [tool.flwr.app.config] or with --run-config '{key}=...'"
    if problem["type"] == "extra_forbidden":
        return f"'{key}' is not a key of this app; it knows {', '.join(sorted(known_keys()))}"
    return f"'{key}' = {problem['input']!r}: {problem['msg']}"


def known_keys() -> tuple[str, ...]:
    """The dashed names of all keys, in the order of the table."""
    return tuple(_kebab(name) for name in RunConfig.model_fields)


def plugin_home() -> Path:
    """Where caches and device identities are kept: ``$FLOWER_PLUGIN_HOME``, or ``~/.cache/flower-plugin``."""
    return expand(os.environ.get(HOME_VARIABLE) or "~/.cache/flower-plugin")


def expand(path: str) -> Path:
    """A path of the config with ``~`` resolved, absolute."""
    return Path(path).expanduser().absolute()
