"""Federated fine-tuning of transformers on phones, as a Flower plugin."""

from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .side.side_tuned import load_side_tuned

__version__ = VERSION
__all__ = ["__version__", "load_side_tuned"]


def __getattr__(name: str) -> Any:
    # Loaded when it is used: every message of a deployment pays for what an import of the package loads.
    if name == "load_side_tuned":
        from .side.side_tuned import load_side_tuned

        return load_side_tuned
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
