"""A part of a backbone, loaded alone, is the same part of the whole."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_families import ALL, CAUSAL, batch, build, close

from flower_plugin.backbone import Backbone
from flower_plugin.backbone.part import load_part
from flower_plugin.errors import BackboneError

STAGES = ((0, 1), (1, 3), (3, 4))


def saved(backbone: Backbone, folder: Path, tiny_llama: Path) -> str:
    """The backbone as a checkpoint of several shards, with a tokenizer of another model: ids are given here."""
    backbone.model.save_pretrained(folder, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_llama / name).read_bytes())
    return str(folder)


def held_bytes(part: Backbone) -> int:
    """Memory of the part's weights; a row that is shown many times counts once."""
    return sum(p.untyped_storage().nbytes() for p in dict.fromkeys(part.model.parameters()) if not p.is_meta)


@pytest.mark.parametrize(("task", "name"), ALL)
def test_parts_in_a_row_equal_the_whole(task: str, name: str, tmp_path: Path, tiny_llama: Path) -> None:
    whole = build(task, name)
    inputs = batch(whole)
    spec = saved(whole, tmp_path, tiny_llama)
    owner = load_part(spec, task, 0, 0, with_text=True)
    hidden = owner.embed(inputs)
    with torch.no_grad():
        expected = whole.run_blocks(0, 4, None, inputs)
        for lo, hi in STAGES:
            part = load_part(spec, task, lo, hi, with_text=False)
            hidden = part.run_blocks(lo, hi, hidden, part.without_text(inputs))
    assert close(hidden, expected, inputs["attention_mask"])


@pytest.mark.parametrize("name", CAUSAL)
def test_an_owner_of_texts_has_the_models_head(name: str, tmp_path: Path, tiny_llama: Path) -> None:
    whole = build("causal-lm", name)
    owner = load_part(saved(whole, tmp_path, tiny_llama), "causal-lm", 0, 0, with_text=True)
    rows = torch.randn(5, whole.hidden_size)
    assert close(owner.head(rows), whole.head(rows))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_a_part_holds_its_blocks_and_no_table_of_words(name: str, tmp_path: Path, tiny_llama: Path) -> None:
    whole = build("causal-lm", name)
    part = load_part(saved(whole, tmp_path, tiny_llama), "causal-lm", 1, 2, with_text=False)
    block = sum(p.numel() * 4 for p in whole.blocks[1].parameters())
    positions = 64 * 32 * 4  # GPT-2's table of positions, which every stage may read
    assert block <= held_bytes(part) <= block + positions + 2_000
    with pytest.raises(BackboneError, match="this part holds 1 to 2"):
        part.run_blocks(0, 2, None, batch(whole))


def test_gradients_flow_through_a_part(tmp_path: Path, tiny_llama: Path) -> None:
    whole = build("causal-lm", "llama")
    part = load_part(saved(whole, tmp_path, tiny_llama), "causal-lm", 1, 3, with_text=False)
    inputs, gradients = batch(whole), []
    for backbone in (whole, part):
        hidden = torch.sin(torch.arange(3 * 9 * 32.0)).view(3, 9, 32).requires_grad_()
        backbone.run_blocks(1, 3, hidden, backbone.without_text(inputs)).square().mean().backward()
        gradients.append(hidden.grad)
    assert float(gradients[0].abs().max()) > 0
    assert close(gradients[1], gradients[0])


def test_what_runs_a_block_can_be_wrapped(tmp_path: Path, tiny_llama: Path) -> None:
    whole = build("causal-lm", "llama")
    inputs, seen = batch(whole), []

    def around(index, run, hidden):  # type: ignore[no-untyped-def]
        seen.append(index)
        return torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=False)

    hidden = whole.embed(inputs).requires_grad_()
    made = whole.run_blocks(0, 3, hidden, inputs, around)
    made.sum().backward()
    assert seen == [0, 1, 2]  # the recomputation runs what was wrapped, not the wrapper
    assert torch.equal(made, whole.run_blocks(0, 3, None, inputs))
    assert hidden.grad is not None


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2), (0, 5)])
def test_a_wrong_range_is_refused(lo: int, hi: int, tiny_llama: Path) -> None:
    with pytest.raises(BackboneError, match="give 0 <= lo <= hi"):
        load_part(str(tiny_llama), "causal-lm", lo, hi, with_text=False)
