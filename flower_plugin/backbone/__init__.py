"""A Hugging Face transformer as embedding, blocks and head: one view for every family."""

from .describe import BackboneInfo, describe
from .fingerprint import fingerprint
from .head import BackboneHead, load_head
from .layout import BlockCall, Task, block_hidden, intercepted, with_hidden
from .load import load_backbone, load_tokenizer
from .source import BackboneSource, resolve
from .view import Backbone

__all__ = [
    "Backbone",
    "BackboneHead",
    "BackboneInfo",
    "BackboneSource",
    "BlockCall",
    "Task",
    "block_hidden",
    "describe",
    "fingerprint",
    "intercepted",
    "load_backbone",
    "load_head",
    "load_tokenizer",
    "resolve",
    "with_hidden",
]
