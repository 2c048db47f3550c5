"""Tiny random models of every family, as Hugging Face folders that transformers writes, and random batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

COMMON = {
    "hidden_size": 128,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # tensor parallel 4 has more ranks than groups
    "max_position_embeddings": 512,
    "vocab_size": 101,  # odd: every layout must pad it
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 5e5, "original_max_position_embeddings": 8192, **LLAMA3_ROPE},
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    # A key head for each rank of the largest layout. By default transformers' embedding of token 1 has no gradient.
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 4, "pad_token_id": None},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 64, "pad_token_id": None},
    # One layer of three has no window. The embedding of a padding token would have no gradient.
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 64,
        "query_pre_attn_scalar": 100,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": None,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
}


def make_model(folder: Path, family: str = "qwen2", *, seed: int = 0, std: float = 0.06, **changes: Any) -> Path:
    """Write a random float32 model. Norms and biases are not 1 and 0, so that a test notices a missing one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = randomise(model, seed, std)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # large enough to change which experts are chosen
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a folder, by the names of the model: of gpt-oss, those of each expert alone."""
    from grpo_megatron.models.weights.hf_folder import SafetensorsFolder

    with SafetensorsFolder(folder) as files:
        return {name: files.read(name).contiguous() for name in files.tensors}


def make_classifier(
    folder: Path, kind: str, family: str, *, seed: int, score_std: float = 0.06, **changes: Any
) -> Path:
    """Write a random float32 model of transformers' AutoModelFor{kind}Classification, by default with one label."""
    import transformers

    settings = {**COMMON, **FAMILIES.get(family, {}), "num_labels": 1, **changes}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings, dtype="float32")
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config, dtype=torch.float32)
    randomise(model, seed, 0.06, score_std)
    model.save_pretrained(folder)
    return folder


def load_classifier(folder: Path) -> Any:
    """transformers' model of the class that config.json names. Every tensor of the folder is in it, and no other."""
    import transformers

    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    model, lost = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(lost[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), lost
    return model.eval()


def randomise(model: torch.nn.Module, seed: int, std: float, score_std: float | None = None) -> torch.Generator:
    """Sample all parameters: around 1 in norms (0 where they multiply by 1 + weight), around 0 elsewhere.

    `score_std`: of a score head. Returns the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            scale = score_std if score_std is not None and "score" in name else std
            parameter.copy_(parameter.mean().round() + 0.2 * noise if "norm" in name else scale * noise)
    return generator


def make_sequences(
    count: int = 6, *, seed: int = 0, vocab: int = 101, longest: int = 40
) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) pairs of various lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    pairs = []
    for _ in range(count):
        prompt = torch.randint(0, vocab, (draw(1, 12),), generator=generator).tolist()
        response = torch.randint(0, vocab, (draw(1, longest),), generator=generator).tolist()
        pairs.append((prompt, response))
    return pairs


def make_batch(
    pairs: list[tuple[list[int], list[int]]], mini_batches: Any, rows: list[int] | None = None, *, masked: bool = False
) -> Any:
    """A Batch of `rows` of the pairs. Advantages, weights and old logprobs are random, but depend only on the row.

    `masked`: about a third of the response tokens are not in the loss; every fifth row has no loss token. Where a token is
    not in the loss, the given log-probabilities are NaN.
    """
    from grpo_megatron.types import Batch

    rows = list(range(len(pairs))) if rows is None else rows
    width = max([len(pairs[r][1]) for r in rows], default=1)
    mask, loss_mask = (torch.zeros(len(rows), width, dtype=torch.bool) for _ in range(2))
    columns = {name: torch.zeros(len(rows), width) for name in ("rollout", "advantages", "weights", "old", "ref")}
    for i, row in enumerate(rows):
        n = len(pairs[row][1])
        mask[i, :n] = True
        generator = torch.Generator().manual_seed(1000 + row)
        draws = torch.randn(5, n, generator=generator)
        columns["rollout"][i, :n] = -4.6 + 0.1 * draws[0]
        columns["advantages"][i, :n] = draws[1, 0]
        columns["weights"][i, :n] = 1 / sum(len(r) for _, r in pairs)
        columns["old"][i, :n] = -4.6 + 0.3 * draws[3]
        columns["ref"][i, :n] = -4.6 + 0.3 * draws[4]
        loss_mask[i, :n] = (torch.rand(n, generator=generator) > 1 / 3) & (row % 5 != 4) if masked else True
    for name in ("rollout", "old", "ref"):
        columns[name][mask & ~loss_mask] = float("nan")
    return Batch(
        tokens=[torch.tensor(pairs[r][0] + pairs[r][1]) for r in rows],
        prompt_lengths=[len(pairs[r][0]) for r in rows],
        response_mask=mask,
        loss_mask=loss_mask,
        rollout_logprobs=columns["rollout"],
        advantages=columns["advantages"] * loss_mask,
        token_weights=columns["weights"] * loss_mask,
        mini_batches=mini_batches,
        old_logprobs=columns["old"],
        ref_logprobs=columns["ref"],
    )


def transformers_logprobs(
    folder: Path, pairs: list[tuple[list[int], list[int]]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probabilities of the response tokens by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = []
    with torch.no_grad():
        for prompt, response in pairs:
            logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
            logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            out.append(logp.gather(1, torch.tensor(response)[:, None]).squeeze(1))
    return out
