"""The inputs of a small valid run: model folder with weights and tokenizer, data files, and the YAML that names them."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import make_model

VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "+", "=", "user", "assistant"]
SIZES = {  # the messages under test contain these numbers
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,  # vLLM on the CPU has no smaller ones
    "max_position_embeddings": 128,
    "vocab_size": 101,
}


def write_tokenizer(folder: Path, vocabulary: list[str] | None = None, **changes: Any) -> None:
    """Write a word-level fast tokenizer of transformers. `changes` replace the special tokens or add a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = vocabulary or VOCABULARY
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **changes}).save_pretrained(folder)


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write a line per row: its JSON, or a text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def make_run(folder: Path) -> Path:
    """Write everything into `folder` and return it. `folder`/run.yaml is the config of a run on two ranks."""
    make_model(folder / "model", "qwen2", **SIZES)
    write_tokenizer(folder / "model")
    write_rows(folder / "train.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9)])
    write_rows(folder / "val.jsonl", [{"prompt": f"{n} + 2 =", "answer": str(n + 2)} for n in range(4)])
    write_rows(folder / "sft.jsonl", [{"prompt": f"{n} + 3 =", "response": str(n + 3)} for n in range(5)])
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "task": "arithmetic",
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "val.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 16,
            "apply_chat_template": False,
        },
        "sft": {"train_files": [str(folder / "sft.jsonl")]},
        "rollout": {"n": 4},
        "trainer": {"total_training_steps": 4, "n_gpus_per_node": 2, "device": "cpu"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def texts(problems: Iterable[object]) -> list[str]:
    """The problems of a check, as a user reads them."""
    return [str(problem).replace("\0", "") for problem in problems]  # without the marks of keys


STAND_INS = """
import os, sys, types

if os.environ.get("RANK") or "grpo_megatron" in sys.orig_argv or "forkserver" in str(sys.orig_argv):

    class Checked:
        def __init__(self, config, *_, **__):
            self.config = config

    class Trainer:
        def __init__(self, config, checked, profiled, last_step=None):
            assert isinstance(checked, Checked)

        def run(self):
{body}

    stand_ins = {{
        "trainer": {{"Trainer": Trainer}},
        "checks.validate": {{"validate": Checked, "RunStart": lambda *a: None}},
        "rollout.vllm.process": {{"preload": lambda: None}},
    }}
    for name, content in stand_ins.items():
        sys.modules[f"grpo_megatron.{{name}}"] = module = types.ModuleType(name)
        module.__dict__.update(content)
"""


def stand_in_trainer(folder: Path, body: str) -> None:
    """With `folder` on PYTHONPATH, the ranks of a training program run `body` instead of the trainer, without validation."""
    (folder / "sitecustomize.py").write_text(STAND_INS.format(body=textwrap.indent(textwrap.dedent(body), " " * 12)))


def cases(table: str, **short: str) -> list[tuple[list[str], list[str]]]:
    """Reads (overrides, parts of the message) of lines `a=1 b=2 => one part | another`; indented lines go on.

    `short`: words that stand for others. Lines with # are comments.
    """
    found = []
    for line in table.replace("\n    ", " ").splitlines():
        for word, text in short.items():
            line = re.sub(rf"\b{word}\b", text, line)
        overrides, arrow, message = f"{line} ".partition(" => ")
        if arrow:
            found.append((shlex.split(overrides), [part.strip() for part in message.split(" | ") if part.strip()]))
    return found
