"""What a backbone is, without its weights."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModel

from .checkpoint import has_weights
from .fingerprint import fingerprint
from .gguf import place_of
from .layout import token_embedding
from .load import load_config
from .skeleton import build_skeleton, most_tokens
from .source import BackboneSource, local_folder, resolve


@dataclass(frozen=True)
class BackboneInfo:
    """The size and identity of a backbone.

    Attributes
    ----------
    model_type
        The family, as its config names it.
    num_blocks, hidden_size, vocab_size
        Block calls in a forward pass, width of their outputs, rows of the token embedding.
    max_tokens
        Most tokens that the model can read, where it has a table of positions; None where it computes them (rotary).
    fingerprint
        See `fingerprint`; None where only the config is at hand.
    """

    model_type: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    max_tokens: int | None
    fingerprint: str | None


def describe(spec: str | BackboneSource, *, cache_folder: Path | None = None) -> BackboneInfo:
    """Describe a backbone from its config alone: no weights are allocated or downloaded.

    Raises
    ------
    BackboneError
        The source or its config cannot be found or used, or no blocks are found.
    """
    source = resolve(spec) if isinstance(spec, str) else spec
    folder = local_folder(source, with_weights=False)
    if source.gguf_file is None:
        config = load_config(folder)
    else:
        # Reading a GGUF file's vocabulary takes seconds; its converted folder, if there is one, takes none.
        converted = place_of(folder / source.gguf_file, cache_folder)
        config = load_config(converted) if converted.is_dir() else load_config(folder, source.gguf_file)
    model, layout = build_skeleton(config, AutoModel)
    known = source.gguf_file is not None or has_weights(folder)
    return BackboneInfo(
        model_type=str(config.model_type),
        num_blocks=len(layout.blocks),
        hidden_size=layout.width,
        vocab_size=token_embedding(model).shape[0],
        max_tokens=most_tokens(model),
        fingerprint=fingerprint(source) if known else None,
    )
