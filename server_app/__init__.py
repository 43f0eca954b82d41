"""The ServerApp, and a Grid without processes for tests and experiments."""

from .app import app

__all__ = ["app"]
