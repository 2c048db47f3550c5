"""Bench: a live engine, two sets of weights for it, and transformers' log-probabilities as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.building import KIND, build_rollout, describe_runner, mesh_of

VOCAB, EOS = 1000, tuple(range(3, 23))  # 2 % of the tokens end a response
MAX_MODEL_LEN = 1024
MODEL = {
    "hidden_size": 128 if KIND == "cpu" else 512,
    "intermediate_size": 128 if KIND == "cpu" else 1024,
    "num_hidden_layers": 2 if KIND == "cpu" else 4,
    "num_attention_heads": 4 if KIND == "cpu" else 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "eos_token_id": EOS[0],  # vLLM itself also stops at the one in config.json
}


@dataclass(frozen=True)
class Bounds:
    """`mean`, `worst`: |difference| of log-probabilities. `same`: the least share of requests that sample the same tokens
    where only other requests in the batch changed.

    In bfloat16 another batch rounds differently: a token's logits move by about 0.005, and the sample with them where two
    tokens are nearly tied. In float32 vLLM's attention on a GPU multiplies in TF32, whose relative step is 2**-10.
    """

    mean: float
    worst: float
    same: float


BOUNDS = {"bfloat16": Bounds(0.02, 0.25, 0.5), "float32": Bounds(1e-3, 0.02, 0.9)}


class Bench:
    """The engine is small: 256 tokens per step, and room for about 4000 tokens in the key-value cache."""

    def __init__(self, folder: Path, dtype: str, enforce_eager: bool) -> None:
        from transformers import AutoModelForCausalLM

        from grpo_megatron.device import Device

        self.device = Device(KIND)  # type: ignore[arg-type]
        self.bounds = BOUNDS[dtype]
        loaded: Any = [AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)) for _ in range(2)]
        generator = torch.Generator().manual_seed(7)
        for parameter in loaded[1].parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.data += 0.5 * parameter.data.std() * noise
        self.models = [model.to(KIND).eval() for model in loaded]
        self.mesh = mesh_of(self.device)
        self.engine = build_rollout(
            folder,
            self.mesh,
            self.device,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
            enforce_eager=enforce_eager,
            max_num_batched_tokens=256,
            engine_kwargs={} if KIND == "cpu" else {"num_gpu_blocks_override": 256},
            engine_options={"kv_cache_gib": 0.01} if KIND == "cpu" else {},
        )
        self.runner = describe_runner(self.engine._llm)
        self.version = 0

    def push(self, number: int, size: int = 5, backwards: bool = False) -> None:
        """Load the weights of model `number`, in buckets that separate q, k, v and gate, up."""
        self.version += 1
        self.engine.load_weights(iter(self.buckets(number, size, backwards)), self.version)

    def buckets(self, number: int, size: int = 5, backwards: bool = False) -> list[list[tuple[str, torch.Tensor]]]:
        items = [(name, tensor.detach().clone()) for name, tensor in self.models[number].state_dict().items()]
        items = items[::-1] if backwards else items
        return [items[i : i + size] for i in range(0, len(items), size)]

    def draw(self, requests: list[Any]) -> list[Any]:
        return self.engine.generate(requests, self.engine.version)

    def raw(self, requests: list[Any], params: list[Any] | None = None) -> list[Any]:
        """vLLM's own outputs of the requests that finish, which say how much of a prompt was in the cache."""
        engine, queue = self.engine._llm.llm_engine, self.engine._queue
        params = params or [queue.params(request) for request in requests]
        for number, (request, one) in enumerate(zip(requests, params, strict=True)):
            engine.add_request(str(number), queue.inputs.prompt(list(request.prompt_ids), ()), one)
        outputs: dict[int, Any] = {}
        while engine.has_unfinished_requests():
            outputs |= {int(output.request_id): output for output in engine.step() if output.finished}
        return [outputs[number] for number in sorted(outputs)]

    # -- the reference -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exact(self, number: int, request: Any, response: list[int]) -> torch.Tensor:
        """[R] log-probabilities of `response` under the distribution that `request` asks for."""
        ids = torch.tensor([[*request.prompt_ids, *response]], device=KIND)
        logits = self.models[number](ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        if request.temperature != 0:  # greedy samples have the plain distribution's log-probabilities
            logits = processed(logits / request.temperature, request.top_k, request.top_p)
        return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0].cpu()

    def compare(self, number: int, requests: list[Any], completions: list[Any]) -> dict[str, float]:
        """Differences over all tokens. "outside": the share of tokens that the reference would not sample at all, because
        top_k or top_p leave them out; at their border both sides may round to different sides."""
        parts = []
        for request, completion in zip(requests, completions, strict=True):
            assert len(completion.logprobs) == len(completion.response_ids) > 0
            parts.append(torch.tensor(completion.logprobs) - self.exact(number, request, completion.response_ids))
        differences = torch.cat(parts)
        inside = differences.isfinite()
        assert inside.any(), "no sampled token has a finite log-probability in the reference"
        kept = differences[inside].abs()
        return {"mean": kept.mean().item(), "max": kept.max().item(), "outside": 1 - inside.float().mean().item()}

    def agree(self, number: int, requests: list[Any], factor: float = 1.0) -> dict[str, float]:
        """Draw, and require the reference's log-probabilities within `factor` times the bounds."""
        found = self.compare(number, requests, self.draw(requests))
        self.require(found, factor)
        return found

    def require(self, found: dict[str, float], factor: float = 1.0) -> None:
        assert found["outside"] <= 0.02 * factor, found
        assert found["mean"] <= factor * self.bounds.mean and found["max"] <= factor * self.bounds.worst, found


def processed(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[R, V] with -inf where top_k, then top_p, leave a token out: the least probable ones up to 1 - top_p in sum."""
    if top_k > 0:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(dim=-1)
        out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        out[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(out).scatter(1, index, out), -torch.inf)
    return logits


def requests(count: int = 16, **changes: Any) -> list[Any]:
    """Prompts of 1 to 12 tokens, shorter than a block of the cache; a seed for each."""
    from grpo_megatron.rollout.engine import Request, sample_seed

    return [
        Request(
            tuple((37 * i + 13 * t + 100) % VOCAB for t in range(1 + i % 12)),
            sample_seed(0, 0, f"prompt {i}", 0),
            **{"max_tokens": 24, **changes},
        )
        for i in range(count)
    ]


def long_prompt(length: int, start: int = 50) -> tuple[int, ...]:
    return tuple((start + 7 * t + t * t) % (VOCAB - 50) + 50 for t in range(length))


def share_of_same(one: list[Any], other: list[Any]) -> float:
    """Share of requests whose tokens are the same in both."""
    pairs = list(zip(one, other, strict=True))
    return sum(a.response_ids == b.response_ids for a, b in pairs) / len(pairs)
