"""A tiny service: its config, data of the protocol, and its requests in the client's exact form, without the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from grpo_megatron.service.losses import NEEDED
from grpo_megatron.service.wire import CLASSES, FLOAT32, INT64, WireDatum
from tests.runs import SIZES, write_tokenizer
from tests.tiny import make_model

LORA = ["actor.lora.rank=6", "actor.lora.alpha=12"]


def make_service(folder: Path) -> Path:
    """Write a model and `folder`/serve.yaml, the config of a service that trains all weights. Returns the file."""
    make_model(folder / "model", "qwen2", **{**SIZES, "num_hidden_layers": 2})
    write_tokenizer(folder / "model")
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"max_prompt_length": 24, "max_response_length": 24},
        "actor": {"ppo_max_token_len_per_gpu": 64},
        "rollout": {"engine": "transformers"},
        "trainer": {"device": "cpu", "output_dir": str(folder / "out")},
        "service": {"port": 0, "base_model": "tiny"},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    return folder / "serve.yaml"


def make_data(count: int, loss: str, seed: int = 0) -> list[WireDatum]:
    """Data of different lengths, with tokens outside the loss, whose targets are not the next tokens."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(count):
        size = int(torch.randint(1, 30, (), generator=generator))
        tokens = torch.randint(0, SIZES["vocab_size"], (size + 1,), generator=generator).numpy()
        masked = size // 3
        targets = tokens[1:].copy()
        targets[:masked] = 0
        columns = {
            "weights": torch.rand(size, generator=generator),
            "advantages": torch.randn(size, generator=generator),
            "logprobs": -4.6 + 0.3 * torch.randn(size, generator=generator),
            "sequence_ratio_mask": torch.ones(size),
        }
        for column in columns.values():
            column[:masked] = 0
        chosen = {name: column.numpy() for name, column in columns.items() if name in NEEDED[loss]}
        data.append(WireDatum(tokens[:-1], targets, chosen))
    return data


def pass_body(model_id: str, seq_id: int, data: list[WireDatum], loss: str, **changes: Any) -> bytes:
    """A ForwardBackwardRequest, as the client writes it. `changes`: fields of the message."""
    message = CLASSES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn=loss, **changes)
    for datum in data:
        part = message.data.add()
        part.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, column in {"target_tokens": datum.targets, **datum.columns}.items():
            tensor, is_int = part.loss_fn_inputs[name], name == "target_tokens"
            tensor.dtype = INT64 if is_int else FLOAT32
            tensor.dense = np.asarray(column, "<i8" if is_int else "<f4").tobytes()
            tensor.shape.append(len(column))
    return bytes(message.SerializeToString())
