"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (no `actor_rollout_ref` prefix). Lengths are tokens; batch sizes are
prompts unless the comment says otherwise. What one section can check alone is checked here; what needs two sections,
the world size or a file is checked in `validate.py`. Sections are passed around, never the whole Config.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """A mistake of the user's: one message that names key, value, arithmetic and remedy. The CLI exits with 2."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())


def _not_zero(steps: int) -> int:
    if steps == 0:
        raise PydanticCustomError("frequency", "every 0 steps has no meaning; set -1 for never")
    return steps


Beta = Annotated[float, Field(ge=0, lt=1)]
Frequency = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # in steps; -1: never


class ModelConfig(Section):
    path: Path  # Hugging Face folder: config.json, *.safetensors, tokenizer
    tokenizer_path: Path | None = None  # default: path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class DataConfig(Section):
    task: str = "gsm8k"  # a registered task, or module:function (see data/tasks.py)
    train_files: list[Path] = []
    val_files: list[Path] = []
    train_batch_size: int = Field(512, ge=1)
    val_max_samples: int | None = Field(None, ge=1)  # first rows of the validation files; null = all
    max_prompt_length: int = Field(1024, ge=1)
    max_response_length: int = Field(2048, ge=1)
    filter_overlong_prompts: bool = True  # false: an over-long prompt is an error
    shuffle: bool = True
    seed: int = 42
    apply_chat_template: bool = True  # false: the task's text is the prompt as it stands
    chat_template: Path | None = None  # a Jinja file instead of the tokenizer's own
    system_prompt: str | None = None  # null: the task's own


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)
    lr_warmup_steps: int = Field(0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"  # WSD: constant, then linear at the end
    lr_wsd_decay_steps: int | None = Field(None, ge=1)  # WSD only: length of the linear end
    min_lr: float = Field(0.0, ge=0)


class MegatronConfig(Section):
    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)  # data-parallel ranks that share one set of experts
    sequence_parallel: bool | None = None  # null: on when tensor_model_parallel_size > 1
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    transformer_impl: Literal["auto", "local"] = "auto"  # auto: Transformer Engine on CUDA where it is installed
    override_transformer_config: dict[str, Any] = {}  # passed to megatron.core's TransformerConfig unread

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel


class ActorConfig(Section):
    ppo_mini_batch_size: int | None = Field(None, ge=1)  # prompts per optimizer step; null = data.train_batch_size
    ppo_epochs: int = Field(1, ge=1)
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)  # tokens of one packed micro-batch
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)  # at most this many sequences in one; null = no bound
    loss_mode: str = "vanilla"  # a registered policy loss, or module:function
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = Field(None, gt=0)  # L of seq-mean-token-sum-norm; null = max_response_length
    clip_ratio_low: float = Field(0.2, ge=0)
    clip_ratio_high: float = Field(0.2, ge=0)
    clip_ratio_c: float | None = Field(3.0, gt=1)  # dual clip; null = off
    use_kl_loss: bool = True
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = "low_var_kl"
    entropy_coeff: float = 0.0
    logprob_chunk_size: int = Field(1024, ge=1)  # rows of logits in memory at a time
    max_skipped_steps: int = Field(10, ge=0)  # consecutive non-finite updates before the run stops
    optim: OptimConfig = OptimConfig()
    megatron: MegatronConfig = MegatronConfig()


class RefConfig(Section):
    path: Path | None = None  # default: model.path, after the supervised warm-up if there is one


class ValKwargs(Section):
    n: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class RolloutConfig(Section):
    n: int = Field(8, ge=1)  # samples per prompt
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0  # training refuses other values: the policy scores the full distribution
    top_k: int = -1
    seed: int = 42
    tensor_model_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    kv_cache_gib: int = Field(1, ge=1)  # CPU only: vLLM's KV cache per rank
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(8192, ge=1)
    enforce_eager: bool = False
    free_cache_engine: bool = True  # GPU: sleep between rollouts
    enable_prefix_caching: bool = True
    update_weights_bucket_megabytes: int = Field(512, ge=1)
    probe_tolerance: float | None = Field(None, gt=0)  # mean |logprob difference| after a sync; null = by dtype
    engine_kwargs: dict[str, Any] = {}  # passed to vllm.LLM unread
    val_kwargs: ValKwargs = ValKwargs()


class RewardConfig(Section):
    function: str | None = None  # a registered reward, or module:function; null = the task's own
    num_workers: int = Field(1, ge=1)  # processes per rank
    timeout_s: float = Field(10.0, gt=0)  # wall clock per sample, then the worker is killed
    kwargs: dict[str, Any] = {}


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True


class SftConfig(Section):
    """The supervised warm-up before GRPO: the same `Policy.update` with another loss. steps = 0: none."""

    steps: int = Field(0, ge=0)
    train_files: list[Path] = []  # rows {"prompt": ..., "response": ...}
    train_batch_size: int = Field(32, ge=1)  # rows
    optim: OptimConfig = OptimConfig()


class TrainerConfig(Section):
    total_training_steps: int = Field(100, ge=0)
    output_dir: Path = Path("outputs/run")
    save_freq: Frequency = 20  # steps between checkpoints; -1: never; the last step is saved unless -1
    test_freq: Frequency = 5
    val_before_train: bool = True
    resume_mode: Literal["auto", "disable"] = "auto"
    max_actor_ckpt_to_keep: int | None = Field(3, ge=1)
    save_hf_at_end: bool = True
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = ["console", "jsonl"]
    num_logged_samples: int = Field(4, ge=0)  # completions written as text per evaluation
    nnodes: int = Field(1, ge=1)
    n_gpus_per_node: int = Field(8, ge=1)  # processes per node, on CPU too
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 42
    timeout_s: float = Field(1800.0, gt=0)  # every collective's deadline
    peak_tflops: float | None = Field(None, gt=0)  # for MFU; null: by device name, where known


class Config(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()


def load_config(path: Path | str, overrides: list[str] | None = None) -> Config:
    """Read the YAML at `path`, apply `section.key=value` overrides, check types and names. Raises ConfigError."""
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config {str(path)!r} must be a mapping of sections, not {type(raw).__name__}")
    for override in overrides or []:
        _apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    *sections, leaf = key.split(".")
    node = raw
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    node[leaf] = parsed


def _explain(error: Any) -> str:
    """One line for one pydantic error; an unknown key gets the nearest known one."""
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _fields_at(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"; did you mean {'.'.join([*map(str, error['loc'][:-1]), close[0]])!r}?" if close else ""
        return f"unknown key {location!r}{hint} (known here: {', '.join(known)})"
    if error["type"] == "missing":
        return f"missing key {location!r}: it has no default"
    return f"{location}={error['input']!r}: {error['msg']}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
