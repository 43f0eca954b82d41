"""What makes two backbones the same: config, weights and tokenizer, hashed from their files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from flower_plugin.errors import BackboneError

from .checkpoint import Checkpoint
from .gguf import content_hash
from .load import load_config
from .source import BackboneSource, local_folder, resolve

# Settings that say how a model was saved or is run, not what it computes.
_VOLATILE = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "use_cache",
    }
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def fingerprint(spec: str | BackboneSource) -> str:
    """Return 32 hex digits that two parties compare to know that they hold the same backbone.

    Covers the config (without settings of saving and running), each tensor's name, dtype, shape and bytes
    (however they are sharded), the tokenizer's files and chat template, and the revision where the spec pins
    one. A GGUF file is hashed as it is, not as it is converted. xxh3_128 finds accidents; it is no proof
    against forgers.

    Raises
    ------
    BackboneError
        Files are missing or broken.
    """
    source = resolve(spec) if isinstance(spec, str) else spec
    folder = local_folder(source, with_weights=True)
    digest = xxhash.xxh3_128()
    if source.gguf_file is not None:
        digest.update(_part("gguf", content_hash(folder / source.gguf_file).encode()))
    else:
        for part in _folder_parts(folder):
            digest.update(part)
    digest.update(_part("revision", (source.revision or "").encode()))
    return digest.hexdigest()


def _folder_parts(folder: Path) -> Iterator[bytes]:
    config = load_config(folder).to_diff_dict()
    yield _part("config", _canonical(config))
    for name, tensor in Checkpoint(folder).tensors():
        yield _part(f"{name} {tensor.dtype} {list(tensor.shape)}", _bytes_of(tensor))
    files = [folder / name for name in _TOKENIZER_FILES] + sorted(folder.glob("*.model"))
    for file in files:
        if file.is_file():
            yield _part(file.name, _tokenizer_content(file))


def _part(name: str, content: Any) -> bytes:
    return xxhash.xxh3_128_digest(name.encode()) + xxhash.xxh3_128_digest(content)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tokenizer_content(file: Path) -> bytes:
    content = file.read_bytes()
    if file.name != "tokenizer_config.json":
        return content
    try:
        return _canonical(json.loads(content))
    except ValueError as error:
        raise BackboneError(f"{file} is no JSON: {error}") from error


def _canonical(settings: dict[str, Any]) -> bytes:
    kept = {key: value for key, value in settings.items() if key not in _VOLATILE}
    return json.dumps(kept, sort_keys=True, default=str).encode()
