"""The seed of a sample, the checks on a stream of weights, and stop texts against their definition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_megatron.rollout.engine import StopTexts, load_verified, sample_seed
from grpo_megatron.sync.plan import SyncTensor
from grpo_megatron.types import WeightBucket


def test_sample_seed_is_pinned_and_depends_on_every_part() -> None:
    # These numbers are part of every run's reproducibility: a change breaks "same seed, same samples" across versions.
    assert sample_seed(42, 0, "gsm8k/0", 0) == 499574819456255684
    assert sample_seed(42, 0, "gsm8k/0", 1) == 338707986814240596
    seeds = {
        sample_seed(run_seed, step, uid, index)
        for run_seed in range(5)
        for step in range(10)
        for uid in ("a", "b", "1", "a, 1")
        for index in range(20)
    }
    assert len(seeds) == 5 * 10 * 4 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (
        len({seed % 2**32 for seed in seeds}) > 3990
    )  # a CPU generator keeps 32 bits; 4000 samples collide 0.002 times
    assert len({sample_seed(1, 11, "a", 1), sample_seed(11, 1, "a", 1), sample_seed(1, 1, "1a", 1)}) == 3


# -- the checks on a stream of weights ---------------------------------------------------------------------------------


SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, SyncTensor]:
    return {name: SyncTensor(name, shape, 0) for name, shape in shapes.items()}


GOOD: list[list[str] | None] = [["a"], ["b", "c"]]
STREAMS: dict[str, tuple[list[list[str] | None], str | None, int, int]] = {
    # name: the buckets (None: the stream raises), the problem, buckets loaded, buckets read
    "good": (GOOD, None, 2, 2),
    "missing": ([["a"]], "2 of 3 tensors are missing, b, c", 1, 1),
    "raises": ([["a"], None], "KeyError: 'the stream broke'", 1, 1),
    "unknown": ([["a", "x"], ["b", "c"]], "x is not a tensor of this model", 0, 2),
    "repeated in a bucket": ([["a", "a", "y"]], "a arrived twice, y is not a tensor of this model", 0, 1),
    "another shape": ([["B"]], "b has shape (1, 4), not (4,)", 0, 1),
    "repeated": ([["a"], ["a"], ["b", "c"]], "a arrived twice", 1, 3),
    "raises after a problem": ([["x"], ["a"], None], "x is not a tensor of this model", 0, 2),
    "an empty bucket": ([[], *GOOD], None, 3, 3),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_read_to_its_end_and_loaded_up_to_the_first_problem(name: str) -> None:
    buckets, problem, num_loaded, num_read = STREAMS[name]
    read: list[WeightBucket] = []
    loaded: list[WeightBucket] = []

    def stream() -> Iterator[WeightBucket]:
        for names in buckets:
            if names is None:
                raise KeyError("the stream broke")
            read.append([(n.lower(), torch.zeros((1, 4) if n == "B" else SHAPES.get(n, (1,)))) for n in names])
            yield read[-1]

    assert load_verified(stream(), tensors(SHAPES), loaded.append) == problem  # type: ignore[arg-type]
    assert (len(loaded), len(read)) == (num_loaded, num_read)


def test_nothing_is_loaded_after_a_failure_of_the_engine_and_a_long_list_of_problems_is_short() -> None:
    loaded: list[WeightBucket] = []

    def load(bucket: WeightBucket) -> str | None:
        loaded.append(bucket)
        return "no room"

    stream = [[(name, torch.zeros(shape))] for name, shape in SHAPES.items()]
    assert load_verified(iter(stream), tensors(SHAPES), load) == "no room" and len(loaded) == 1
    assert load_verified(iter(stream), tensors(SHAPES), load, "asleep") == "asleep" and len(loaded) == 1
    problem = load_verified(iter([]), tensors({f"layer.{i}": (1,) for i in range(50)}), lambda bucket: None)
    assert problem is not None and problem.endswith("layer.9, and 40 more") and problem.startswith("50 of 50")


# -- StopTexts against its definition ----------------------------------------------------------------------------------


TEXT = (
    'Question: is 7 + 5 = 12?\n\nAnswer: don\'t know. "Ja, gr\xf6\xdfer" <tool_call>{"a": 1}</tool_call>'
    " \u4f60\u597d\u4e16\u754c \U0001f44d\U0001f3fd ... \n###\n"
)
SPECIAL = ["<eos>", "<|im_end|>"]


def trained(kind: str) -> Any:
    if "byte-level" in kind:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL)
    elif kind == "metaspace":  # SentencePiece: the first token's leading space is dropped; unknown characters are bytes
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
                *(decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)),
            ]
        )
        bytes_ = [f"<0x{value:02X}>" for value in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=[*SPECIAL, "<unk>"], initial_alphabet=[])
        tokenizer.add_tokens(bytes_)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=140, special_tokens=[*SPECIAL, "<unk>"])
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        extra_special_tokens=["<|im_end|>"],
        clean_up_tokenization_spaces="cleaned" in kind,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output="cleaned" in kind,
    )


def first_by_definition(tokenizer: Any, texts: list[str], ids: list[int]) -> int | None:
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        if any(stop in text for stop in texts):
            return length
    return None


def first_found(stop: StopTexts, ids: list[int]) -> int | None:
    return next((length for length in range(1, len(ids) + 1) if stop.completed_by(ids[:length])), None)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "wordpiece", "cleaned wordpiece"])
def test_the_token_that_completes_a_text_is_found_by_every_tokenizer(kind: str) -> None:
    tokenizer, generator = trained(kind), random.Random(0)
    real = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = 0
    for _ in range(300):
        ids = []
        while len(ids) < 60:
            start = generator.randrange(len(real))
            ids += real[start : start + generator.randint(1, 12)]
            ids += generator.choices(range(len(tokenizer)), k=generator.choice([0, 0, 1, 3]))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        starts = [generator.randrange(len(text) // 4, len(text)) for _ in range(generator.randint(1, 2))]
        stops = [text[s : s + generator.randint(1, 9)].replace("\N{REPLACEMENT CHARACTER}", "") or "?" for s in starts]
        stop = StopTexts(tokenizer, stops)
        expected = first_by_definition(tokenizer, stops, ids)
        assert first_found(stop, ids) == expected, (stops, ids)
        found += expected is not None
    assert found > 200


THUMB = "\U0001f44d\u4f60"  # seven bytes
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
RARE: dict[str, tuple[str, str, list[str]]] = {
    # tokenizer, stop text, tokens (bytes of one character are written as Latin-1), the last of which completes it
    "characters of several bytes": (
        "byte-level",
        THUMB + "bc",
        ["x"] * 20 + [*THUMB.encode().decode("latin-1"), "b", "c"],
    ),
    "special tokens in between": ("byte-level", "ab", ["x"] * 20 + ["a"] + ["<eos>"] * 50 + ["b"]),
    "special tokens before a long token": ("byte-level", "xa", ["q"] * 20 + ["x"] + ["<eos>"] * 50 + [ALPHABET]),
    "a space that the clean-up removes": ("cleaned byte-level", "on", ["x", "d", "o", " ", "n", "'", "t"]),
    "a text of two tokens that is also one": ("byte-level", "??", ["?", "?"]),
}


@pytest.mark.parametrize("case", RARE)
def test_rare_ways_to_complete_a_text(case: str) -> None:
    kind, text, tokens = RARE[case]
    tokenizer = trained(kind)
    tokenizer.add_tokens([ALPHABET, "??"])
    of_byte, vocabulary = bytes_to_unicode(), tokenizer.get_vocab()
    ids = [vocabulary[of_byte[ord(token)] if len(token) == 1 else token] for token in tokens]
    assert first_by_definition(tokenizer, [text], ids) == len(ids)
    assert first_found(StopTexts(tokenizer, [text]), ids) == len(ids)


def test_what_only_the_beginning_of_a_window_decodes_to_is_no_text() -> None:
    tokenizer = trained("wordpiece")
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary["a"], *[vocabulary["##e"]] * 30]
    assert "##" in tokenizer.decode(ids[10:]) and "##" not in tokenizer.decode(ids)
    assert first_found(StopTexts(tokenizer, ["##"]), ids) is None


def test_most_tokens_are_ruled_out_without_decoding_the_response() -> None:
    tokenizer = trained("byte-level")
    stop = StopTexts(tokenizer, ["</tool_call>"])
    ids = tokenizer(TEXT.replace("</tool_call>", "") * 20)["input_ids"]
    assert first_found(stop, ids) is None
    decoded: list[int] = []
    real = tokenizer.decode

    class Counting:
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            decoded.append(len(ids))
            return str(real(ids, **kwargs))

    stop._tokenizer = Counting()
    assert first_found(stop, ids) is None
    suspects = [token for token in ids if ">" in real([token])]
    assert 0 < len(decoded) <= 3 * len(suspects) < len(ids) / 2 and max(decoded) < 100


def test_texts_that_are_one_token_are_stopped_by_the_engine_itself() -> None:
    tokenizer = trained("byte-level")
    ids = tokenizer.get_vocab()
    stop = StopTexts(tokenizer, ["<|im_end|>", "Question:", "?"])
    assert stop.token_ids == (ids["<|im_end|>"], ids["?"])
    assert not stop.completed_by([ids["<|im_end|>"]])  # special tokens are no text
