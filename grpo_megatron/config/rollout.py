"""The section `rollout`: the engine, sampling, several turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from grpo_megatron.config.section import Count, Fixed, Needs, Section, Seed

# The temperatures that vLLM accepts besides 0 (greedy). It silently raises a lower one, and refuses a higher one.
ENGINE_TEMPERATURES = (0.01, 2.0)


def _of_the_engine(temperature: float) -> float:
    low, high = ENGINE_TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise PydanticCustomError(
            "temperature", f"it is outside the engine's {low:g} to {high:g}; set a value in between"
        )
    return temperature


class ValKwargs(Section):
    """How validation samples: its own values, instead of those of `rollout`."""

    n: int = Field(1, ge=1, le=65536)
    """samples per prompt"""
    temperature: Annotated[float, AfterValidator(_of_the_engine)] = Field(0.0, ge=0)
    """0: greedy"""
    top_p: float = Field(1.0, gt=0, le=1)


VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of CPUAttentionBackend, in 0.26 and 0.32
OF_TOOLS = Needs("rollout.multi_turn.environment=tools")


class MultiTurnConfig(Section):
    """Rollouts of several turns: an environment answers what the model writes. environment = null: single turn."""

    environment: str | None = None
    """a registered environment, or module:Class (environments/environment.py)"""
    kwargs: dict[str, Any] = {}
    """keyword arguments of the environment's class"""
    tools: Annotated[list[str], OF_TOOLS] = []
    """registered tools, or module:function"""
    format: Annotated[str, OF_TOOLS] = "hermes"
    """how the model writes a tool call (environments/tool_environment.py)"""
    history: Literal["own", "keep_thinking"] = "own"
    """a template that changes earlier turns (Qwen3's drops thoughts): each begins a new row, or the template is refused"""
    max_assistant_turns: int = Field(8, ge=1)
    """a trajectory ends after so many"""
    max_parallel_calls: Annotated[int, OF_TOOLS] = Field(4, ge=1)
    """tool calls of one turn that are answered; the others get an error"""
    max_tool_response_length: int = Field(256, ge=1)
    """tokens of one message of an observation; longer ones are cut"""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """what is cut"""
    latency_ticks: int = Field(8, ge=1)
    """engine steps from the end of a turn to the observation (trajectories/)"""
    num_workers: int = Field(1, ge=1)
    """processes per engine"""
    timeout_s: float = Field(30.0, gt=0)
    """wall-clock seconds of one reset or step"""
    memory_gib: float = Field(2.0, gt=0)
    """address space of one environment, above what its worker has loaded"""
    failed: Literal["keep", "mask"] = "mask"
    """trajectories that their environment failed: mask: without a reward, out of loss and statistics; keep: with the reward
    so far"""


class PartialConfig(Section):
    """Responses and trajectories may take several steps (sampling/partial.py). over_sample = 1: every step waits for all."""

    over_sample: Fixed[float] = Field(1.0, ge=1, le=2)
    """prompts in progress, relative to those of a batch"""
    max_staleness: int = Field(2, ge=1)
    """a group is trained on at most so many steps after its first token"""
    chunk_tokens: int = Field(512, ge=1)
    """responses stop for a later step at multiples of it"""
    chunk_turns: Annotated[int, Needs("rollout.partial.over_sample>1"), Needs("rollout.multi_turn.environment")] = (
        Field(1, ge=1)
    )
    """trajectories of several turns stop for a later step at multiples of it"""

    @property
    def is_on(self) -> bool:
        return self.over_sample > 1


class RolloutConfig(Section):
    """The engine, and how it samples."""

    engine: str = "vllm"
    """a registered engine, or module:Class (rollout/engine.py)"""
    engine_options: dict[str, Any] = {}
    """the engine's own section, validated by its class (rollout/vllm/arguments.py)"""
    n: int = Field(8, ge=1, le=65536)
    """samples per prompt"""
    temperature: Annotated[float, AfterValidator(_of_the_engine)] = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """samples from the fewest likeliest tokens with so much probability, of those that min_p and top_k leave; needs top_k"""
    top_k: int = Field(-1, ge=-1, le=4096)
    """samples from so many likeliest tokens; -1 or 0: all. The policy's distribution is cut to the same ids
    (docs/algorithms.md#sampling-from-a-part-of-the-vocabulary)"""
    min_p: float = Field(0.0, ge=0, lt=1)
    """samples from tokens with this share of the likeliest one's probability or more; needs top_k"""
    seed: Seed = 42
    """each sample's seed is a hash of this, the step, the prompt and the sample's index"""
    placement: Literal["colocated", "separate"] = "colocated"
    """separate: the last ranks of the run only generate, the others only train (training/roles.py); colocated: all do
    both"""
    num_nodes: Annotated[Count | None, Needs("rollout.placement=separate")] = None
    """whole nodes that only generate"""
    num_ranks: Annotated[Count | None, Needs("rollout.placement=separate")] = None
    """instead of num_nodes, on one node"""
    lag: Annotated[int, Needs("rollout.placement=separate")] = Field(0, ge=0, le=64)
    """a step is sampled by the weights of so many steps before; 0: the same run as colocated, 1: both roles always
    work"""
    tensor_model_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    """= tensor_model_parallel_size: whole experts per rank; 1: each is cut"""
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """share of the device's memory that vLLM may take"""
    max_num_seqs: Count | None = None
    """sequences that one engine decodes at a time; null: what the KV cache holds (models/engine_cache.py), 256 on
    the CPU"""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """tokens of one engine step"""
    enforce_eager: bool = False
    """no CUDA graphs"""
    free_cache_engine: bool = True
    """GPU: the engine sleeps between rollouts"""
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"] | None = None
    """of the engine"""
    batch_invariant: Annotated[bool, Needs("trainer.device!=cpu"), Needs("rollout.engine=vllm")] = False
    """GPU: a response does not depend on what else is sampled (vLLM's VLLM_BATCH_INVARIANT, 0.32 and Hopper or newer).
    Slower products without split-k, for training too"""
    enable_prefix_caching: bool = True
    """a prompt is computed once for its samples"""
    update_weights_bucket_megabytes: Count = 512
    """MiB of weights sent to the engine at a time"""
    sync: Literal["full", "delta"] = "full"
    """delta: after a full sync, only elements whose bits have changed are sent"""
    delta_full_every: Annotated[int, Needs("rollout.sync=delta")] = Field(50, ge=1)
    """every so many syncs is full all the same"""
    delta_max_density: Annotated[float, Needs("rollout.sync=delta")] = Field(0.1, gt=0, le=1)
    """a sync is full if a larger share of the elements has changed"""
    probe_tolerance: float | None = Field(None, gt=0)
    """mean |logprob difference| after a sync; null: sync/attest.py"""
    engine_kwargs: dict[str, Any] = {}
    """further arguments of vllm.LLM; wrong names are errors"""
    val_kwargs: ValKwargs = ValKwargs()
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """texts that end a response (or a turn); the token that completes one stays in it"""
    stop_token_ids: list[int] = []
    """further tokens that end it"""
    partial: Annotated[PartialConfig, Needs("rollout.partial.over_sample>1")] = PartialConfig()
    multi_turn: Annotated[MultiTurnConfig, Needs("rollout.multi_turn.environment")] = MultiTurnConfig()

    @property
    def sequences(self) -> int:
        """Sequences that one engine decodes at a time, where nothing is derived from the memory of a GPU."""
        return self.max_num_seqs or min(256, self.max_num_batched_tokens)

    @property
    def has_whole_experts(self) -> bool:
        """Says if each rank of an engine has some experts complete, and no part of the others."""
        return self.expert_parallel_size > 1
