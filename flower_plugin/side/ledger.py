"""What a run agreed on and whose samples it trains on: enough to go on without the devices."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from flower_plugin.errors import CacheError

LEDGER = "ledger.json"
HEAD = "head.safetensors"


class Ledger(BaseModel):
    """The agreement of a run.

    Attributes
    ----------
    fingerprint, template : str
        Of the backbone, and of how samples become tokens.
    num_blocks, hidden_size, vocab_size : int
        Shape of the backbone.
    label_names : tuple of str
        Classes in the order of their indices.
    digests : dict
        Tenant -> its training samples (32 hex digits each) in the device's order.
    refused : dict
        Tenant -> samples that the device cannot send, and is not asked for again.
    """

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    template: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    label_names: tuple[str, ...]
    digests: dict[str, tuple[str, ...]]
    refused: dict[str, tuple[str, ...]] = {}

    def with_samples(self, digests: Mapping[str, tuple[bytes, ...]]) -> "Ledger":
        """A ledger in which these tenants' samples are new or renewed; the other tenants stay."""
        renewed = {tenant: tuple(d.hex() for d in theirs) for tenant, theirs in digests.items()}
        return self.model_copy(update={"digests": {**self.digests, **renewed}})

    def with_refused(self, tenant: str, digests: Iterable[bytes]) -> "Ledger":
        """A ledger that knows further samples which a device cannot send."""
        theirs = {*self.refused.get(tenant, ()), *(digest.hex() for digest in digests)}
        return self.model_copy(update={"refused": {**self.refused, tenant: tuple(sorted(theirs))}})

    def wanted(self, tenant: str) -> tuple[bytes, ...]:
        """A tenant's samples without those that the device cannot send."""
        refused = set(self.refused.get(tenant, ()))
        return tuple(bytes.fromhex(digest) for digest in self.digests.get(tenant, ()) if digest not in refused)

    def samples(self, tenant: str) -> tuple[bytes, ...]:
        """A tenant's samples."""
        return tuple(bytes.fromhex(digest) for digest in self.digests.get(tenant, ()))


def save_ledger(ledger: Ledger, folder: Path) -> None:
    """Write the ledger, whole or not at all.

    Raises
    ------
    CacheError
        It cannot be written.
    """
    _write(folder / LEDGER, ledger.model_dump_json().encode())


def save_head(head: bytes, folder: Path) -> None:
    """Keep the packed head that a device sent, since the device may leave after stage one.

    Raises
    ------
    CacheError
        It cannot be written.
    """
    _write(folder / HEAD, head)


def load_kept_head(folder: Path) -> bytes | None:
    """The packed head that a stopped run kept; ``None`` if it kept none."""
    path = folder / HEAD
    return path.read_bytes() if path.exists() else None


def _write(path: Path, data: bytes) -> None:
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error}; free disk space and resume") from error


def load_ledger(folder: Path) -> Ledger | None:
    """Read the ledger of a stopped run; ``None`` if it never came so far.

    Raises
    ------
    CacheError
        The file is damaged.
    """
    path = folder / LEDGER
    if not path.exists():
        return None
    try:
        return Ledger.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise CacheError(f"{path} is damaged ({error.error_count()} problems); start a new run") from error
