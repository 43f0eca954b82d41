"""What a phone does: the ClientApp and its handlers."""

from .app import app

__all__ = ["app"]
