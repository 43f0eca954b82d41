"""The tensors of a saved model, read one by one: safetensors or torch files, in one file or in shards."""

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_plugin.errors import BackboneError

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_MAX_INDEX_BYTES = 64 << 20


class Checkpoint:
    """Names and lazily read tensors of a model folder. Nothing is unpickled but tensors.

    Raises
    ------
    BackboneError
        The folder holds no weights, or its index or a shard is broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        self._file_of = {name: path for path in shards(folder) for name in self._names(path)}

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._file_of)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, mapped from its file."""
        path = self._file_of[name]
        opened = self._open(path)
        try:
            tensor = opened[name] if path.suffix == ".bin" else opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BackboneError(f"{path}: tensor {name!r} cannot be read: {error}") from error
        if not isinstance(tensor, Tensor):
            raise BackboneError(f"{path}: entry {name!r} is {type(tensor).__name__}, not a tensor")
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in the order of their names."""
        for name in sorted(self._file_of):
            yield name, self.tensor(name)

    def _names(self, path: Path) -> list[str]:
        return list(self._open(path).keys())

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                if path.suffix == ".bin":
                    self._opened[path] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                else:
                    self._opened[path] = safe_open(path, framework="pt")
            except Exception as error:  # torch and safetensors raise errors of many kinds for broken files
                raise BackboneError(f"{path} is no readable weight file: {error}") from error
        return self._opened[path]


def stored_name(stored: Collection[str], aliases: Sequence[str], prefix: str) -> str:
    """Return the name under which a checkpoint stores a tensor (base models: without prefix), or ""."""
    for name in aliases:
        for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            if candidate in stored:
                return candidate
    return ""


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds weights, or an index of them."""
    return any((folder / name).is_file() or (folder / f"{name}.index.json").is_file() for name in _SINGLE)


def shards(folder: Path) -> list[Path]:
    """Return the weight files of a model folder.

    Raises
    ------
    BackboneError
        There are none, or the index is broken or names files that do not exist or are outside the folder.
    """
    for single in _SINGLE:
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed(folder, index)
    raise BackboneError(f"{folder} holds no weights: it needs model.safetensors or pytorch_model.bin, or their shards")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise BackboneError(f"{index} is larger than {_MAX_INDEX_BYTES} bytes")
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackboneError(f"{index} is no index of weight shards: {error}") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise BackboneError(f"{index} names a shard outside its folder: {name!r}")
        if not (folder / name).is_file():
            raise BackboneError(f"{index} names the shard {name!r}, which is missing: copy the whole folder")
    return [folder / name for name in files]
