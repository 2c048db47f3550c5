"""The sections `guards` and `trainer`: steps, ranks, files, saving, stopping, logging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_megatron.config.actor import HAS_CRITIC
from grpo_megatron.config.section import Fixed, Frequency, Needs, Processes, Schedule, Seconds, Section, Seed

DeviceName = Literal["auto", "cpu", "cuda"]


class Band(Section):
    """A range that a number of every optimizer step should be in. Both bounds null: the guard is off."""

    low: float | None = None
    """the guard fires below it; null: no bound"""
    high: float | None = None
    """the guard fires above it; null: no bound"""
    action: Literal["warn", "skip", "stop"] = "warn"

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Band:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise PydanticCustomError("band", "the lower bound is above the upper one; swap low and high")
        return self

    @property
    def is_on(self) -> bool:
        return self.low is not None or self.high is not None


class GuardsConfig(Section):
    """Reactions to numbers that are not finite, or leave their band (training/guards.py).

    warn: the run goes on. skip: the optimizer step is left out, and nothing changes. stop: the run ends.
    """

    rewards: Literal["warn", "skip", "stop"] = "stop"
    """an infinite reward; NaN is a sample without a reward"""
    logprobs: Literal["warn", "skip", "stop"] = "skip"
    """log-probabilities of loss tokens, and the loss"""
    gradients: Literal["skip", "stop"] = "skip"
    """their norm; actor.max_skipped_steps in a row end the run"""
    weights: Literal["warn", "stop"] = "stop"
    """after the step, before a checkpoint is saved"""
    grad_norm: Band = Band()
    """before clipping"""
    entropy: Band = Band()
    """nats per token, as actor/entropy"""
    kl: Annotated[Band, Needs("actor.use_kl_loss=true"), Needs("actor.kl_loss_coef>0")] = Band()
    """as actor/kl_loss"""
    response_length: Band = Band()
    """tokens, the mean of the training step"""
    rollout_gap: Annotated[
        Band,
        Needs("actor.loss_mode:is_likelihood=false or algorithm.use_kl_in_reward=true"),
        Needs("algorithm.rollout_correction.bypass_mode=false"),
        Needs("algorithm.rollout_correction.prox_logp_method=recompute"),
    ] = Band()
    """mean |old - rollout log-probability|, as training/rollout_logp_diff_mean. Not with bypass_mode: several updates
    would not measure it"""
    route_agreement: Annotated[Band, Needs("actor.moe.route_replay=engine")] = Band(low=0.75, action="stop")
    """share of the engine's experts that the policy's routers would have chosen; less: its routes belong to other
    tokens or layers"""
    max_dumps: int = Field(3, ge=0)
    """batches written to output_dir/dumps, with the weights, each time the run is started"""


class HealingConfig(Section):
    """After the loss of a rank the launcher starts the ranks again from its newest state (cli/healing.py)."""

    layouts: Literal["auto", "same"] | None = None
    """auto: with fewer devices than ranks in the planner's layout; same: in the config's, with a spare or in place;
    null: the run ends"""
    memory: Annotated[bool, Needs(".layouts")] = True
    """keep the state after each step in the host's memory (/dev/shm), with room for that of two steps; with nnodes above 1:
    each rank's part on its node and on another one"""
    spares: Annotated[int, Needs(".layouts")] = Field(0, ge=0, le=1024)
    """devices of the machine beyond n_gpus_per_node, which replace lost ones; with nnodes above 1: nodes beyond nnodes"""
    node_timeout_s: Annotated[Seconds, Needs(".layouts")] = 20.0
    """a node without a sign of life for so long is lost; one that cannot read output_dir for half of it ends its ranks"""

    @property
    def is_on(self) -> bool:
        return self.layouts is not None

    @property
    def is_mirrored(self) -> bool:
        """The state after each step is kept in memory."""
        return self.is_on and self.memory


class TrainerConfig(Section):
    """The run itself: steps, ranks, files, saving, stopping, logging."""

    total_training_steps: Schedule[int] = Field(100, ge=0, le=1_000_000_000)
    total_epochs: Schedule[int | None] = Field(None, ge=1, le=1_000_000)
    """Instead of total_training_steps: total_epochs x floor(rows of data.train_files / data.train_batch_size) steps"""
    output_dir: Path = Path("outputs/run")
    save_freq: Frequency = 20
    """steps between checkpoints; the last step is saved, too; -1: no checkpoint at all"""
    test_freq: Frequency = 5
    """steps between validations; -1: only val_before_train's"""
    critic_warmup: Annotated[Schedule[int], HAS_CRITIC] = Field(0, ge=0)
    """the first steps train the critic alone"""
    val_before_train: bool = True
    """validate before the first step, and after the last"""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto: from the newest checkpoint in output_dir; disable: from the start, an earlier run's files move to
    earlier_001/"""
    verify_checkpoints: Literal["full", "sizes"] = "full"
    """before resuming, compare files by sha256, or by size only"""
    accept_changed_inputs: bool = False
    """resume although data, weights or tokenizer are not those of the checkpoint (checks/resume.py)"""
    stop_file: Path | None = None
    """once this file exists, save after the step and exit with code 75"""
    stop_at: float | None = Field(None, gt=0, le=1e11)
    """Unix time in seconds: the same, before a step that could end later"""
    async_save: bool = False
    """training goes on while a checkpoint is written, from a copy on the host"""
    max_actor_ckpt_to_keep: int | None = Field(3, ge=1)
    """older checkpoints are removed; null: keep all"""
    save_hf_at_end: bool | Literal["merged"] = True
    """write the trained model as a Hugging Face folder, output_dir/hf; of adapters a PEFT folder, or (merged) the
    whole model"""
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb", "swanlab", "mlflow"]] = ["console", "jsonl"]
    """metrics.jsonl and report.html are written in any case"""
    project_name: str = Field("grpo_megatron", min_length=1, max_length=128)
    """of wandb, swanlab and mlflow"""
    experiment_name: str | None = Field(None, min_length=1, max_length=128)
    """the run's name there; null: output_dir's name"""
    tags: list[str] = []
    """of wandb, swanlab and mlflow"""
    num_logged_samples: int = Field(4, ge=0)
    """completions written as text per validation"""
    trace: Literal["full", "light", "off"] = "full"
    """digests of all that a step computes, in output_dir/trace, for the command `diff`; light: without gradients"""
    trace_keep: int | None = Field(1000, ge=1)
    """steps whose rows and tensors are kept there; of older ones only a digest per stage is; null: keep all"""
    rollout_data_dir: Path | None = None
    """every training sample, one .jsonl file per step; null: they are not written"""
    nnodes: int = Field(1, ge=1, le=65536)
    n_gpus_per_node: Processes = 8
    """ranks per node, on CPU too"""
    device: DeviceName = "auto"
    """auto: cuda if torch sees one"""
    seed: Fixed[Seed] = 42
    """of everything in training that is neither data.seed's nor rollout.seed's"""
    timeout_s: Seconds = 1800.0
    """seconds after which a collective fails"""
    stall_timeout_s: Seconds | None = 35.0
    """then a rank that is silent or idle ends the run; null: never"""
    healing: HealingConfig = HealingConfig()
    peak_tflops: float | None = Field(None, gt=0)
    """TFLOP/s of one device, for MFU; null: by device name, if known"""
