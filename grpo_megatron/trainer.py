"""Trainer: builds the parts, then runs the step. Every rank runs the same one; there is no controller.

GRPO, arXiv:2402.03300: for each prompt draw a group of responses, score them, take each one's advantage over its group,
and raise the probability of the better ones by a clipped policy gradient, with a KL term to a reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.needs import needs_old_logprobs
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.algo.shaping import with_overlong_penalty
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.device import Device
from grpo_megatron.models.export import save_hf
from grpo_megatron.models.families import hf_shapes
from grpo_megatron.models.policy import LossFunction, MetricSums, Policy
from grpo_megatron.models.reference import Reference
from grpo_megatron.models.reward_model import FrozenRewardModel, RewardModel
from grpo_megatron.models.shape import model_shape
from grpo_megatron.observability.flops import mfu_metrics, peaks
from grpo_megatron.observability.metrics import Metrics, group_table_metrics, throughput
from grpo_megatron.observability.sinks import build_sinks
from grpo_megatron.observability.summary import Summary
from grpo_megatron.parallel.exchange import exchange, gather_groups
from grpo_megatron.parallel.mesh import build_mesh, destroy_mesh
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.rollout.vllm import VllmEngine
from grpo_megatron.sampling.build import build_collector
from grpo_megatron.sampling.collector import number
from grpo_megatron.sampling.generator import Generator, score_metrics
from grpo_megatron.training.checkpoint import Checkpoints, check_same_model, on_disk, run_state
from grpo_megatron.training.colocation import DEFAULT_TOLERANCE, Colocation
from grpo_megatron.training.correction_step import Revision
from grpo_megatron.training.references import References
from grpo_megatron.training.reward_model import FrozenReward, LearningReward, NoRewardModel
from grpo_megatron.training.stopping import Stopping
from grpo_megatron.training.validation import Evaluator
from grpo_megatron.training.warm_up import record_update, warm_up
from grpo_megatron.types import Batch, GroupTable, Plan, Sample


class Trainer:
    """`checked` is what `validate` read for this config. Build on every rank at the same point, then `run`."""

    def __init__(self, config: Config, checked: Checked) -> None:
        self.config, self.arch, self.tokenizer = config, checked.arch, checked.tokenizer
        self.output_dir = config.trainer.output_dir
        self.device = Device(config.trainer.device)
        torch.manual_seed(config.trainer.seed)
        megatron = config.actor.megatron
        self.mesh = build_mesh(
            self.device,
            tp=megatron.tensor_model_parallel_size,
            pp=megatron.pipeline_model_parallel_size,
            ep=megatron.expert_model_parallel_size,
            cp=megatron.context_parallel_size,
            rollout_tp=config.rollout.tensor_model_parallel_size,
            seed=config.trainer.seed,
            timeout_s=config.trainer.timeout_s,
        )
        self.policy = Policy(
            config.model, config.actor, self.arch, self.mesh, self.device, temperature=config.rollout.temperature
        )
        self.tokenizer_path = config.model.tokenizer_path or config.model.path
        self.max_length = config.data.max_prompt_length + config.data.max_response_length
        self.engine = VllmEngine(
            config.model.path,
            config.rollout,
            self.mesh,
            self.device,
            dtype=config.model.dtype,
            max_model_len=self.max_length,
            eos_token_ids=[self.tokenizer.eos_token_id],
            expected=hf_shapes(self.arch),
        )
        tolerance = config.rollout.probe_tolerance or DEFAULT_TOLERANCE[config.model.dtype]
        self.colocation = Colocation(
            self.policy,
            self.engine,
            self.mesh,
            tolerance=tolerance,
            bucket_megabytes=config.rollout.update_weights_bucket_megabytes,
            max_length=self.max_length,
        )
        names = {prompt.reward for prompt in (*checked.train_prompts, *checked.val_prompts)}
        self.pool = self._build_pool(sorted(names)) if self.mesh.is_block_leader else None
        self.generator = Generator(self.engine, self.pool, self.tokenizer, self.mesh, config.rollout.seed)
        has_data = checked.train_prompts or checked.offline_groups
        self.collector = (
            build_collector(config, checked, self.generator, self.mesh, self._hand_over) if has_data else None
        )
        self.evaluator = Evaluator(
            self.generator,
            checked.val_prompts,
            config.data,
            config.rollout,
            self.mesh,
            self.output_dir,
            config.trainer.num_logged_samples,
        )
        self.supervised_rows = checked.supervised_rows
        self.summary = Summary(self.output_dir)
        keep, verify = config.trainer.max_actor_ckpt_to_keep, config.trainer.verify_checkpoints
        self.checkpoints = Checkpoints(self.output_dir, self.mesh, keep, verify)
        self.stopping = Stopping(config.trainer, self.mesh)
        self.revision = Revision(config.algorithm, config.actor, self.mesh, config.data.max_response_length)
        self.loss = self._build_loss()
        self.metrics = Metrics(self.device.synchronize)
        self.first_step = 0

    # -- construction --------------------------------------------------------------------------------------------------

    def _build_pool(self, names: Sequence[str]) -> RewardPool:
        """Workers that have shown they grade right answers right and wrong ones wrong, before any step is paid for."""
        reward = self.config.reward
        pool = RewardPool(reward.num_workers, reward.timeout_s, reward.kwargs)
        pool.self_test(names)
        return pool

    def _build_loss(self) -> LossFunction:
        actor = self.config.actor
        policy_loss = policy_losses.get(actor.loss_mode)
        penalty = kl_penalties.get(actor.kl_loss_type) if actor.use_kl_loss else None

        def loss(inputs: LossInputs) -> tuple[torch.Tensor, MetricSums]:
            return total_loss(inputs, actor, policy_loss, penalty)

        return loss

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Warm up, train, evaluate, save. Resumes from the newest complete checkpoint of the output folder."""
        try:
            self._start()
            with self.sinks:
                self.train()
                self._conclude()
        except BaseException:
            self.close(alone=True)
            raise
        self.close()

    def train(self) -> None:
        for step in range(self.first_step, self.config.trainer.total_training_steps):
            with self.metrics.phase("step"):
                self.begin_iteration(step)  # the reference becomes the policy, where the run is iterative
                with self.colocation.rollout(step, self.metrics):  # weights into the engine, checked; engine awake
                    self.evaluate(step)
                    samples = self.collect(step)  # prompts -> samples -> rewards
                table = self.rewards(step, samples)  # every sample's reward, on every rank
                plan = self.plan(table)  # advantages, token weights, who trains on what
                batch = exchange(samples, table, plan, self.mesh)  # this replica's share, balanced by tokens
                batch.old_logprobs = self.old_logprobs(batch)
                batch.ref_logprobs = self.ref_logprobs(batch)
                plan = self.revision.apply(batch, table, plan, self.metrics)  # rollout correction, KL in the reward
                self.update(batch)  # mini-batches, clipping, optimizer
                self.end_iteration(step)  # the reward model learns from the iteration's samples
                self.save(step + 1)
            self.log(step, samples, table, plan, batch)
            self.stopping.after(step + 1, self.save_now)

    def begin_iteration(self, step: int) -> None:
        """Iterative GRPO: every so often the KL term holds the policy to where it has come."""
        if not self.references.is_due(step):
            return
        with self.metrics.phase("renew_reference"):
            kept = on_disk(self.output_dir)
            oldest = int(kept[0].name.removeprefix("step_")) if kept else 0
            self.references.renew(step, self.policy, self._save_hf, oldest)

    def end_iteration(self, step: int) -> None:
        length = self.config.algorithm.iteration_steps
        if length is not None and (step + 1) % length == 0:
            self.reward_model.learn(step, self.metrics)

    def collect(self, step: int) -> list[Sample]:
        assert self.collector is not None
        return number(self.collector.groups(step, self.config.data.train_batch_size, self.metrics))

    def rewards(self, step: int, samples: list[Sample]) -> GroupTable:
        table = gather_groups(samples, self.mesh)
        table = self.reward_model.reward(step, samples, table, self.metrics)
        return with_overlong_penalty(table, self.config.reward.overlong_buffer, self.config.data.max_response_length)

    def plan(self, table: GroupTable) -> Plan:
        config = self.config
        with self.metrics.phase("adv"):
            return make_plan(
                table,
                config.algorithm,
                config.actor,
                dp=self.mesh.dp,
                train_batch_size=config.data.train_batch_size,
                max_response_length=config.data.max_response_length,
            )

    def old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if not needs_old_logprobs(self.config.algorithm, self.config.actor):
            return None
        with self.metrics.phase("old_log_prob"):
            return self.policy.logprobs(batch)

    def ref_logprobs(self, batch: Batch) -> torch.Tensor | None:
        with self.metrics.phase("ref"):
            return self.references.scored.logprobs(batch)

    def update(self, batch: Batch) -> None:
        with self.metrics.phase("update_actor"):
            sums, constants = self.policy.update(batch, self.loss, epochs=self.config.actor.ppo_epochs)
        record_update(self.metrics, sums, constants, self.mesh.is_first_replica_rank)

    def evaluate(self, step: int) -> None:
        """Held-out problems before step `step`, when due. The result is logged with that step."""
        trainer = self.config.trainer
        first = step == 0 and trainer.val_before_train
        due = trainer.test_freq > 0 and step > 0 and step % trainer.test_freq == 0
        if self.evaluator.prompts and (first or due):
            results = self.evaluator.run(step, self.metrics)
            self.summary.add(step, results)
            for name, value in results.items():
                self.metrics.constant(name, value)

    def save(self, steps_done: int) -> None:
        trainer = self.config.trainer
        if trainer.save_freq == -1:
            return
        if steps_done % trainer.save_freq == 0 or steps_done == trainer.total_training_steps:
            with self.metrics.phase("save_checkpoint"):
                self.save_now(steps_done)

    def save_now(self, steps_done: int) -> Path:
        run = {"collector": self.collector.state() if self.collector else {}, "kl": self.revision.kl.state()}
        return self.checkpoints.save(steps_done, self.policy, self.config, run, [self.reward_model])

    def log(self, step: int, samples: list[Sample], table: GroupTable, plan: Plan, batch: Batch) -> None:
        """One exchange for all metrics of the step, then to the sinks."""
        metrics, config = self.metrics, self.config
        mine = metrics.when(self.mesh.is_first_replica_rank)
        mine.mean_of("critic/advantages/mean", batch.advantages[batch.response_mask])
        packs = [rows for mini in batch.mini_batches for rows in mini]
        padding = sum(-sum(batch.lengths[r] for r in rows) % self.policy.multiple for rows in packs)
        mine.mean("perf/padding_ratio", padding, padding + sum(batch.lengths))
        score_metrics(metrics.when(self.mesh.is_block_leader), samples)
        group_table_metrics(metrics, table, config.data.max_response_length)
        for name, value in {**plan.metrics, **self.device.memory_gib()}.items():
            (metrics.max if name.startswith("perf/") else metrics.constant)(name, value)
        metrics.constant("training/global_step", step)
        assert self.collector is not None
        metrics.constant("training/epoch", self.collector.epoch())
        metrics.constant("actor/kl_coef", config.actor.kl_loss_coef if config.actor.use_kl_loss else 0.0)
        reduced = metrics.reduce(self.mesh.all_gather)
        lengths = [p + r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
        reduced |= throughput(reduced, sum(lengths), self.mesh.world_size)
        reduced |= mfu_metrics(
            reduced,
            self.shape,
            lengths,
            num_devices=self.mesh.world_size,
            **peaks(config, self.device.name, self.shape.num_layers),
            num_epochs=config.actor.ppo_epochs,
        )
        self.sinks.log(step, reduced)

    # -- before and after ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = self.config
        self.shape = model_shape(self.arch)
        resumed = self.checkpoints.newest() if config.trainer.resume_mode == "auto" else None
        if resumed is not None:
            check_same_model(resumed, config)
        self.policy.set_optimizer(config.actor.optim, self._num_updates())
        self.reward_model = self._build_reward_model()
        if resumed is not None:
            self._resume(resumed)
        if self.mesh.rank == 0:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            dump = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
            (self.output_dir / "config.yaml").write_text(dump)
        self.mesh.barrier()
        self.sinks = build_sinks(
            config.trainer, rank=self.mesh.rank, first_step=self.first_step, run_config=config.model_dump(mode="json")
        )
        if resumed is not None:
            self.sinks.note(f"resumed from {resumed}: {self.first_step} steps done")
            self.summary.recall()
        elif config.sft.steps:
            self._warm_up()
            self.policy.set_optimizer(config.actor.optim, self._num_updates())
        self.references = References(
            config,
            self.arch,
            self.mesh,
            self.device,
            start=self._warmed_up if config.sft.steps else config.model.path,
            first_step=self.first_step,
        )

    def _resume(self, checkpoint: Path) -> None:
        self.first_step = self.checkpoints.load(checkpoint, self.policy, [self.reward_model])
        run = run_state(checkpoint)
        if self.collector is not None and run.get("collector"):
            self.collector.load_state(run["collector"])
        if run.get("kl"):
            self.revision.kl.load_state(run["kl"])

    def _build_reward_model(self) -> NoRewardModel:
        config = self.config
        if config.reward_model.path is None:
            return NoRewardModel()
        if config.algorithm.iteration_steps is None:
            frozen = FrozenRewardModel(config.reward_model, config.model.dtype, config.actor, self.mesh, self.device)
            return FrozenReward(config.reward_model, frozen, config.actor)
        return LearningReward(
            config.reward_model,
            RewardModel(config.reward_model, config.model.dtype, config.actor, self.mesh, self.device),
            config.actor,
            iteration_steps=config.algorithm.iteration_steps,
            total_steps=config.trainer.total_training_steps,
            seed=config.trainer.seed,
        )

    def _num_updates(self) -> int:
        """Optimizer steps of the whole run, for the learning-rate schedule."""
        config = self.config
        return max(1, config.actor.num_updates(config.trainer.total_training_steps, config.data.train_batch_size))

    def _warm_up(self) -> None:
        config = self.config
        every = max(1, config.sft.steps // 10)

        def report(step: int, metrics: dict[str, float]) -> None:
            if (step + 1) % every == 0 or step + 1 == config.sft.steps:
                self.sinks.note(
                    f"warm-up {step + 1:5d}/{config.sft.steps}  loss {metrics['actor/pg_loss']:.4f}  "
                    f"lr {metrics['actor/lr']:.2e}  {metrics['timing_s/step']:.2f} s/step"
                )

        warm_up(self.policy, self.supervised_rows, config.sft, config.actor, report)
        self._save_hf(self._warmed_up)

    @property
    def _warmed_up(self) -> Path:
        """The warmed-up model: what GRPO starts from, and its reference."""
        return self.output_dir / "warmup"

    def _hand_over(self, step: int, metrics: Metrics) -> None:
        """The engine draws from the model that the run, or its outer iteration, started from."""
        assert isinstance(self.references.initial, Reference)
        self.colocation.hand_over(self.references.initial, step, metrics)

    def _save_hf(self, target: Path) -> None:
        stream = self.policy.hf_weights(self.config.rollout.update_weights_bucket_megabytes)
        save_hf(stream, self.config.model.path, self.tokenizer_path, target, self.mesh)

    def _conclude(self) -> None:
        """Evaluate the final weights, save them as a Hugging Face folder, draw the curves, print before and after."""
        config, total = self.config, self.config.trainer.total_training_steps
        if self.evaluator.prompts and (config.trainer.test_freq > 0 or config.trainer.val_before_train):
            with self.colocation.rollout(total, self.metrics):
                results = self.evaluator.run(total, self.metrics)
            self.summary.add(total, results)
            self.metrics.reduce(self.mesh.all_gather)
            self.sinks.log(total, results)
        if config.trainer.save_hf_at_end:
            self._save_hf(self.output_dir / "hf")
            self.reward_model.save_hf(self.output_dir / "reward_model", self.tokenizer_path)
        if self.mesh.rank == 0:
            self.summary.show(self.sinks)
        self.stopping.finished(total, self.checkpoints.last)

    def close(self, *, alone: bool = False) -> None:
        """Release everything. `alone`: other ranks may not come here, so leave the engine and the groups to the exit."""
        if self.pool is not None:
            self.pool.close()
        if not alone:
            self.engine.shutdown()
            destroy_mesh()
