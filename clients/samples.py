"""A device's own samples, as the backbone reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING

from flwr.app import Context
from flwr.common.logger import log

from flower_plugin.config import RunConfig
from flower_plugin.data import ClientData, load_client_data
from flower_plugin.data.sample import Sample
from flower_plugin.errors import ConfigError
from flower_plugin.side.examples import Examples, build_examples

from .device import Device, data_options

NO_KEY = b""
"""Digests are plain content hashes: a server that holds activations could test a guessed text anyway."""


@dataclass(frozen=True)
class LocalSamples:
    """A device's samples and how they are tokenised.

    Attributes
    ----------
    data : ClientData
        The samples themselves.
    label_names : tuple of str
        Classes in the order of their indices; empty for a language model.
    """

    data: ClientData
    label_names: tuple[str, ...]
    config: RunConfig
    tokenizer: object

    def train(self) -> Examples:
        """Tokenised training samples."""
        return self._build(self.data.train)

    def test(self) -> Examples:
        """Tokenised held-out samples."""
        return self._build(self.data.test)

    def _build(self, samples: Sequence[Sample]) -> Examples:
        if self.config.task == "classification" and not self.label_names:
            if samples:
                raise ConfigError("the device's samples have no labels; name the label column, or set 'label-names'")
            return Examples(kept=(), template_id="none")
        examples = build_examples(
            samples,
            self.tokenizer,
            self.config.task,
            label_names=self.label_names or None,
            max_length=self.config.max_length,
            key=NO_KEY,
            template=self.config.template or None,
        )
        if examples.bad_label:
            log(
                WARNING,
                "%s samples are left out: their labels (%s) are not among the run's classes (%s)",
                examples.bad_label,
                ", ".join(examples.bad_labels),
                ", ".join(self.label_names),
            )
        if examples.truncated:
            log(WARNING, "%s samples are cut to %s tokens", examples.truncated, self.config.max_length)
        return examples


def load_samples(
    config: RunConfig, context: Context, device: Device, tokenizer: object, label_names: tuple[str, ...]
) -> LocalSamples:
    """Load the device's data.

    Parameters
    ----------
    label_names : tuple of str
        The run's classes. Empty: those that the run config, the data source or the samples name.
    """
    options = data_options(config, context.run_config, context.node_config)
    data = load_client_data(config.data, device.partition, device.num_partitions, options)
    if config.task == "causal-lm":
        return LocalSamples(data, (), config, tokenizer)
    names = label_names or config.class_names or data.label_names or data.labels_seen()
    return LocalSamples(data, tuple(names), config, tokenizer)
