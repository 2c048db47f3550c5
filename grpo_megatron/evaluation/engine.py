"""The rollout engine with the weights of a folder, without a training model. Evaluation and `generate` draw with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig, RolloutConfig
from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.source import Source
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.device import Device
from grpo_megatron.evaluation.weights import stream_weights
from grpo_megatron.models.weights.sync_parameters import engine_tensors
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.rollout.build import build_engine, find_engine
from grpo_megatron.rollout.engine import RolloutEngine

WEIGHTS_VERSION = 0  # the weights never change
BUCKET_BYTES = 512 << 20
OPTION_OF_KEY = {
    "model.tokenizer_path": "--tokenizer",
    "model.path": "--model",
    "data.chat_template": "--chat-template",
}


@dataclass(frozen=True)
class EngineOptions:
    """Layout and memory of the engine. They are not part of the identity of a run."""

    tp: int = 1
    device: str = "auto"
    batch_size: int = 2048  # requests between two writes of the ledger
    max_num_seqs: int = 256
    kv_cache_gib: int = 1
    gpu_memory_utilization: float = 0.9


def load_engine(
    source: Source,
    mesh: Mesh,
    device: Device,
    options: EngineOptions,
    *,
    dtype: str,
    max_model_len: int,
    eos_token_ids: Sequence[int],
    seed: int,
    engine_kwargs: Mapping[str, Any],
) -> RolloutEngine:
    """The engine with the model's weights. Collective. Raises RankError when the weights cannot be read."""
    rollout = RolloutConfig(
        seed=seed % 2**31,
        tensor_model_parallel_size=options.tp,
        gpu_memory_utilization=options.gpu_memory_utilization,
        engine_options={"kv_cache_gib": options.kv_cache_gib},
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(8192, options.max_num_seqs),
        free_cache_engine=False,  # no training model needs the memory
        engine_kwargs=dict(engine_kwargs),
    )
    engine = build_engine(
        rollout,
        source.hf_folder,
        mesh,
        device,
        dtype=dtype,
        max_model_len=max_model_len,
        eos_token_ids=list(eos_token_ids),
        tensors=engine_tensors(source.arch, options.tp, reads_shards=find_engine(rollout.engine).reads_shards),
    )
    try:
        engine.load_weights(stream_weights(source, dtype, device.torch_device, BUCKET_BYTES), WEIGHTS_VERSION)
    except ConvertError as error:
        raise RankError(f"cannot read the weights: {error}") from error
    return engine


def model_tokenizer(source: Source, folder: Path | None, chat_template: Path | None) -> Any:
    """The tokenizer in `folder`, or else the model's own. Raises ConfigError, which names the command line's options."""
    folder = folder or source.hf_folder
    try:
        tokenizer = load_tokenizer(folder, DataConfig(chat_template=chat_template))
    except ConfigError as error:
        text = str(error)
        for key, option in OPTION_OF_KEY.items():
            text = text.replace(key, option)
        raise ConfigError(text) from error
    if len(tokenizer) > source.arch.vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens and the model's embedding"
            f" {source.arch.vocab_size} rows; set --tokenizer to the model's own"
        )
    return tokenizer
