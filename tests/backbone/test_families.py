"""One matrix, families x laws: what the view makes of a model equals what the model does by itself."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from flower_plugin.backbone import Backbone, BackboneHead, describe, load_head

BASE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTARY = {"rotary_dim": 4}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-projected": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 4}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "bloom": ("Bloom", {"n_layer": 4, "n_head": 4}),
    "falcon": ("Falcon", {}),
    "falcon-alibi": ("Falcon", {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt-j": ("GPTJ", {**GPT2, **ROTARY}),
    "gpt-neo": ("GPTNeo", {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 4}),
    "codegen": ("CodeGen", {**GPT2, **ROTARY}),
    "gpt-bigcode": ("GPTBigCode", GPT2),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 4}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"sliding_window": 4}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "nemotron": ("Nemotron", {}),
    "persimmon": ("Persimmon", {}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 4}),
    "helium": ("Helium", {"head_dim": 8}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    "gpt-oss": ("GptOss", {**EXPERTS, "head_dim": 8, "sliding_window": 4}),
    "olmoe": ("Olmoe", EXPERTS),
    "granite-moe": ("GraniteMoe", EXPERTS),
    "phimoe": ("Phimoe", EXPERTS),
    "xglm": ("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4}),
    "biogpt": ("BioGpt", {}),
    "mamba": ("Mamba", {"state_size": 4}),
    "bert-decoder": ("Bert", {"is_decoder": True}),
    "roberta-decoder": ("Roberta", {"is_decoder": True}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"pad_token_id": 1, "bos_token_id": 0}),
    "distilbert": ("DistilBert", {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48}),
    "electra": ("Electra", {"embedding_size": 16}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "bos_token_id": 0}),
    "camembert": ("Camembert", {"pad_token_id": 1, "bos_token_id": 0}),
    "mpnet": ("MPNet", {"pad_token_id": 1, "bos_token_id": 0}),
    "albert": ("Albert", {"embedding_size": 16, "num_hidden_groups": 2}),
    "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v2": (
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "modernbert": ("ModernBert", {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    "roformer": ("RoFormer", {"embedding_size": 16}),
    "nystromformer": ("Nystromformer", {"num_landmarks": 64, "segment_means_seq_len": 64}),
    "megatron-bert": ("MegatronBert", {}),
    "mobilebert": ("MobileBert", {"intra_bottleneck_size": 16, "true_hidden_size": 16, "embedding_size": 16}),
    "convbert": ("ConvBert", {"embedding_size": 32}),
    "ernie": ("Ernie", {}),
    "gpt2-base": ("GPT2", GPT2),
    "opt-base": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "llama-base": ("Llama", {}),
    "eurobert": ("EuroBert", {}),
}
# The families that every change must keep; the others are swept by `make test-all`.
ALWAYS = {
    "phi3",
    "qwen3-moe",
    "bloom",
    "opt",
    "llama",
    "deberta-v2",
    "opt-base",
    "gpt-neox",
    "llama-tied",
    "falcon",
    "qwen2",
    "opt-projected",
    "albert",
    "mistral",
    "distilbert",
    "llama-base",
    "gemma2",
    "bert",
    "gpt2",
    "gemma3",
    "modernbert",
    "qwen3",
    "roberta",
    "phi",
}


def swept(name: str, *values: str) -> Any:
    return pytest.param(*values, id=name, marks=() if name in ALWAYS else pytest.mark.slow)


CAUSAL = [swept(name, name) for name in DECODERS]
ALL = [swept(name, "causal-lm", name) for name in DECODERS]
ALL += [swept(name, "classification", name) for name in ENCODERS]


@cache
def build(task: str, name: str) -> Backbone:
    family, settings = (DECODERS if task == "causal-lm" else ENCODERS)[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **settings})
    auto = transformers.AutoModelForCausalLM if task == "causal-lm" else transformers.AutoModel
    model = auto.from_config(config)
    with torch.no_grad():  # fresh norms and biases are ones and zeros, which hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return Backbone.from_model(model, None, task)


def batch(backbone: Backbone, side: str = "right") -> dict[str, Tensor]:
    pad = backbone.config.pad_token_id or 0
    ids = torch.randint(3, 120, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in ((1, 6), (2, 3)):
        empty = slice(length, None) if side == "right" else slice(None, 9 - length)
        ids[row, empty], mask[row, empty] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def own_states(backbone: Backbone, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The outputs of the blocks by plain hooks, in the order of the calls, and the model's first output."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    hooks = [block.register_forward_hook(keep) for block in dict.fromkeys(backbone.blocks)]
    try:
        with torch.no_grad():
            final = backbone.model(**inputs)[0]
    finally:
        for hook in hooks:
            hook.remove()
    return seen, final


def close(made: Tensor, own: Tensor, mask: Tensor | None = None) -> bool:
    if mask is not None:  # what stands at padding is nobody's business
        made, own = made[mask.bool()], own[mask.bool()]
    return float((made - own).abs().max()) <= 1e-5 * float(own.abs().max())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("task", "name"), ALL)
def test_taps_are_the_outputs_of_the_blocks(task: str, name: str, side: str) -> None:
    backbone = build(task, name)
    inputs = batch(backbone, side)
    seen, final = own_states(backbone, inputs)
    assert backbone.num_blocks == len(seen) == 4
    taps = backbone.forward_taps(inputs, range(4), lambda hidden: hidden)
    if task == "classification" and final.shape == seen[-1].shape:
        seen[-1] = final
    for made, own in zip(taps, seen, strict=True):
        assert made.shape == (3, 9, backbone.hidden_size)
        assert close(made, own, inputs["attention_mask"])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_head_makes_the_models_logits(name: str, side: str) -> None:
    backbone = build("causal-lm", name)
    inputs = batch(backbone, side)
    seen, logits = own_states(backbone, inputs)
    rows = seen[-1][inputs["attention_mask"].bool()].clone().requires_grad_()
    made = backbone.head(rows)
    assert close(made.detach(), logits[inputs["attention_mask"].bool()])
    made.square().sum().backward()
    assert rows.grad is not None
    assert float(rows.grad.abs().max()) > 0
    assert backbone.head(rows[:0]).shape == (0, logits.shape[-1])


def stages(backbone: Backbone, cuts: list[int], inputs: dict[str, Tensor]) -> Tensor:
    hidden = None
    for lo, hi in zip([0, *cuts], [*cuts, backbone.num_blocks], strict=True):
        hidden = backbone.run_blocks(lo, hi, hidden, inputs if lo == 0 else backbone.without_text(inputs))
    assert hidden is not None
    return hidden


def gradients(backbone: Backbone, output: Tensor, mask: Tensor) -> dict[str, Tensor]:
    backbone.model.zero_grad()
    output[mask.bool()].square().mean().backward()
    return {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cuts", [[1], [1, 3]])
@pytest.mark.parametrize(("task", "name"), ALL)
def test_stages_equal_the_unsplit_model(task: str, name: str, cuts: list[int]) -> None:
    backbone = build(task, name)
    side = "left" if len(cuts) == 2 else "right"
    inputs = batch(backbone, side)
    mask = inputs["attention_mask"]
    backbone.model.requires_grad_(True)
    try:
        kept: list[Tensor] = []
        hook = backbone.blocks[-1].register_forward_hook(
            lambda _, __, output: kept.append(output if isinstance(output, Tensor) else output[0])
        )
        final = backbone.model(**inputs)[0]
        hook.remove()
        own = final if task == "classification" and final.shape == kept[-1].shape else kept[-1]
        made = stages(backbone, cuts, inputs)
        assert close(made.detach(), own.detach(), mask)
        wanted, got = gradients(backbone, own, mask), gradients(backbone, made, mask)
        assert wanted.keys() == got.keys()
        scale = max(float(g.abs().max()) for g in wanted.values())
        assert all(float((got[n] - wanted[n]).abs().max()) <= 1e-5 * scale for n in wanted)
    finally:
        backbone.model.zero_grad()
        backbone.model.requires_grad_(False)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_head_from_a_checkpoint_holds_the_head_alone(name: str, tmp_path: Path) -> None:
    backbone = build("causal-lm", name)
    backbone.model.save_pretrained(tmp_path, max_shard_size="20KB")
    head = load_head(str(tmp_path))
    hidden = torch.randn(5, backbone.hidden_size)
    assert close(head(hidden), backbone.head(hidden))
    copy = BackboneHead.from_bytes(head.to_bytes())
    assert torch.equal(copy(hidden), head(hidden))
    held = {id(p): p.numel() for p in head.parameters()}
    whole = sum(p.numel() for p in backbone.model.parameters())
    # A projection, at most one more (OPT-350M, BERT), norms and biases.
    assert sum(held.values()) <= 120 * 32 + 2 * 32 * 32 + 500 < whole
    hidden.requires_grad_()
    head(hidden).sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize(("task", "name"), ALL)
def test_a_description_needs_the_config_alone(task: str, name: str, tmp_path: Path) -> None:
    backbone = build(task, name)
    backbone.config.save_pretrained(tmp_path)
    info = describe(str(tmp_path))
    assert (info.num_blocks, info.hidden_size, info.vocab_size) == (4, backbone.hidden_size, 120)
    assert info.model_type == backbone.config.model_type
    assert info.fingerprint is None


@pytest.mark.parametrize(("task", "name"), ALL)
def test_a_model_reads_as_many_tokens_as_its_description_says(task: str, name: str, tmp_path: Path) -> None:
    backbone = build(task, name)
    backbone.config.save_pretrained(tmp_path)
    most = describe(str(tmp_path)).max_tokens

    def read(tokens: int) -> None:
        ids = torch.full((1, tokens), 7)
        with torch.no_grad():
            backbone.model(input_ids=ids, attention_mask=torch.ones_like(ids))

    read(most or 150)
    if most is not None:
        with pytest.raises((IndexError, RuntimeError)):
            read(most + 1)
