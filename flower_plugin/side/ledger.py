"""What a run agreed on and whose samples it trains on: enough to go on without the devices."""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from flower_plugin.errors import CacheError

LEDGER = "ledger.json"


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
    """

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    template: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    label_names: tuple[str, ...]
    digests: dict[str, tuple[str, ...]]

    def with_samples(self, digests: Mapping[str, tuple[bytes, ...]]) -> "Ledger":
        """A ledger in which these tenants' samples are new or renewed; the other tenants stay."""
        renewed = {tenant: tuple(d.hex() for d in theirs) for tenant, theirs in digests.items()}
        return self.model_copy(update={"digests": {**self.digests, **renewed}})

    def samples(self, tenant: str) -> tuple[bytes, ...]:
        """A tenant's samples."""
        return tuple(bytes.fromhex(digest) for digest in self.digests.get(tenant, ()))


def save_ledger(ledger: Ledger, folder: Path) -> None:
    """Write the ledger, whole or not at all."""
    draft = folder / f"{LEDGER}.new"
    with draft.open("w", encoding="utf-8") as file:
        file.write(ledger.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / LEDGER)


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
