"""``query.profile``: what a device has, before any work is asked of it."""

from flwr.app import Context

from flower_plugin.backbone import BackboneInfo, describe, fingerprint, load_tokenizer
from flower_plugin.config import RunConfig
from flower_plugin.errors import ConfigError
from flower_plugin.messages import Profile, ProfileRequest
from flower_plugin.side.examples import template_id
from flower_plugin.version import VERSION

from .device import device_config, open_device
from .samples import load_samples


def profile(request: ProfileRequest, context: Context) -> Profile:
    """Describe the device: identity, backbone, the digests of its samples, its classes. No forward pass.

    Raises
    ------
    ConfigError
        'max-length' is more than the backbone can read.
    """
    config = device_config(request.config, context.node_config)
    device = open_device(context.node_config)
    tokenizer = load_tokenizer(config.backbone)
    info = describe(config.backbone)
    _require_positions(config, info)
    samples = load_samples(config, context, device, tokenizer, ())
    train, test = samples.train(), samples.test()
    return Profile(
        tenant=device.tenant,
        order=device.partition,
        plugin_version=VERSION,
        fingerprint=fingerprint(config.backbone),
        model_type=info.model_type,
        num_blocks=info.num_blocks,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        template=template_id(tokenizer, config.task, template=config.template or None),
        digests=tuple(example.digest for example in train.kept),
        num_test=len(test.kept),
        label_names=samples.label_names,
        truncated=train.truncated,
        unusable=train.empty + train.without_loss + train.bad_label,
        duplicates=train.duplicates,
    )


def _require_positions(config: RunConfig, info: BackboneInfo) -> None:
    if info.max_tokens is not None and config.max_length > info.max_tokens:
        raise ConfigError(
            f"'max-length' = {config.max_length}, but the backbone {config.backbone!r} ({info.model_type}) has"
            f" positions for {info.max_tokens} tokens only; lower 'max-length' to {info.max_tokens} or less"
        )
