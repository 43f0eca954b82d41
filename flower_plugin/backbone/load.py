"""Load a frozen backbone, its config and its tokenizer from a source. No code from a checkpoint ever runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from flower_plugin.errors import BackboneError

from .checks import check_task, refuse_encoder_decoder
from .gguf import converted_folder
from .layout import Task
from .source import BackboneSource, local_folder, resolve
from .view import Backbone


def load_backbone(
    spec: str | BackboneSource,
    task: Task,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    cache_folder: Path | None = None,
) -> Backbone:
    """Load a backbone in eval mode, frozen, with its tokenizer.

    Parameters
    ----------
    spec
        What `resolve` takes, or returned.
    task
        ``"classification"`` loads the base model, ``"causal-lm"`` the model with its language-model head.
    dtype, device
        Of the weights.
    cache_folder
        Where GGUF files are converted to; default: the plugin's home.

    Raises
    ------
    BackboneError
        The files are missing or broken, a tensor or the tokenizer is missing, or the family is not supported.
    """
    check_task(task)
    source = resolve(spec) if isinstance(spec, str) else spec
    folder = model_folder(source, cache_folder)
    config = load_config(folder)
    tokenizer = _load_tokenizer(folder)
    model = _load_model(folder, config, task, dtype)
    return Backbone.from_model(model.to(device), tokenizer, task)  # type: ignore[arg-type]


def load_tokenizer(spec: str | BackboneSource, cache_folder: Path | None = None) -> PreTrainedTokenizerBase:
    """Load a backbone's tokenizer alone.

    Raises
    ------
    BackboneError
        The source or its tokenizer cannot be found or used.
    """
    source = resolve(spec) if isinstance(spec, str) else spec
    return _load_tokenizer(model_folder(source, cache_folder))


def model_folder(source: BackboneSource, cache_folder: Path | None = None) -> Path:
    """Return the plain local folder of a source: downloaded or converted where it has to be."""
    folder = local_folder(source, with_weights=True)
    return folder if source.gguf_file is None else converted_folder(folder / source.gguf_file, cache_folder)


def load_config(folder: Path, gguf_file: str | None = None) -> PretrainedConfig:
    """Return the config of a model folder or a GGUF file in it; encoder-decoder models are refused."""
    options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # configs of the many families raise errors of all kinds
        raise BackboneError(f"the config in {folder} cannot be used: {_first_line(error)}") from error
    refuse_encoder_decoder(config)
    return config


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Loading a phone-sized model takes a second; its progress bars would only litter a federation's log."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()  # type: ignore[no-untyped-call]


def _load_model(folder: Path, config: PretrainedConfig, task: Task, dtype: torch.dtype) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM if task == "causal-lm" else AutoModel
    try:
        with _without_progress_bars():
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # loading a broken checkpoint raises errors of many libraries
        raise BackboneError(f"the model in {folder} cannot be loaded for {task}: {_first_line(error)}") from error
    # A base model's pooler is not used here, and many checkpoints lack it.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise BackboneError(
            f"the checkpoint in {folder} lacks {len(missing)} tensors that {type(model).__name__} needs"
            f" for {task}, such as {missing[0]!r}: they would be random. Use a checkpoint that was trained"
            " for this task."
        )
    return cast(PreTrainedModel, model)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raise errors of many libraries
        raise BackboneError(
            f"the tokenizer in {folder} cannot be loaded: {_first_line(error)} Save it there with"
            " tokenizer.save_pretrained(folder)."
        ) from error
    return tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
