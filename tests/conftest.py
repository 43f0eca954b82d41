"""Tiny but real models and texts, made once a session."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = [
    "the",
    "a",
    "of",
    "good",
    "bad",
    "fine",
    "poor",
    "film",
    "plot",
    "actor",
    "scene",
    "great",
    "awful",
    "dull",
    "bright",
    "song",
    "voice",
]
GOOD = ("good", "fine", "great", "bright")
BAD = ("bad", "poor", "awful", "dull")


# Machines that run tests are noisy: the time that an example takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test does may touch, or depend on, the user's own caches."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLOWER_PLUGIN_HOME", raising=False)


def save_tokenizer(folder: Path) -> int:
    """Write a word-level tokenizer with a pad, an unknown, a first and a last token; return its size."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
    ).save_pretrained(folder)
    return len(vocabulary)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of three blocks with random weights, saved as a checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    size = save_tokenizer(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three blocks with tied embeddings and grouped key/value heads, saved with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    size = save_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def review(number: int, label: str) -> str:
    """A short made-up review; the adjective gives its label away."""
    adjective = (GOOD if label == "fresh" else BAD)[(number // 3) % 4]
    return f"the {adjective} {WORDS[8 + number % 4]} of a {WORDS[14 + number % 3]} {'the ' * (number % 5)}film {number}"


@pytest.fixture
def write_reviews(tmp_path: Path) -> Callable[..., Path]:
    """Write a JSONL file of labelled reviews; a range of numbers makes the texts differ between devices."""

    def write(name: str, numbers: range) -> Path:
        path = tmp_path / name
        rows = [
            {"text": review(number, label), "label": label, "split": "test" if number % 4 == 3 else "train"}
            for number in numbers
            for label in ("fresh", "rotten")
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def write_chat(tmp_path: Path) -> Callable[..., Path]:
    """Write a JSONL file of prompts and responses."""

    def write(name: str, numbers: range) -> Path:
        path = tmp_path / name
        rows = [
            {
                "prompt": f"{WORDS[number % 9]} {WORDS[number % 7]} film",
                "response": " ".join(WORDS[(number + k) % 5] for k in range(2 + number % 4)),
                "split": "test" if number % 4 == 3 else "train",
            }
            for number in numbers
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
