"""A reward that raises or never returns loses only its samples. Metrics count them and show each component. The run goes on."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from tests import tiny, worlds
from tests.e2e import run_ranks
from tests.stored import metric_rows


def sentencepiece_folder(folder: Path) -> Path:
    """A Llama whose only tokenizer file is SentencePiece's tokenizer.model, of the kind that Llama 2 has."""
    from sentencepiece import SentencePieceTrainer

    tiny.make_model(folder, "llama2", num_hidden_layers=2, vocab_size=304, std=0.05)
    text, model = io.BytesIO(), folder / "tokenizer.model"
    SentencePieceTrainer.train(
        sentence_iterator=iter([f"{a}+{b}= {a + b}" for a in range(30) for b in range(30)]),
        model_writer=text,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model.write_bytes(text.getvalue())
    return folder


@pytest.mark.slow
def test_failing_rewards_do_not_stop_training(workspace: Path, tmp_path: Path) -> None:
    """From a folder that has only tokenizer.model. The ids are SentencePiece's own, and the result has that file too.

    The family is named as one of the user's own would be.
    """
    from sentencepiece import SentencePieceProcessor

    from grpo_megatron.config import DataConfig
    from grpo_megatron.data.tokenizer import load_tokenizer

    folder = sentencepiece_folder(tmp_path / "llama")
    model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer, text = load_tokenizer(folder, DataConfig()), "12+7= 19, 3 +4"
    assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text)
    assert tokenizer.decode(model.encode(text)) == text
    named = {"path": str(folder), "family": "tests.e2e.run_ranks:LLAMA"}
    changes = {"model": named, "data": {"max_prompt_length": 64}, "trainer": {"save_hf_at_end": True}}
    raw = run_ranks.settings(workspace, tmp_path, 2, **changes)
    component = {"name": "troubled", "function": "tests.e2e.rewards:troubled_reward"}
    gated = {"name": "tag_count", "weight": 0.0, "gate": {"component": "troubled", "min": 2.0}}
    # 2 s: on a busy machine the first call of a worker takes more than half a second.
    raw["reward"] = {"components": [component, gated], "timeout_s": 2.0, "num_workers": 2}
    raw["reward"]["max_failed_ratio"] = 1.0  # half of the samples fail, by chance some more
    raw["actor"] = {**raw["actor"], "use_kl_loss": False, "kl_loss_coef": 0.0}
    results = worlds.run(run_ranks.train, 2, raw=raw)
    rewards = [sample[-1] for step in run_ranks.all_samples(results).values() for sample in step]
    assert any(math.isnan(reward) for reward in rewards) and not all(math.isnan(reward) for reward in rewards)
    first, second = metric_rows(tmp_path)
    for row, step in zip((first, second), run_ranks.all_samples(results).values(), strict=True):
        failed = sum(math.isnan(sample[-1]) for sample in step) / len(step)
        scored = [sample[-1] for sample in step if not math.isnan(sample[-1])]
        assert row["reward/failed_ratio"] == pytest.approx(failed)
        assert row["reward/troubled/mean"] == pytest.approx(sum(scored) / len(scored))
        assert row["reward/tag_count/open/mean"] == pytest.approx(sum(value >= 2 for value in scored) / len(scored))
        assert row["critic/unscorable_ratio"] == pytest.approx(failed)
        assert row["actor/skipped_updates"] == 0
    assert first["reward/timeout_ratio"] + second["reward/timeout_ratio"] > 0
    assert (tmp_path / "hf/tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_every_rank(workspace: Path, tmp_path: Path) -> None:
    """Dynamic sampling would hide it: a group without rewards is replaced, ten times, and then the step is skipped."""
    raw = run_ranks.settings(workspace, tmp_path, 2, algorithm={"filter_groups": {"enable": True}})
    raw["reward"] = {"function": "tests.e2e.rewards:broken_reward"}
    with pytest.raises(AssertionError) as raised:
        worlds.run(run_ranks.train, 2, raw=raw)
    reports = str(raised.value).split("--- rank ")[1:]
    assert len(reports) == 2
    for rank, text in enumerate(reports):
        assert text.startswith(f"{rank} ---")
        assert "step 0: 18 of 18 samples (100 %) have no reward, more than reward.max_failed_ratio=0.5 allows" in text
        assert "reward 'tests.e2e.rewards:broken_reward': ValueError: never works" in text
    assert not (tmp_path / "metrics.jsonl").read_text()
