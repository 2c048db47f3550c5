"""The sections about weights: the model, its adapters, its layout and precision, its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from grpo_megatron.config.section import Beta, Count, Fixed, Needs, Schedule, Section
from grpo_megatron.untrusted import read_json, shown

PEFT_DEFAULT = 8  # of `r` and `lora_alpha`, in peft's LoraConfig


class ModelConfig(Section):
    """The model that the run starts from."""

    path: Fixed[Path]
    """Hugging Face folder (config.json, *.safetensors, tokenizer), or the id of a model of the Hub"""
    tokenizer_path: Fixed[Path | None] = None
    """null: path"""
    family: Fixed[str | None] = None
    """null: by model_type of config.json; or my.module:FAMILY of your own"""
    dtype: Fixed[Literal["float32", "bfloat16"]] = "bfloat16"
    """of policy, reference, reward model and engine"""
    exact: Fixed[bool] = False
    """CPU: the engine's log-probabilities are the policy's, bit for bit (exact/rowwise.py)"""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule. The schedule's steps are optimizer steps, not training steps."""

    lr: Schedule[float] = Field(1e-6, ge=0, le=1)
    """the learning rate after the warm-up"""
    weight_decay: float = Field(0.01, ge=0, le=1000)
    betas: tuple[Beta, Beta] = 0.9, 0.999
    eps: float = Field(1e-8, ge=1e-30, le=1)
    clip_grad: float = Field(1.0, gt=0)
    """largest L2 norm of the whole gradient"""
    lr_warmup_steps: Schedule[int] = Field(0, ge=0)
    """optimizer steps of a linear rise from 0"""
    lr_decay_style: Schedule[Literal["constant", "linear", "cosine", "WSD"]] = "constant"
    """WSD: constant, then linear decay"""
    lr_wsd_decay_steps: Annotated[Schedule[int | None], Needs(".lr_decay_style=WSD")] = Field(None, ge=1)
    """WSD needs it: optimizer steps of the linear decay"""
    min_lr: Annotated[Schedule[float], Needs(".lr_decay_style!=constant")] = Field(0.0, ge=0, le=1)
    """the rate that a decay ends with"""


class Fp8Config(Section):
    """FP8 in the decoder's linear layers, by Transformer Engine (models/layers/precision.py). recipe = null: no FP8."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    format: Literal["e4m3", "hybrid"] | None = None
    """hybrid: e5m2 gradients; null: the recipe's own"""
    param_gather: bool = False
    """weights are stored, and gathered over data-parallel ranks, in FP8"""
    wgrad: bool = True
    """delayed only; false: weight gradients are computed in bf16"""
    margin: int = Field(0, ge=-100, le=100)
    """delayed only: scales are divided by 2 ** margin"""
    amax_history_len: Count = 1024
    """delayed only: earlier passes whose largest values set a scale"""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """delayed only: how that history becomes one value"""
    first_last_layers_bf16: bool = False
    """keep the layers at both ends of the model in bf16"""
    num_layers_at_start_in_bf16: int = Field(1, ge=0)
    """with first_last_layers_bf16"""
    num_layers_at_end_in_bf16: int = Field(1, ge=0)
    """with first_last_layers_bf16"""


class LoraConfig(Section):
    """LoRA (arXiv:2106.09685) with PEFT's meanings: only low-rank adapters W0 + s B A are trained. rank = null: all weights."""

    rank: int | None = Field(None, ge=1, le=4096)
    """r, the width of A and B; null: no LoRA"""
    alpha: Annotated[float | None, Needs(".rank")] = Field(None, gt=0, le=1e6)
    """s = alpha / rank; null: rank, so s = 1"""
    use_rslora: Annotated[bool, Needs(".rank")] = False
    """s = alpha / sqrt(rank), arXiv:2312.03732"""
    target_modules: Annotated[str | list[str], Needs(".rank")] = "all-linear"
    """all-linear (without routers, experts, embedding, head), names (q_proj ... down_proj), or a regular expression"""
    exclude_modules: Annotated[str | list[str], Needs(".rank")] = []
    """names, or a regular expression"""
    init: Annotated[Literal["kaiming", "gaussian"], Needs(".rank")] = "kaiming"
    """A's initial values: uniform within 1 / sqrt(inputs), or normal with deviation 1 / rank. B starts as zeros"""
    path: Path | None = None
    """PEFT folder with the adapters to start from; null: new ones. Without rank, its adapter_config.json gives rank,
    alpha, use_rslora, target_modules and exclude_modules"""
    mode: Annotated[Literal["merged", "split"], Needs(".rank")] = "merged"
    """merged: the forward pass multiplies by round(W0 + s B A), the tensor that the engine holds. split: W0 x + s B
    (A x), which is cheaper; the engine still gets the rounded sum"""
    dropout: Annotated[float, Needs(".rank"), Needs(".mode=split")] = Field(0.0, ge=0, lt=1)
    """of the inputs of A in an update, not in other passes"""

    @model_validator(mode="before")
    @classmethod
    def _take_from_the_folder(cls, raw: Any) -> Any:
        """Fills in what `path` says. Given values stay, and are compared with the folder's before the run."""
        if not isinstance(raw, Mapping) or raw.get("path") is None or raw.get("rank") is not None:
            return raw
        file = Path(str(raw["path"])) / "adapter_config.json"
        try:
            settings = dict(read_json(file))
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            text = f"without rank, {str(file)!r} is read: {reason}; name a PEFT folder"
            raise _wrong_path(raw["path"], text) from None
        if not isinstance(rank := settings.get("r", PEFT_DEFAULT), int):
            text = f"{str(file)!r} has r={shown(rank)}, which is no integer; correct it, or set another path"
            raise _wrong_path(raw["path"], text)
        return {**peft_values(settings), **{key: value for key, value in raw.items() if value is not None}}

    @property
    def scale(self) -> float:
        """Computes s. Needs a rank."""
        assert self.rank is not None
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.use_rslora else self.rank)


def _wrong_path(path: object, text: str) -> ValidationError:
    """Makes an error of the key `path`, and not of its section."""
    kind = PydanticCustomError("adapters", "{text}", {"text": text})
    return ValidationError.from_exception_data("LoraConfig", [{"type": kind, "loc": ("path",), "input": path}])


def peft_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of LoraConfig that an adapter_config.json sets, or leaves to peft's defaults."""
    targets, layers = settings.get("target_modules") or "all-linear", settings.get("layers_to_transform")
    if layers is not None and not isinstance(targets, str):  # peft refuses layers beside a regular expression
        numbers, names = ("|".join(re.escape(str(one)) for one in part) for part in (_listed(layers), targets))
        targets = rf"(.*\.)?layers\.({numbers})\.(.*\.)?({names})"
    values = {
        "rank": settings.get("r", PEFT_DEFAULT),
        "alpha": settings.get("lora_alpha", PEFT_DEFAULT),
        "use_rslora": settings.get("use_rslora") or False,
        "target_modules": targets,
    }
    return {**values, **({"exclude_modules": out} if (out := settings.get("exclude_modules")) else {})}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


class VisionConfig(Section):
    """The vision tower of a model that reads images, and the merger that turns patches into tokens."""

    freeze_tower: bool = True
    """all but the merger"""
    freeze_merger: bool = True
    """the layers that turn four patches into a token"""
    lr: Annotated[float | None, Needs(".freeze_tower=false or .freeze_merger=false")] = Field(None, gt=0, le=1)
    """of what is trained here; null: actor.optim.lr. Its schedule is that of actor.optim, scaled"""

    @property
    def is_frozen(self) -> bool:
        """Says if no part of it is trained."""
        return self.freeze_tower and self.freeze_merger


class MoeConfig(Section):
    """Mixtures of experts."""

    route_replay: Literal["none", "engine", "old"] = "none"
    """Whose choice of experts every pass of the policy takes (models/layers/routes.py). none: its own; engine: that
    of the engine which drew the token (R3), and of the reference too; old: that of the pass for the old
    log-probabilities (R2)"""


class MegatronConfig(Section):
    """Layout and kernels of training. The data-parallel size is what the other sizes leave of the world size."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)
    """data-parallel ranks over which the experts are divided"""
    context_parallel_size: int = Field(1, ge=1)
    """ranks over which each sequence is cut; needs Transformer Engine"""
    sequence_parallel: bool | None = None
    """null: on when tensor_model_parallel_size > 1"""
    use_distributed_optimizer: Fixed[bool] = True
    """shard the optimizer's state over data-parallel ranks"""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """auto: TE on CUDA, if installed"""
    fused_head: bool = True
    """log-probabilities by Triton's kernels; on CUDA, if Triton is installed"""
    fp8: Fixed[Fp8Config] = Fp8Config()
    offload_optimizer: bool = False
    """optimizer states go to the host during rollouts; gradient buffers are freed"""
    offload_reference: bool = False
    """the reference and frozen reward models are on the device only while used"""
    deterministic: Annotated[bool, Needs("trainer.device!=cpu")] = False
    """GPU: the same gradients from the same batch. Attention's backward pass takes up to twice as long; an operation
    without a deterministic kernel is an error"""
    batch_invariant: Annotated[bool, Needs("trainer.device!=cpu"), Needs(".transformer_impl=transformer_engine")] = (
        False
    )
    """GPU: a token's log-probability does not depend on the rows beside it. Megatron-Core's batch-invariant products
    and norms in Transformer Engine's layers, with flash-attn. Slower"""
    override_transformer_config: dict[str, Any] = {}
    """for megatron.core's TransformerConfig; wrong names are errors"""

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel
