"""A trainer's whole state in one file, so that a stopped run goes on as if it had not been stopped."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_plugin.errors import CacheError, PayloadError

from .packing import pack_tensors, unpack_tensors
from .trainer import Evaluation, Snapshot, Trainer

FORMAT = "trainer-1"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write network, optimizer moments, place in the schedule, and best weights; whole or not at all.

    Raises
    ------
    CacheError
        The file cannot be written.
    """
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
    data = pack_tensors(tensors, facts)
    try:
        _write_whole(path, data)
    except OSError as error:
        raise CacheError(f"the checkpoint {path} cannot be written: {error}; the one before is intact") from error


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


def _write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step that outlives a power cut: temporary file, sync, rename, sync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
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
