"""Random bfloat16 models in the shapes of Qwen2.5, for measurements of memory and speed. Quick to make; they know nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from tests.gpu.building import ON_CPU

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
QWEN_HALF_B = {
    **QWEN,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
QWEN_ONE_AND_A_HALF_B = {
    **QWEN,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}


def write_random_model(folder: Path, config: dict[str, Any], std: float = 0.02) -> Path:
    """Write config.json and model.safetensors. All tensors are cut from one block of noise: drawing billions takes minutes."""
    from safetensors.torch import save_file

    from grpo_megatron.models.families import architecture_of, hf_shapes

    config = {**config, **(_TINY if ON_CPU else {})}
    noise = (std * torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    tensors = {}
    for number, (name, shape) in enumerate(hf_shapes(architecture_of(config)).items()):
        if len(shape) == 1:
            tensors[name] = (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.bfloat16)
            continue
        size = math.prod(shape)
        shifted = noise.roll(number * 4099)
        tensors[name] = shifted.repeat(-(-size // len(noise)))[:size].reshape(shape).clone()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
