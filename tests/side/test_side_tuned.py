"""The finished model, used like a Hugging Face model."""

import dataclasses

import pytest
import torch

from flower_plugin import load_side_tuned
from flower_plugin.backbone import fingerprint, load_backbone
from flower_plugin.errors import ConfigError
from flower_plugin.side.export import SideTunedSettings, save_side_tuned
from flower_plugin.side.network import SideNetworkConfig, new_side_network
from flower_plugin.side.side_tuned import SideTunedModel

TAPS = (0, 2)


def export(folder, backbone, task, *, trained):
    classes = ("rotten", "fresh") if task == "classification" else ()
    rule = "mean+max" if classes else "loss"
    config = SideNetworkConfig(
        width=64 if classes else 32, taps=TAPS, num_labels=len(classes) or None, vectors=2 if classes else 1
    )
    network = new_side_network(config, seed=3)
    if trained:
        torch.manual_seed(0)
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    settings = SideTunedSettings(
        backbone=str(backbone),
        fingerprint=fingerprint(str(backbone)),
        task=task,
        taps=TAPS,
        token_rule=rule,
        label_names=classes,
        max_length=24,
    )
    return save_side_tuned(network, settings, folder)


@pytest.fixture
def batch():
    ids = torch.tensor([[2, 4, 8, 9, 3], [2, 5, 3, 0, 0]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_at_step_0_a_language_model_is_the_backbone(tmp_path, tiny_llama, batch):
    folder = export(tmp_path / "side", tiny_llama, "causal-lm", trained=False)
    model = load_side_tuned(str(tiny_llama), folder)
    plain = load_backbone(str(tiny_llama), "causal-lm").model
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)


def test_a_trained_side_network_changes_the_logits(tmp_path, tiny_llama, batch):
    model = load_side_tuned(str(tiny_llama), export(tmp_path / "s", tiny_llama, "causal-lm", trained=True))
    plain = load_backbone(str(tiny_llama), "causal-lm").model
    with torch.no_grad():
        assert not torch.allclose(model(**batch).logits, plain(**batch).logits, atol=1e-2)


def test_the_backbone_is_itself_again_outside_the_model(tmp_path, tiny_llama, batch):
    model = load_side_tuned(str(tiny_llama), export(tmp_path / "s", tiny_llama, "causal-lm", trained=True))
    plain = load_backbone(str(tiny_llama), "causal-lm").model
    with torch.no_grad():
        model(**batch)
        assert torch.equal(model.backbone(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("sampling", [{"num_beams": 1}, {"num_beams": 3}])
def test_generation_with_the_cache_equals_generation_without(tmp_path, tiny_llama, sampling):
    model = load_side_tuned(str(tiny_llama), export(tmp_path / "s", tiny_llama, "causal-lm", trained=True))
    ids = torch.tensor([[2, 4, 8, 9], [0, 2, 5, 7]])
    options = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
    }
    cached = model.generate(ids, use_cache=True, **options, **sampling)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options, **sampling))


def test_generation_follows_the_side_tuned_logits(tmp_path, tiny_llama):
    model = load_side_tuned(str(tiny_llama), export(tmp_path / "s", tiny_llama, "causal-lm", trained=True))
    ids = torch.tensor([[2, 4, 8, 9]])
    with torch.no_grad():
        first = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1].argmax()
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert generated[0, -1] == first


def test_labels_give_the_loss(tmp_path, tiny_llama, batch):
    model = load_side_tuned(str(tiny_llama), export(tmp_path / "s", tiny_llama, "causal-lm", trained=True))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    output = model(**batch, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_classifier_does_not_care_about_padding(tmp_path, tiny_bert, batch):
    model = load_side_tuned(str(tiny_bert), export(tmp_path / "s", tiny_bert, "classification", trained=True))
    with torch.no_grad():
        together = model(**batch, labels=torch.tensor([0, 1]))
        alone = model(input_ids=torch.tensor([[2, 5, 3]])).logits
    assert together.logits.shape == (2, 2)
    assert torch.allclose(together.logits[1], alone[0], atol=1e-5)
    assert together.loss > 0
    assert model.label_names == ("rotten", "fresh")


def test_a_classifier_does_not_generate(tmp_path, tiny_bert):
    model = load_side_tuned(str(tiny_bert), export(tmp_path / "s", tiny_bert, "classification", trained=False))
    with pytest.raises(ConfigError, match="does not generate"):
        model.generate(torch.tensor([[2, 3]]))


def test_another_backbone_is_warned_about(tmp_path, tiny_bert):
    folder = export(tmp_path / "s", tiny_bert, "classification", trained=False)
    settings = folder / "side_tuned.json"
    settings.write_text(settings.read_text().replace(fingerprint(str(tiny_bert)), "0" * 32))
    with pytest.warns(UserWarning, match="not the backbone"):
        load_side_tuned(str(tiny_bert), folder)


def test_a_backbone_of_another_depth_is_refused(tmp_path, tiny_bert):
    folder = export(tmp_path / "s", tiny_bert, "classification", trained=False)
    model = load_side_tuned(str(tiny_bert), folder)
    settings = model.settings.model_copy(update={"taps": (0, 5)})
    with pytest.raises(ConfigError, match="6 blocks"):
        SideTunedModel(load_backbone(str(tiny_bert), "classification"), model.side, settings)


def test_a_folder_without_a_side_network_is_named(tmp_path, tiny_bert):
    with pytest.raises(ConfigError, match=r"side_tuned\.json is missing"):
        load_side_tuned(str(tiny_bert), tmp_path)


def test_gradients_reach_only_the_side_network(tmp_path, tiny_llama, batch):
    model = load_side_tuned(str(tiny_llama), export(tmp_path / "s", tiny_llama, "causal-lm", trained=True))
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert all(parameter.grad is not None for parameter in model.side.parameters())


def test_settings_are_frozen(tmp_path, tiny_bert):
    model = load_side_tuned(str(tiny_bert), export(tmp_path / "s", tiny_bert, "classification", trained=False))
    with pytest.raises((dataclasses.FrozenInstanceError, ValueError)):
        model.settings.task = "causal-lm"
