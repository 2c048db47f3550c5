"""Ask: a model folder, prompts and sampling settings -> samples. `evaluate` and `generate` are made of it.

The engine and the generator are those of training, without a training model and without graders.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.config import ConfigError, DataConfig, MultiTurnConfig, RolloutConfig
from grpo_megatron.config.rollout import VLLM_CPU_HEADS
from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import open_source
from grpo_megatron.convert.source import Source, dtype_name
from grpo_megatron.data.images import PROCESSOR_FILES, ImageFormat
from grpo_megatron.data.prompts import check_tokenizer, encode_prompts, image_format
from grpo_megatron.data.tokenizer import TurnRenderer, load_tokenizer, read_end_tokens
from grpo_megatron.device import Device, count_cuda_devices, device_bytes
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.evaluation.ledger import Key
from grpo_megatron.evaluation.options import EngineOptions
from grpo_megatron.models.architecture import UnsupportedModel, engine_split_problems, fitting_sizes
from grpo_megatron.models.engine_cache import with_sequences
from grpo_megatron.models.families import read_config
from grpo_megatron.models.heads.reward_folder import WHAT
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import RankError, build_mesh, destroy_mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.build import build_engine, find_engine
from grpo_megatron.rollout.engine import RolloutEngine, Truncation
from grpo_megatron.sampling.generator import Generator, sample_indices
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, TrajectoryGenerator
from grpo_megatron.types import Prompt, PromptImage, Sample, WeightBucket

WEIGHTS_VERSION = 0  # the weights never change
MOST_IMAGES = 1 << 10  # of a prompt: none is left out
RUN_VALUES = (
    "chat_template_kwargs",
    "image_max_pixels",
    "image_min_pixels",
)  # of the section `data`: options' names, too
TIMEOUT_S = 7 * 24 * 3600.0  # of a collective: ranks wait for the slowest one at the end of a task
BUCKET_BYTES = 512 << 20
EDGE_BYTES = 1 << 20  # read at the beginning and at the end of each file by `weights_sha256`
OPTION_OF_KEY = {  # the option that stands for a key of a config
    "model.tokenizer_path": "--tokenizer",
    "model.path": "--model",
    "data.apply_chat_template=true": "--format chat",
    "data.apply_chat_template=false": "--format text",
    "data.apply_chat_template is false": "prompts are plain text here",
    "data.system_prompt": "--system-prompt",
    "data.chat_template_kwargs": "--chat-template-kwargs",
    "data.chat_template": "--chat-template",
    "data.image_min_pixels": "--image-min-pixels",
    "data.image_max_pixels": "--image-max-pixels",
    "image_max_pixels, and image_min_pixels <= image_max_pixels": "--image-max-pixels, and --image-min-pixels below it",
}


def with_options(error: ValueError) -> ConfigError:
    """Make the same error with the command line's options instead of the keys of a config."""
    text = str(error)
    for key, option in OPTION_OF_KEY.items():
        text = text.replace(key, option)
    return ConfigError(text)


# -- The model -----------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class AskedModel:
    """The policy that the options name, with its tokenizer and end tokens. `dtype`: of the engine's computation."""

    options: EngineOptions
    source: Source
    tokenizer: Any
    eos_token_ids: list[int]
    dtype: str

    @classmethod
    def read(cls, options: EngineOptions, chat_template: Path | None, **of_run: Any) -> AskedModel:
        """Read everything but the weights. `of_run`: see `model_tokenizer`. Raises ConfigError."""
        source = open_model(options.model, options.hf, options.family)
        if source.arch.vision is not None and not find_engine(options.engine).reads_images:
            raise ConfigError(
                f"--engine {options.engine} serves no model that reads images, as {str(options.model)!r} does; set"
                " --engine vllm"
            )
        heads = source.arch.head_dim
        on_cpu = options.engine == "vllm" and (options.device == "cpu" or count_cuda_devices() == 0)
        if on_cpu and source.arch.latent is None and heads not in VLLM_CPU_HEADS:
            raise ConfigError(
                f"--engine vllm on the CPU: its attention has heads of {', '.join(map(str, VLLM_CPU_HEADS))}, and the heads"
                f" of {str(options.model)!r} have {heads}; set --engine transformers"
            )
        if split_problems := engine_split_problems(source.arch, options.tp):
            raise ConfigError(
                f"--tp {options.tp} cannot split the model {str(options.model)!r}: {', '.join(split_problems)}; set one of"
                f" {fitting_sizes(source.arch, engine_split_problems)}"
            )
        tokenizer = model_tokenizer(source, options, chat_template, **of_run)
        ends = read_end_tokens(tokenizer, source.hf_folder, source.arch.vocab_size).ids
        return cls(options, source, tokenizer, ends, engine_dtype(source, options.dtype))

    @property
    def max_positions(self) -> int:
        """The most tokens of a sequence."""
        return self.source.arch.max_position_embeddings


def engine_dtype(source: Source, requested: str | None) -> str:
    """Choose the dtype of the engine's computation: by default "float32" for a float32 model, "bfloat16" for all others."""
    if requested is not None:
        return requested
    return "float32" if set(source.dtypes.values()) == {torch.float32} else "bfloat16"


def model_tokenizer(source: Source, options: EngineOptions, chat_template: Path | None, **of_run: Any) -> Any:
    """Load the tokenizer that the options name, or else the model's own, with the format of images if it reads any.

    `of_run`: values of a run's section `data` (RUN_VALUES), where the options have none. Raises ConfigError, which names
    the command line's options.
    """
    folder = options.tokenizer or source.tokenizer_folder
    values = {name: getattr(options, name) or of_run.get(name) for name in RUN_VALUES}
    values = {name: value for name, value in values.items() if value}
    try:
        data = DataConfig(chat_template=chat_template, max_images=MOST_IMAGES, **values)
        tokenizer = load_tokenizer(folder, data)
        if source.arch.vision is not None:
            place = source.tokenizer_folder  # of exported adapters: it has the run's limits
            if not any((place / name).exists() for name in PROCESSOR_FILES):
                place = source.hf_folder
            tokenizer.image_format = ImageFormat.of(place, read_config(source.hf_folder), tokenizer, data)
    except ConfigError as error:
        raise with_options(error) from error
    if len(tokenizer) > source.arch.vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens and the model's embedding"
            f" {source.arch.vocab_size} rows; set --tokenizer to the model's own"
        )
    return tokenizer


def stream_weights(source: Source, dtype: str, device: torch.device, bucket_bytes: int) -> Iterator[WeightBucket]:
    """Yield every tensor once, in `dtype` on `device` (constants in float32), in buckets of about `bucket_bytes`.

    Every rank reads every tensor; with the page cache, a machine reads its disk only once. Raises ConvertError at a tensor
    with non-finite values: no attestation follows, as it does in training.
    """
    dtypes = source.result_dtypes(getattr(torch, dtype))
    bucket: WeightBucket = []
    size = 0
    for name in source.shapes():
        tensor = source.read(name).to(device, dtypes[name])
        if not torch.stack(torch.aminmax(tensor)).isfinite().all():  # aminmax passes NaN on
            raise ConvertError(f"{name} has non-finite values")
        bucket.append((name, tensor))
        size += tensor.nbytes
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


def placed_prompt(
    tokenizer: Any, uid: str, text: str, images: Sequence[PromptImage], *, is_chat: bool, **fields: Any
) -> Prompt:
    """Tokenise a rendered prompt, and put `images` into their places. Raises ValueError. `fields`: those of Prompt."""
    [ids] = encode_prompts([text], tokenizer, is_chat=is_chat)
    check_tokenizer(tokenizer, [text])
    if images:
        ids, places = image_format(tokenizer).placed(ids, [image.size for image in images])
        images = [replace(image, first=first) for image, first in zip(images, places, strict=True)]
    named = {"answer": "", "source": "", "reward": "", **fields}
    return Prompt(uid, tuple(ids), text, images=tuple(images), **named)


# -- Its answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How prompts are answered. `samples`: per prompt, besides the greedy one. `turns`: renders those of an environment."""

    samples: int
    greedy: bool = False
    temperature: float
    top_p: float
    top_k: int = -1
    max_tokens: int
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    turns: TurnRenderer | None = None
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    gives_rewards: bool = False  # the environment does
    max_prompt_tokens: int = 0  # that an environment may write

    @property
    def indices(self) -> list[int]:
        """The indices of each prompt's samples, in order."""
        return sample_indices(self.samples, greedy=self.greedy)


class Asker:
    """The engine with the model's weights, in this process or on this rank."""

    def __init__(self, model: AskedModel, max_model_len: int) -> None:
        """Build the engine in the world that the environment describes. Collective. `max_model_len`: prompt and answer.

        Raises RankError on every rank when the weights cannot be read. There is no clean-up after a failure: the other
        ranks may not reach it, so engine and process groups end with the process.
        """
        self.model, options, source = model, model.options, model.source
        device = Device(options.device)
        self.mesh = build_mesh(device, tp=1, pp=1, rollout_tp=options.tp, seed=options.seed, timeout_s=TIMEOUT_S)
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
        rollout = with_sequences(rollout, source.arch, model.dtype, max_model_len, self.mesh, memory)
        self.capacity = rollout.sequences  # that the engine decodes at a time
        self.engine: RolloutEngine = build_engine(
            rollout,
            source.hf_folder,
            self.mesh,
            device,
            dtype=model.dtype,
            max_model_len=max_model_len,
            eos_token_ids=model.eos_token_ids,
            tensors=engine_tensors(source.arch, options.tp, reads_shards=find_engine(rollout.engine).reads_shards),
        )
        try:
            weights = stream_weights(source, model.dtype, device.torch_device, BUCKET_BYTES)
            self.engine.load_weights(weights, WEIGHTS_VERSION)
        except ConvertError as error:
            raise RankError(f"cannot read the weights: {error}") from error

    def close(self) -> None:
        """End the engine and the process groups."""
        self.engine.shutdown()
        destroy_mesh()

    def ask(
        self, prompts: Sequence[Prompt], answers: AnswerSettings, batch_size: int, done: Set[Key] = frozenset()
    ) -> Iterator[tuple[Sequence[Prompt], list[Sample]]]:
        """Yield batches of about `batch_size` samples: prompts, and this replica's samples of them. Collective.

        A batch that is complete in `done` is skipped. Any other batch is sampled as a whole, so that it consists of the same
        requests as before an interruption. A prompt's uid decides the samples. Raises RankError when environments are lost.
        """
        size = max(1, batch_size // len(answers.indices))
        with contextlib.ExitStack() as opened:
            generator = self.generator(answers, opened)
            for batch in (prompts[first : first + size] for first in range(0, len(prompts), size)):
                if all((prompt.uid, index) in done for prompt in batch for index in answers.indices):
                    continue
                yield (
                    batch,
                    generator.sample(
                        batch,
                        answers.samples,
                        round_id=0,
                        uids=[prompt.uid for prompt in batch],
                        version=WEIGHTS_VERSION,
                        max_tokens=answers.max_tokens,
                        temperature=answers.temperature,
                        truncation=Truncation(answers.top_p, answers.top_k),
                        greedy=answers.greedy,
                        metrics=Metrics(),
                    ),
                )

    def generator(self, answers: AnswerSettings, opened: contextlib.ExitStack) -> Generator:
        """Build the generator of training, without graders. `opened` will end the processes of environments."""
        multi_turn, stops = answers.multi_turn, {"stop": answers.stop, "stop_token_ids": answers.stop_token_ids}
        rollout = RolloutConfig(
            seed=self.model.options.seed, max_num_seqs=self.capacity, multi_turn=multi_turn, **stops
        )
        parts = (self.engine, None, self.model.tokenizer, self.mesh, rollout, lambda: "")
        if answers.turns is None:
            return Generator(*parts)
        environments = opened.enter_context(build_pool(multi_turn)) if self.mesh.is_replica_leader else None
        return TrajectoryGenerator(
            *parts,
            answers=EnvironmentAnswers(environments, answers.turns, multi_turn, self.mesh),
            gives_rewards=answers.gives_rewards,
            max_prompt_length=answers.max_prompt_tokens,
        )
