"""The device's backbone, checked to be the one that the run is about."""

from flower_plugin.backbone import fingerprint
from flower_plugin.errors import BackboneError


def require_fingerprint(spec: str, expected: str) -> None:
    """Check the checkpoint before it is loaded.

    Raises
    ------
    BackboneError
        It is another one than the run agreed on, or it changed since the device was asked.
    """
    found = fingerprint(spec)
    if found != expected:
        raise BackboneError(
            f"the backbone {spec!r} has fingerprint {found[:12]}, this run is about {expected[:12]};"
            " put the same checkpoint and tokenizer on the device"
        )
