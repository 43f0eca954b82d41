"""What the server decides: Flower strategies."""

from .eco_mobillm import EcoMobiLLM

__all__ = ["EcoMobiLLM"]
