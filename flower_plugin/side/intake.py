"""The plan that all devices of a run share, and the checks of what they send against it."""

import hashlib
import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_plugin.errors import PayloadError

from .cache_records import Namespace
from .shipment import Shipment, unpack

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Intake:
    """What a run expects of each device.

    Attributes
    ----------
    fingerprint : str
        Of the backbone.
    template : str
        Names how samples become tokens.
    max_length : int
        Tokens a sample at most.
    taps : tuple of int
        Tapped blocks.
    token_rule : str
        Which tokens travel.
    codec : str
        How they are encoded.
    width : int
        Width of one row of one tap.
    label_names : tuple of str
        Classes in the order of their indices; empty for a language model.
    target_limit : int
        Targets are below this: the number of classes, or the size of the vocabulary.
    budget : int
        Largest payload of one message, in bytes.
    """

    fingerprint: str
    template: str
    max_length: int
    taps: tuple[int, ...]
    token_rule: str
    codec: str
    width: int
    label_names: tuple[str, ...]
    target_limit: int
    budget: int

    @property
    def plan(self) -> dict[str, Any]:
        """The fields of a request that tell a device what is tapped."""
        return {"fingerprint": self.fingerprint, "taps": self.taps, "label_names": self.label_names}

    def namespace(self, tenant: str) -> Namespace:
        """Where a tenant's samples of this kind are cached. The order of the classes is a part of it."""
        labels = json.dumps(self.label_names).encode()
        return Namespace(
            tenant=tenant,
            fingerprint=self.fingerprint,
            template=f"{self.template}-{hashlib.blake2b(labels, digest_size=8).hexdigest()}",
            max_length=self.max_length,
            taps=self.taps,
            token_rule=self.token_rule,
            codec=self.codec,
        )

    def unpack(self, payload: Bytes, index: Bytes, wanted: Set[bytes]) -> Shipment:
        """Read what a device sent.

        Raises
        ------
        PayloadError
            It is damaged, of another shape or size than agreed, or holds samples that nobody asked for.
        """
        shipment = unpack(
            payload,
            index,
            taps=len(self.taps),
            width=self.width,
            codec=self.codec,
            budget_bytes=self.budget,
            max_samples=len(wanted),
            target_limit=self.target_limit,
        )
        strangers = set(shipment.digests) - wanted
        if strangers:
            raise PayloadError(f"it sent {len(strangers)} samples that it was not asked for")
        if self.token_rule != "loss" and any(count != 1 for count in shipment.tokens):
            raise PayloadError(f"pooling {self.token_rule!r} gives one row a sample; it sent another number")
        return shipment
