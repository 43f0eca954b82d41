"""From the run config and what the devices said to the plan that all share."""

from collections.abc import Callable
from dataclasses import asdict, fields

import torch

from flower_plugin.backbone import BackboneHead, describe, fingerprint, load_head, load_tokenizer
from flower_plugin.config import RunConfig
from flower_plugin.errors import BackboneError, ConfigError
from flower_plugin.side.cache import ActivationCache
from flower_plugin.side.examples import template_id
from flower_plugin.side.export import SideTunedSettings
from flower_plugin.side.intake import Intake
from flower_plugin.side.ledger import Ledger
from flower_plugin.side.network import SideNetworkConfig
from flower_plugin.side.reader import CacheReader
from flower_plugin.side.recipe import TrainConfig
from flower_plugin.side.taps import plan_taps
from flower_plugin.side.tokens import pooled_width
from flower_plugin.side.tuning import SideTuning

from .roster import Agreement, Roster

NO_CHECKPOINT = "none"
BATCH_SIZES = {"classification": 64, "causal-lm": 16}
LEARNING_RATES = {"classification": 2e-4, "causal-lm": 3e-3}


def server_backbone(config: RunConfig) -> str | None:
    """Where the server finds the backbone; ``None`` if it has no checkpoint."""
    spec = config.server_backbone or config.backbone
    return None if spec == NO_CHECKPOINT else spec


def server_agreement(config: RunConfig) -> Agreement | None:
    """What the server's backbone is; ``None`` if it has none.

    Raises
    ------
    BackboneError
        The backbone cannot be found.
    ConfigError
        A tap is not among its blocks.
    """
    spec = server_backbone(config)
    if spec is None:
        return None
    try:
        tokenizer = load_tokenizer(spec)
        info, found = describe(spec), fingerprint(spec)
    except BackboneError as error:
        raise BackboneError(f"{error} (if only the devices have it, set server-backbone='{NO_CHECKPOINT}')") from error
    plan_taps(config.taps, info.num_blocks)
    return Agreement(
        fingerprint=found,
        template=template_id(tokenizer, config.task, template=config.template or None),
        num_blocks=info.num_blocks,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
    )


def make_ledger(roster: Roster) -> Ledger:
    """The agreement of a run whose devices are known; samples come in with the devices."""
    agreed = Agreement.of(roster.devices[0].profile)
    return Ledger(**asdict(agreed), label_names=roster.label_names, digests={})


def agreement_of(ledger: Ledger) -> Agreement:
    """What the devices of a run agreed on."""
    return Agreement(**{field.name: getattr(ledger, field.name) for field in fields(Agreement)})


def make_intake(config: RunConfig, ledger: Ledger) -> Intake:
    """What a run expects of each device.

    Raises
    ------
    ConfigError
        A classification run has fewer than two classes, or a tap is not among the blocks.
    """
    classes = len(ledger.label_names)
    if config.task == "classification" and classes < 2:
        raise ConfigError(
            f"classification needs at least two classes, the devices have {list(ledger.label_names)};"
            " check the label column, or set 'label-names'"
        )
    return Intake(
        fingerprint=ledger.fingerprint,
        template=ledger.template,
        max_length=config.max_length,
        taps=plan_taps(config.taps, ledger.num_blocks),
        token_rule=config.token_rule,
        codec=config.codec,
        width=pooled_width(config.token_rule, ledger.hidden_size),
        label_names=ledger.label_names if config.task == "classification" else (),
        target_limit=classes if config.task == "classification" else ledger.vocab_size,
        budget=config.byte_budget,
    )


def make_tuning(
    config: RunConfig, intake: Intake, cache: ActivationCache, ask_for_head: Callable[[], BackboneHead]
) -> SideTuning:
    """The side networks at their start.

    Parameters
    ----------
    ask_for_head : callable
        Gets the head from elsewhere; called for a language model if the server has no checkpoint.
    """
    network = SideNetworkConfig(
        width=intake.width,
        taps=intake.taps,
        num_labels=len(intake.label_names) or None,
        vectors=len(config.token_rule.split("+")),
        reduction=config.reduction,
        side_width=config.side_width or None,
        dropout=config.dropout,
        input_dropout=config.input_dropout if config.task == "classification" else 0.0,
    )
    training = TrainConfig(
        epochs=config.num_rounds,
        batch_size=config.batch_size or BATCH_SIZES[config.task],
        learning_rate=config.learning_rate or LEARNING_RATES[config.task],
        mixup=config.mixup,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        schedule=config.schedule,
        warmup=config.warmup,
        holdout=config.holdout,
        patience=config.patience or None,
        seed=config.seed,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = _head(config, ask_for_head).to(device) if config.task == "causal-lm" else None
    return SideTuning(network, training, config.scope, CacheReader(cache, intake.namespace, intake.width), head, device)


def _head(config: RunConfig, ask_for_head: Callable[[], BackboneHead]) -> BackboneHead:
    spec = server_backbone(config)
    return load_head(spec) if spec is not None else ask_for_head()


def make_settings(config: RunConfig, intake: Intake) -> SideTunedSettings:
    """What an exported side network must say of itself."""
    return SideTunedSettings(
        backbone=config.backbone,
        fingerprint=intake.fingerprint,
        task=config.task,
        taps=intake.taps,
        token_rule=intake.token_rule,
        label_names=intake.label_names,
        max_length=intake.max_length,
    )
