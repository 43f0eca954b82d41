"""Trainers' whole state in files, so that a stopped run goes on as if it had not been stopped.

The trainers of an epoch lie in one folder, which gets its name when all of them are written: a stop at any
moment leaves either the epoch before or this one, of all trainers alike.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_plugin.errors import CacheError, PayloadError

from .packing import pack_tensors, unpack_tensors
from .trainer import Evaluation, Snapshot, Trainer

FORMAT = "trainer-1"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
# Saved again in the same epoch, the folder gets another name: one that holds files cannot be replaced in one step.
_EPOCH = re.compile(r"epoch-(\d{6,})(?:-(\d+))?")
_DRAFT = ".new"


def save_epoch(trainers: Mapping[str, Trainer], folder: Path, epoch: int) -> None:
    """Write the state of all trainers, by name, to a fresh folder in `folder`; then remove older ones.

    Raises
    ------
    CacheError
        It cannot be written; what was saved before is intact.
    """
    same = [again for found, again in map(_number, _epochs(folder)) if found == epoch]
    target = folder / (f"epoch-{epoch:06d}" + (f"-{max(same) + 1}" if same else ""))
    draft = target.with_name(target.name + _DRAFT)
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, trainer in trainers.items():
            _write_synced(draft / name, _packed(trainer))
        _sync_folder(draft)
        draft.replace(target)
        _sync_folder(folder)
    except OSError as error:
        raise CacheError(f"the checkpoint {target} cannot be written: {error}; the one before is intact") from error
    for old in folder.glob("epoch-*"):
        if old != target and _EPOCH.fullmatch(old.name.removesuffix(_DRAFT)):
            shutil.rmtree(old, ignore_errors=True)


def newest_epoch(folder: Path) -> dict[str, Path]:
    """Name of each trainer -> its file, of the newest epoch that was saved as a whole; empty if there is none."""
    epochs = _epochs(folder)
    return {path.name: path for path in sorted(epochs[-1].iterdir())} if epochs else {}


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write network, optimizer moments, place in the schedule, and best weights; whole or not at all.

    Raises
    ------
    CacheError
        The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + _DRAFT)
        _write_synced(draft, _packed(trainer))
        draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CacheError(f"the checkpoint {path} cannot be written: {error}; the one before is intact") from error


def _packed(trainer: Trainer) -> bytes:
    best = trainer.best
    facts = {
        "format": FORMAT,
        "network": trainer.network.config.to_dict(),
        "training": asdict(trainer.config),
        "place": [trainer.epoch, trainer.shifts, trainer.progress],
        "best": None if best is None else [best.epoch, best.loss, best.accuracy],
        "lowest": None if best is None else _figures(best.lowest),
    }
    tensors = _named("network", dict(trainer.network.state_dict()))
    tensors |= _named("averaged", trainer.averaged)
    tensors |= _named("best", {} if best is None else best.weights)
    if best is not None and best.lowest.losses is not None:
        tensors["lowest"] = best.lowest.losses
    for name, parameter in trainer.network.named_parameters():
        moments = trainer.optimizer.state.get(parameter, {})
        tensors |= {f"{moment}/{name}": moments[moment] for moment in MOMENTS if moment in moments}
    return pack_tensors(tensors, facts)


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Set a fresh trainer to the state that was saved.

    Raises
    ------
    CacheError
        The file is damaged, or of a run with another network or another recipe.
    """
    try:
        tensors, facts = unpack_tensors(path.read_bytes(), FORMAT)
        _check_same_run(trainer, facts)
        _restore(trainer, tensors, facts)
    except (OSError, PayloadError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CacheError(f"the checkpoint {path} cannot be used: {error}; start a new run") from error


def _check_same_run(trainer: Trainer, facts: dict[str, Any]) -> None:
    # More epochs are fine: they stretch the schedule of a run that goes on.
    now = {"network": trainer.network.config.to_dict(), "training": asdict(trainer.config)}
    for part, values in now.items():
        for name, value in values.items():
            if name not in ("epochs", "patience") and facts[part].get(name) != value:
                raise PayloadError(f"{name} was {facts[part].get(name)!r} and is now {value!r}")


def _restore(trainer: Trainer, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    trainer.network.load_state_dict(_part("network", tensors))
    trainer.averaged = {name: tensor.to(trainer.device) for name, tensor in _part("averaged", tensors).items()}
    for name, parameter in trainer.network.named_parameters():
        moments = {moment: tensors[f"{moment}/{name}"] for moment in MOMENTS if f"{moment}/{name}" in tensors}
        if any(moments[moment].shape != parameter.shape for moment in moments if moment != "step"):
            raise PayloadError(f"the moments of {name!r} have another shape than it has")
        if moments:
            trainer.optimizer.state[parameter] = {
                moment: tensor.to(trainer.device) for moment, tensor in moments.items()
            }
    if facts["best"] is not None:
        lowest = Evaluation(**{**facts["lowest"], "losses": tensors.get("lowest")})
        epoch, loss, accuracy = facts["best"]
        trainer.best = Snapshot(int(epoch), float(loss), float(accuracy), _part("best", tensors), lowest)
    epoch, shifts, progress = facts["place"]
    trainer.epoch, trainer.shifts, trainer.progress = int(epoch), int(shifts), float(progress)


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    """The figures that equal runs share: no times; its losses are a tensor."""
    return asdict(replace(evaluation, seconds=0.0, read_seconds=0.0, losses=None))


def _epochs(folder: Path) -> list[Path]:
    """Folders of epochs that were saved as a whole, oldest first."""
    found = [path for path in folder.glob("epoch-*") if _EPOCH.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in found if any(path.iterdir())), key=_number)


def _number(path: Path) -> tuple[int, int]:
    match = _EPOCH.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make names in a folder outlive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _part(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{prefix}/"): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}/")
    }
