"""GGUF files: converted once to a plain model folder in a cache, and reused from there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_plugin.config import plugin_home
from flower_plugin.errors import BackboneError

_CHUNK = 1 << 22


def converted_folder(file: Path, cache_folder: Path | None = None) -> Path:
    """Return the folder with the model (float32), tokenizer and chat template of a GGUF file.

    The first call dequantises the file (20 s for 135 M parameters) into
    ``cache_folder/gguf-NAME-CONTENTHASH``; later calls, also of other processes, find it there. The folder
    appears whole or not at all.

    Raises
    ------
    BackboneError
        The file is broken, of an unknown architecture, or the cache folder cannot be written.
    """
    target = place_of(file, cache_folder)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():
                _remove_leftovers(target)
                with _filled_then_renamed(target) as half_done:
                    _convert(file, half_done)
    except OSError as error:
        raise BackboneError(
            f"{file} could not be converted into {target}: {error}. Give another cache folder or make room there."
        ) from error
    return target


def place_of(file: Path, cache_folder: Path | None = None) -> Path:
    """Return the folder that a GGUF file is, or will be, converted to."""
    return (cache_folder or plugin_home()).expanduser() / f"gguf-{file.stem}-{content_hash(file)}"


def _convert(file: Path, target: Path) -> None:
    try:
        quantised = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except OSError:
        raise
    except Exception as error:  # the readers of the many architectures raise errors of all kinds
        raise BackboneError(f"{file} is no GGUF language model that transformers can read: {error}") from error
    # A model that came from GGUF refuses to be saved, so its tensors move to a plain one of the same config.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(quantised.config).from_dict(settings)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    state = quantised.state_dict()
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextmanager
def _filled_then_renamed(target: Path) -> Iterator[Path]:
    half_done = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield half_done
        os.rename(half_done, target)
    finally:
        shutil.rmtree(half_done, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove what a killed conversion left; the lock says that none is running."""
    for leftover in target.parent.glob(f"{target.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def content_hash(file: Path) -> str:
    """Return 32 hex digits for the bytes of a file (xxh3_128)."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
