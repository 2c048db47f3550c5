"""The section `rollout`: the engine, sampling, several turns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_megatron.config.section import Count, Fixed, Section, Seed

# The temperatures that vLLM accepts besides 0 (greedy). It silently raises a lower one, and refuses a higher one.
ENGINE_TEMPERATURES = (0.01, 2.0)


class ValKwargs(Section):
    """How validation samples: its own values, instead of those of `rollout`."""

    n: int = Field(1, ge=1, le=65536)  # samples per prompt
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)


class MultiTurnConfig(Section):
    """Rollouts of several turns: an environment answers what the model writes. environment = null: single turn."""

    environment: str | None = None  # a registered environment, or module:Class (environments/environment.py)
    kwargs: dict[str, Any] = {}  # keyword arguments of the environment's class
    tools: list[str] = []  # environment=tools: registered tools, or module:function
    format: str = "hermes"  # how the model writes a tool call (environments/tool_environment.py)
    max_assistant_turns: int = Field(8, ge=1)  # a trajectory ends after so many
    max_parallel_calls: int = Field(4, ge=1)  # tool calls of one turn that are answered; the others get an error
    max_tool_response_length: int = Field(256, ge=1)  # tokens of one message of an observation; longer ones are cut
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # what is cut
    latency_ticks: int = Field(8, ge=1)  # engine steps from the end of a turn to the observation (trajectories/)
    num_workers: int = Field(1, ge=1)  # processes per engine
    timeout_s: float = Field(30.0, gt=0)  # wall-clock seconds of one reset or step
    memory_gib: float = Field(2.0, gt=0)  # address space of one environment, above what its worker has loaded
    failed: Literal["keep", "mask"] = "keep"  # trajectories that their environment failed: in the loss, or not


class PartialConfig(Section):
    """Responses may take several steps (sampling/partial.py). over_sample = 1: every step waits for all its responses."""

    over_sample: Fixed[float] = Field(1.0, ge=1, le=2)  # prompts in progress, relative to those of a batch
    max_staleness: int = Field(2, ge=1)  # a group is trained on at most so many steps after its first token
    chunk_tokens: int = Field(512, ge=1)  # responses stop for a later step at multiples of it

    @property
    def is_on(self) -> bool:
        return self.over_sample > 1


class RolloutConfig(Section):
    """The engine, and how it samples."""

    engine: str = "vllm"  # a registered engine, or module:Class (rollout/engine.py)
    engine_options: dict[str, Any] = {}  # the engine's own section, validated by its class (rollout/vllm_arguments.py)
    n: int = Field(8, ge=1, le=65536)  # samples per prompt
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0  # no other value may be set: the policy's logprobs are of the full distribution
    top_k: int = -1  # no other value may be set, either
    seed: Seed = 42  # each sample's seed is a hash of this, the step, the prompt and the sample's index
    tensor_model_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)  # = tensor_model_parallel_size: whole experts per rank; 1: each is cut
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)  # share of the device's memory that vLLM may take
    max_num_seqs: Count = 256  # sequences that one engine decodes at a time
    max_num_batched_tokens: int = Field(8192, ge=1)  # tokens of one engine step
    enforce_eager: bool = False  # no CUDA graphs
    free_cache_engine: bool = True  # GPU: the engine sleeps between rollouts
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"] | None = None  # of the engine
    enable_prefix_caching: bool = True
    update_weights_bucket_megabytes: Count = 512  # MiB of weights sent to the engine at a time
    sync: Literal["full", "delta"] = "full"  # delta: after a full sync, only elements whose bits have changed are sent
    delta_full_every: int = Field(50, ge=1)  # every so many syncs is full all the same
    delta_max_density: float = Field(0.1, gt=0, le=1)  # a sync is full if a larger share of the elements has changed
    # mean |logprob difference| after a sync; null: training/colocation.py
    probe_tolerance: float | None = Field(None, gt=0)
    engine_kwargs: dict[str, Any] = {}  # further arguments of vllm.LLM; wrong names are errors
    val_kwargs: ValKwargs = ValKwargs()
    stop: list[str] = []  # texts that end a response (or a turn); the token that completes one stays in it
    stop_token_ids: list[int] = []  # further tokens that end it
    partial: PartialConfig = PartialConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()

    @property
    def has_whole_experts(self) -> bool:
        """Whether a rank of an engine has some experts whole, and nothing of the others."""
        return self.expert_parallel_size > 1

    @model_validator(mode="before")
    @classmethod
    def _a_quantized_engine_differs(cls, values: Any) -> Any:
        """Quantisation alone moves log-probabilities by 0.1 and more, so the default tolerance is wider with it."""
        if isinstance(values, dict) and values.get("quantization") and values.get("probe_tolerance") is None:
            return {**values, "probe_tolerance": 0.3}
        return values
