"""The run of a soak: the tiny complete run of the end-to-end tests, with validation and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import tiny
from tests.e2e import run_ranks
from tests.soak.soak import SAVE_FREQ


def make_workspace(root: Path) -> Path:
    """Write data/ and model/ into `root`: the arithmetic task and an untrained two-layer model with its tokenizer."""
    from grpo_megatron.data.arithmetic import build_tokenizer, write_task

    (root / "data").mkdir(parents=True)
    write_task(root / "data", seed=0, num_train=64, num_val=16)
    tiny.make_model(root / "model", "qwen2-tied", num_hidden_layers=2, vocab_size=80, std=0.05)
    build_tokenizer().save_pretrained(root / "model")
    return root


def soak_settings(root: Path, output: Path, steps: int) -> dict[str, Any]:
    """Two data-parallel ranks. Dynamic sampling has left-over groups in every checkpoint."""
    trainer = {"total_training_steps": steps, "save_freq": SAVE_FREQ, "test_freq": 7, "save_hf_at_end": True}
    trainer |= {"logger": ["console", "jsonl"], "max_actor_ckpt_to_keep": 3}
    raw = run_ranks.settings(root, output, 2, trainer=trainer)
    raw["reward"] = {"function": "tests.e2e.rewards:parity_reward"}
    raw["algorithm"] = {"filter_groups": {"enable": True, "max_num_gen_batches": 2}}
    return raw
