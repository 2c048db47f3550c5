from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and model/: the arithmetic task and an untrained two-layer model with its tokenizer."""
    from grpo_megatron.data.arithmetic import build_tokenizer, write_task

    root = tmp_path_factory.mktemp("e2e")
    (root / "data").mkdir()
    write_task(root / "data", seed=0, num_train=64, num_val=16)
    tiny.make_model(root / "model", "qwen2-tied", num_hidden_layers=2, vocab_size=80, std=0.05)
    build_tokenizer().save_pretrained(root / "model")
    return root
