"""What the ranks of the GPU tests build: a policy, an engine, batches. With GRPO_GPU_TESTS_ON=cpu, on the CPU."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from tests.tiny import make_batch, make_sequences

KIND = "cpu" if os.environ.get("GRPO_GPU_TESTS_ON") == "cpu" else "cuda"
ON_CPU = KIND == "cpu"
VOCABULARY = 512 if ON_CPU else 32000
MIB = 2**20
_meshes: list[Any] = []


def mesh_of(device: Any, **sizes: int) -> Any:
    """The world's mesh. One process has one, which all its policies and its engine share."""
    from grpo_megatron.parallel.mesh import build_mesh

    if not _meshes:
        _meshes.append(build_mesh(device, **{"tp": 1, "pp": 1, "cp": 1, "rollout_tp": 1, **sizes}))
    return _meshes[0]


def build_policy(
    folder: Path,
    megatron: dict[str, Any],
    *,
    dtype: str = "bfloat16",
    lr: float = 1e-3,
    chunk: int = 2048,
    rollout_tp: int = 1,
    has_optimizer: bool = True,
    **actor_settings: Any,
) -> Any:
    """A policy on this rank's device."""
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy

    device = Device(KIND)  # type: ignore[arg-type]
    tp, cp = megatron.get("tensor_model_parallel_size", 1), megatron.get("context_parallel_size", 1)
    mesh = mesh_of(device, tp=tp, cp=cp, rollout_tp=rollout_tp)
    settings = {"megatron": megatron, "logprob_chunk_size": chunk, "optim": {"lr": lr}, **actor_settings}
    actor = ActorConfig.model_validate(settings)
    policy = Policy.load(folder, dtype, read_architecture(folder), actor, mesh, device)
    if has_optimizer:
        policy.set_optimizer(actor.optim, 1)
    return policy


def build_rollout(
    folder: Path,
    mesh: Any,
    device: Any,
    *,
    dtype: str = "bfloat16",
    max_model_len: int = 1024,
    eos_token_ids: tuple[int, ...] = (2,),
    **rollout: Any,
) -> Any:
    """The project's engine for the model in `folder`, with the settings `rollout`."""
    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.rollout.build import build_engine

    settings: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_num_seqs": 64, **rollout}
    if ON_CPU:
        settings["engine_options"] = {"kv_cache_gib": 0.1, **settings.get("engine_options", {})}
    return build_engine(
        RolloutConfig.model_validate(settings),
        folder,
        mesh,
        device,
        dtype=dtype,
        max_model_len=max_model_len,
        eos_token_ids=list(eos_token_ids),
        tensors=engine_tensors(read_architecture(folder), mesh.rollout_tp, reads_shards=True),
    )


def sequences(count: int, longest: int) -> Any:
    return make_sequences(count, vocab=VOCABULARY, longest=longest)


def batch_with_images(rows: Any) -> Any:
    """A batch of (prompt ids, images, response) of tests/vision.py."""
    batch = whole_batch([(prompt, response) for prompt, _, response in rows])
    batch.images = [images for _, images, _ in rows]
    return batch


TRAINED_TOWER: dict[str, Any] = {"vision": {"freeze_tower": False, "freeze_merger": False}}


def whole_batch(pairs: Any, per_micro: int = 4) -> Any:
    rows = list(range(len(pairs)))
    return make_batch(pairs, [[rows[i : i + per_micro] for i in range(0, len(rows), per_micro)]])


def likelihood(inputs: Any) -> Any:
    """Mean negative log-likelihood of the batch's tokens: weights are 1 / tokens of the whole batch."""
    from grpo_megatron.algo.losses import MetricSum

    value = -(inputs.logprobs * inputs.token_weights * inputs.mask).sum()
    return value, {"loss": MetricSum(value.detach(), None)}


def layer_class(policy: Any) -> str:
    """The class of the linear layers that were built."""
    from grpo_megatron.models.weights.stream import unwrapped

    inner: Any = unwrapped(policy.ddp)
    return type(inner.decoder.layers[0].self_attention.linear_qkv).__name__


def free_mib() -> float:
    """Free memory of the whole device, without torch's cache. 0 on the CPU."""
    if ON_CPU:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / MIB


def total_mib() -> float:
    return 0.0 if ON_CPU else torch.cuda.mem_get_info()[1] / MIB


def runner_name(engine: Any) -> str:
    """Which of vLLM's model runners the engine has. `vllm/v1/worker/gpu/` is the second."""
    return describe_runner(engine._llm)


def describe_runner(llm: Any) -> str:
    """The runner of a vllm.LLM and what else decides which kernels generate the tokens."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    module = type(runner).__module__
    number = "second" if ".worker.gpu." in module else "first"
    config = llm.llm_engine.vllm_config
    graphs = "eager" if config.model_config.enforce_eager else "CUDA graphs"
    asynchronous = "async" if config.scheduler_config.async_scheduling else "synchronous"
    return f"{number} runner ({module.removeprefix('vllm.v1.worker.')}), {graphs}, {asynchronous} scheduling"


# -- random bfloat16 models in the shapes of Qwen2.5 -------------------------------------------------------------------

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
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}


def write_random_model(folder: Path, config: dict[str, Any], std: float = 0.02) -> Path:
    """Write config.json and model.safetensors. All tensors are cut from one block of noise: sampling billions takes minutes."""
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


# -- comparing two runs of `logprobs_and_gradients` --------------------------------------------------------------------


def mean_error(got: dict[str, Any], exact: dict[str, Any]) -> float:
    return float((got["logprobs"] - exact["logprobs"])[exact["mask"]].abs().mean())


def worst_angle(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The smallest cosine between two gradients of one parameter, and the parameter's name."""
    assert got.keys() == exact.keys()
    pairs = {
        n: (got[n].double().flatten(), exact[n].double().flatten()) for n in exact
    }  # float32 sums lose three digits
    cosines = {n: torch.cosine_similarity(*pair, dim=0).item() for n, pair in pairs.items()}
    name = min(cosines, key=lambda n: cosines[n])
    return cosines[name], name
