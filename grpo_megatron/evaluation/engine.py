"""The rollout engine with the weights of a folder, without a training model. Evaluation and `generate` draw with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.config import ConfigError, DataConfig, RolloutConfig
from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import open_source
from grpo_megatron.convert.source import Source, dtype_name
from grpo_megatron.data.images import PROCESSOR_FILES, ImageFormat
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.device import Device, device_bytes
from grpo_megatron.evaluation.options import EngineOptions
from grpo_megatron.models.architecture import UnsupportedModel, engine_split_problems, fitting_sizes
from grpo_megatron.models.engine_cache import with_sequences
from grpo_megatron.models.families import read_config
from grpo_megatron.models.heads.reward_folder import WHAT
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import Mesh, RankError, build_mesh
from grpo_megatron.rollout.build import build_engine, find_engine
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.types import WeightBucket

# -- weights of a folder: whole tensors, in bounded buckets, as in a weight sync ---------------------------------------
# The folder is whatever the converter reads: a Hugging Face folder, a converted Megatron-Core checkpoint, a training step.
# Nothing is written. Every rank reads every tensor; with the page cache, a machine reads its disk only once.

EDGE_BYTES = 1 << 20  # read at the beginning and at the end of each file by `weights_sha256`


def open_model(path: Path, hf: Path | None = None, family: str | None = None) -> Source:
    """Open the policy in `path`; names and shapes of its tensors are checked. Raises ConfigError."""
    try:
        source = open_source(path, hf=hf, family=family)
        source.check_base()
    except (ConvertError, UnsupportedModel) as error:
        raise ConfigError(
            f"--model: {error}\n  (a Hugging Face folder with weights, a converted checkpoint, or a training step such as"
            " outputs/run/checkpoints/step_000020)"
        ) from error
    if source.head is not None:
        raise ConfigError(
            f"--model: {str(path)!r} is {WHAT[source.head]}. It generates no text; name the folder of a policy"
        )
    return source


def open_policy(options: EngineOptions) -> Source:
    """Open the policy that the options name. Raises ConfigError, also where the engine or `--tp` does not fit it."""
    source = open_model(options.model, options.hf, options.family)
    if source.arch.vision is not None and not find_engine(options.engine).reads_images:
        raise ConfigError(
            f"--engine {options.engine} serves no model that reads images, as {str(options.model)!r} does; set --engine vllm"
        )
    if split_problems := engine_split_problems(source.arch, options.tp):
        raise ConfigError(
            f"--tp {options.tp} cannot split the model {str(options.model)!r}: {', '.join(split_problems)}; set one of"
            f" {fitting_sizes(source.arch, engine_split_problems)}"
        )
    return source


def engine_dtype(source: Source, requested: str | None) -> str:
    """The dtype of the engine's computation; by default "float32" for a float32 model, "bfloat16" for all others."""
    if requested is not None:
        return requested
    return "float32" if set(source.dtypes.values()) == {torch.float32} else "bfloat16"


def stream_weights(source: Source, dtype: str, device: torch.device, bucket_bytes: int) -> Iterator[WeightBucket]:
    """Yield every tensor once, in `dtype` on `device` (constants in float32), in buckets of about `bucket_bytes`.

    Raises ConvertError at a tensor with non-finite values: no attestation follows, as it does in training.
    """
    dtypes = source.result_dtypes(getattr(torch, dtype))
    bucket: WeightBucket = []
    size = 0
    for name in source.shapes():
        whole = source.read(name).to(device, dtypes[name])
        if not torch.stack(torch.aminmax(whole)).isfinite().all():  # aminmax passes NaN on
            raise ConvertError(f"{name} has non-finite values")
        bucket.append((name, whole))
        size += whole.nbytes
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def weights_sha256(source: Source) -> str:
    """Hash config.json, the dtypes, and every weight file's name, size, beginning and end."""
    digest = hashlib.sha256((source.hf_folder / "config.json").read_bytes())
    digest.update(repr(sorted((name, dtype_name(dtype)) for name, dtype in source.dtypes.items())).encode())
    files = [p for folder in source.weight_folders for p in folder.iterdir() if p.suffix in (".safetensors", ".distcp")]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


WEIGHTS_VERSION = 0  # the weights never change
MOST_IMAGES = 1 << 10  # of a prompt: none is left out
TIMEOUT_S = 7 * 24 * 3600.0  # of a collective: ranks wait for the slowest one at the end of a task
BUCKET_BYTES = 512 << 20
OPTION_OF_KEY = {  # the option that stands for a key of a config
    "model.tokenizer_path": "--tokenizer",
    "model.path": "--model",
    "data.apply_chat_template=true": "--format chat",
    "data.apply_chat_template=false": "--format text",
    "data.apply_chat_template is false": "prompts are plain text here",
    "data.system_prompt": "--system-prompt",
    "data.chat_template": "--chat-template",
    "data.image_min_pixels": "--image-min-pixels",
    "data.image_max_pixels": "--image-max-pixels",
    "image_max_pixels, and image_min_pixels <= image_max_pixels": "--image-max-pixels, and --image-min-pixels below it",
}


def with_options(error: ValueError) -> ConfigError:
    """The error, with the command line's options instead of the keys of a config."""
    text = str(error)
    for key, option in OPTION_OF_KEY.items():
        text = text.replace(key, option)
    return ConfigError(text)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What was read for an engine. `max_model_len`: tokens of the longest prompt plus completion."""

    options: EngineOptions
    source: Source
    tokenizer: Any
    eos_token_ids: list[int]
    max_model_len: int
    dtype: str


def start_engine(settings: EngineSettings) -> tuple[RolloutEngine, Mesh, int]:
    """Build the engine with the model's weights, in the world that the environment describes. Collective.

    Returns the engine, the mesh, and the number of sequences that the engine decodes at a time.

    Raises RankError on every rank when the weights cannot be read. There is no clean-up after a failure: the other ranks may
    not reach it, so engine and process groups end with the process.
    """
    options, source = settings.options, settings.source
    device = Device(options.device)
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=options.tp, seed=options.seed, timeout_s=TIMEOUT_S)
    rollout = RolloutConfig(
        engine=options.engine,
        seed=options.seed % 2**31,
        tensor_model_parallel_size=options.tp,
        gpu_memory_utilization=options.gpu_memory_utilization,
        engine_options={"kv_cache_gib": options.kv_cache_gib} if options.engine == "vllm" else {},
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(8192, options.max_num_seqs or 0),
        free_cache_engine=False,  # no training model needs the memory
        engine_kwargs=dict(options.engine_kwargs),
    )
    memory = device_bytes(options.device)
    rollout = with_sequences(rollout, source.arch, settings.dtype, settings.max_model_len, mesh, memory)
    engine = build_engine(
        rollout,
        source.hf_folder,
        mesh,
        device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        eos_token_ids=settings.eos_token_ids,
        tensors=engine_tensors(source.arch, options.tp, reads_shards=find_engine(rollout.engine).reads_shards),
    )
    try:
        engine.load_weights(stream_weights(source, settings.dtype, device.torch_device, BUCKET_BYTES), WEIGHTS_VERSION)
    except ConvertError as error:
        raise RankError(f"cannot read the weights: {error}") from error
    return engine, mesh, rollout.sequences


def model_tokenizer(source: Source, options: EngineOptions, chat_template: Path | None, **limits: int | None) -> Any:
    """Load the tokenizer that the options name, or else the model's own, with the format of images if it reads any.

    `limits` (image_max_pixels, image_min_pixels) hold where the options have none. Raises ConfigError, which names the
    command line's options.
    """
    folder = options.tokenizer or source.tokenizer_folder
    for name in ("image_max_pixels", "image_min_pixels"):
        limits[name] = getattr(options, name) or limits.get(name)
    try:
        data = DataConfig(chat_template=chat_template, max_images=MOST_IMAGES, **limits)
        tokenizer = load_tokenizer(folder, data)
        if source.arch.vision is not None:
            own = source.tokenizer_folder  # of exported adapters: it has the run's limits
            place = own if any((own / name).exists() for name in PROCESSOR_FILES) else source.hf_folder
            tokenizer.image_format = ImageFormat.of(place, read_config(source.hf_folder), tokenizer, data)
    except ConfigError as error:
        raise with_options(error) from error
    if len(tokenizer) > source.arch.vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens and the model's embedding"
            f" {source.arch.vocab_size} rows; set --tokenizer to the model's own"
        )
    return tokenizer
