"""Tiny random models, and transformers' log-probabilities of them as the reference.

Weights are large (standard deviation 0.08 to 0.15), so that logits spread over several units. With the usual 0.02 every
token has log-probability -log(V), and a conversion mistake would not show. vLLM's attention on CPU needs head sizes that
are multiples of 32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, EOS = 160, [7, 11]  # 160: not a multiple of vLLM's padding of 64
MAX_MODEL_LEN = 384

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config(kind: str) -> Any:
    if kind == "qwen2":
        made = transformers.Qwen2Config(**{**_COMMON, "num_attention_heads": 2}, tie_word_embeddings=False)
    else:
        made = transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True)
    made.architectures = ["Qwen2ForCausalLM" if kind == "qwen2" else "LlamaForCausalLM"]
    return made


def write_folder(kind: str, folder: Path) -> str:
    """A model folder with only a config.json: the engine must not need more."""
    config(kind).save_pretrained(folder)
    return str(folder)


def model(kind: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32).eval()
        for name, parameter in made.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.data = 1 + 0.1 * noise if "norm" in name else noise * (0.15 if "embed" in name else 0.08)
    made.tie_weights()
    return made


def weights(made: Any) -> dict[str, torch.Tensor]:
    """Name -> tensor as in a checkpoint: without lm_head if the embeddings are tied."""
    state = {name: tensor.detach() for name, tensor in made.state_dict().items()}
    if made.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def buckets(made: Any, size: int = 5) -> list[list[tuple[str, torch.Tensor]]]:
    """The weights in buckets that separate q, k, v and gate, up. Every tensor owns its memory."""
    items = [(name, tensor.clone()) for name, tensor in weights(made).items()]
    return [items[i : i + size] for i in range(0, len(items), size)]


@torch.no_grad()
def logprobs(made: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[R]: log-probabilities of `response` after `prompt`, by transformers."""
    ids = torch.tensor([[*prompt, *response]])
    logits = made(ids).logits[0, len(prompt) - 1 : -1] / temperature  # [R, V]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def assert_close(got: list[float], expected: torch.Tensor) -> None:
    """The project's bounds in float32: mean 1e-6, max 1e-5."""
    error = (torch.tensor(got) - expected).abs()
    assert len(got) == len(expected) and error.isfinite().all()
    assert error.mean() <= 1e-6 and error.max() <= 1e-5, f"mean {error.mean():.2e}, max {error.max():.2e}"
