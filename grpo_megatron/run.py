"""Run: every part of a run, built once on every rank, and the seven verbs of a training step.

    sample -> batch -> forward_backward -> optim_step -> sync        save_state, load_state

`Trainer` is written with it. `grpo_megatron.open` opens one for a notebook or for a loop of your own. Every rank calls the
same verbs in the same order; each verb is collective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, with_length_reward, with_overlong_penalty
from grpo_megatron.algo.chord import mix, mixing_weight, with_experts
from grpo_megatron.algo.losses import (
    MetricSum,
    PolicyLoss,
    has_kl_in_reward,
    needs_reference,
    policy_losses,
    reasons_for_old_pass,
    selected_by,
)
from grpo_megatron.algo.plan import assign_rows, observation_weights, weigh
from grpo_megatron.algo.selection import EntropyController
from grpo_megatron.checks.components import reward_name
from grpo_megatron.checks.resume import InputDigests, announcement, check_resume, recorded_inputs
from grpo_megatron.checks.validate import Checked, check_alone
from grpo_megatron.config import ActorConfig, AlgorithmConfig, Config
from grpo_megatron.config.problems import counted
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.device import Device
from grpo_megatron.models.flops import sequence_cost
from grpo_megatron.models.forward import LossFunction, MetricSums
from grpo_megatron.models.layers.spec import choose_kernels
from grpo_megatron.parallel.exchange import (
    apply_experts,
    apply_observations,
    apply_plan,
    exchange,
    gather_groups,
    gather_samples,
    set_ages,
    with_reward_parts,
)
from grpo_megatron.parallel.heartbeat import Heartbeat
from grpo_megatron.parallel.mesh import destroy_mesh
from grpo_megatron.processes.variables import set_determinism_variables
from grpo_megatron.report.loggers import build_sinks
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.progress import awaited
from grpo_megatron.report.step import record_update
from grpo_megatron.rollout.engine import training_truncation
from grpo_megatron.sampling.collector import FileCollector, numbered_samples
from grpo_megatron.sampling.questions import AskedPrompt, prompt_of
from grpo_megatron.storage.run_files import steps_of
from grpo_megatron.training.beside import References, build_critic
from grpo_megatron.training.checkpoint import Checkpoints, checkpoint_bytes, run_state
from grpo_megatron.training.colocation import build_export, build_policy
from grpo_megatron.training.correction import Correction, build_loss
from grpo_megatron.training.dump import metric_parts, metric_values
from grpo_megatron.training.guards import Guards
from grpo_megatron.training.healing import Mirror
from grpo_megatron.training.output_folder import OutputFolder, record_config
from grpo_megatron.training.placement import build_placement, join_world, with_engine_sequences
from grpo_megatron.training.remote_teacher import without_failed
from grpo_megatron.training.reward_model import build_reward_model
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.training.teachers import build_teachers
from grpo_megatron.training.trace import Trace
from grpo_megatron.training.warm_up import warm_up
from grpo_megatron.types import Batch, GroupTable, Prompt, Sample

VERBS = ("sample", "batch", "forward_backward", "optim_step", "sync", "save_state", "load_state")
Numbers = Sequence[float | Sequence[float] | None]  # advantages: per sample one number, one per response token, or None


def _refuse_closed(*_: Any, **__: Any) -> None:
    raise RuntimeError("this run is closed: its engine and ranks are released; call its verbs inside the `with`")


class Run:
    """The parts of a run on this rank. A context manager: leaving it releases the engine, the workers and the ranks.

    It continues from the newest checkpoint of `trainer.output_dir` where `trainer.resume_mode` says so. `step` counts the
    syncs of changed weights, and is the version of the engine's weights.
    """

    def __init__(self, config: Config, checked: Checked | None = None) -> None:
        """Build all parts in the order in which they need memory. Collective. Raises ConfigError, or RankError."""
        set_determinism_variables(config)  # before the check, which looks for CUDA; the command line has done both
        self.checked = checked or check_alone(config)
        self.config = self.checked.config  # complete, with the user's null values: every checkpoint records it
        with contextlib.ExitStack() as opened:
            self._opened = opened
            self._open_folder()
            self._build_engine()
            self._open_sinks()
            self._build_models()
            self._build_step()
            self._opened = opened.pop_all()
        self._verbs = contextlib.ExitStack()  # is inside `rollout` while samples are generated
        self._is_synced = self._has_stepped = False
        self._num_prompts = self._num_rounds = 0  # sampled since the last batch; calls of `sample` since the last sync
        self.trace: Trace | None = None  # a Trainer's
        self._last_pass: tuple[Batch, list[list[int]], MetricSums] | None = None

    def __enter__(self) -> Run:
        self._opened.enter_context(self.heartbeat.naming_timeouts())
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self._leave_rollout()
        self._opened.__exit__(*exception)
        if exception[0] is None:  # after a failure other ranks may not get here
            self.close()
        for verb in VERBS:
            setattr(self, verb, _refuse_closed)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The training prompts of the config, in the order of their files."""
        return self.checked.train_prompts

    def close(self) -> None:
        """Release the engine and leave the process groups. Collective."""
        self.placement.close()
        destroy_mesh()

    # -- construction --------------------------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Join the ranks, lock the output folder, and find the checkpoint from which the run continues."""
        config, checked, trainer = self.config, self.checked, self.config.trainer
        self.device = Device(trainer.device)
        self.mesh = join_world(config, self.device)
        self.effective = with_engine_sequences(config, checked, self.mesh)
        self.tokenizer_path = config.model.tokenizer_path or config.model.path
        inputs = (config.model.path, self.tokenizer_path, config.ref.path, config.critic.path, *config.reward_paths)
        inputs = (*inputs, *config.teacher_paths)
        self.folder = self._opened.enter_context(OutputFolder(trainer, self.mesh, inputs))
        self.heartbeat = self._opened.enter_context(Heartbeat(trainer.output_dir, self.mesh, trainer.stall_timeout_s))
        size = checkpoint_bytes(checked.arch, config.model.dtype, config.actor.lora)
        if trainer.save_freq != -1:
            self.folder.check_space(size)
        keep, verify = trainer.max_actor_ckpt_to_keep, trainer.verify_checkpoints
        self.checkpoints = Checkpoints(trainer.output_dir, self.mesh, keep, verify, in_background=trainer.async_save)
        self.heartbeat.is_flushing = lambda: self.checkpoints.pending is not None
        self.mirror = Mirror(self.mesh, size)
        self.resumed_from = self.mirror.newer(self.checkpoints.newest()) if trainer.resume_mode == "auto" else None
        self.changed_keys = [] if self.resumed_from is None else check_resume(self.resumed_from, config)
        self.first_step = self.step = 0 if self.resumed_from is None else steps_of(self.resumed_from)
        self.inputs = None
        if self.mesh.rank == 0:  # validation has compared the weights with the checkpoint's digests, or accepted others
            is_known = self.resumed_from is not None and not trainer.accept_changed_inputs
            recorded = recorded_inputs(self.resumed_from) if self.resumed_from and is_known else None
            self.inputs = InputDigests(self.effective, recorded)
            self._opened.callback(self.inputs.close)
        self.cadence = Cadence(trainer, config.algorithm.iteration_steps)

    def _build_engine(self) -> None:
        """Build the policy's weights, then the engine, which sleeps afterwards.

        All else that needs device memory comes later: gradients, optimizer, reward model, reference (planning/phases.py).
        """
        config, checked = self.effective, self.checked
        with awaited(f"loading the weights of {config.model.path}", self.mesh.rank == 0):
            self.policy = build_policy(config, checked, self.mesh, self.device)
        self.save_hf = build_export(config, checked, self.policy)
        self.placement = build_placement(config, checked, self.policy, self.cadence, self._opened)

    def _open_sinks(self) -> None:
        """Record the config, and open the sinks of metrics and notes."""
        config, trainer = self.config, self.config.trainer
        raw = config.record()
        record_config(trainer.output_dir, self.mesh, raw, resumed=self.resumed_from is not None)
        sinks = build_sinks(trainer, rank=self.mesh.rank, first_step=self.first_step, run_config=raw)
        self.sinks = self._opened.enter_context(sinks)
        self.heartbeat.listener = sinks.enter
        if self.device.is_cuda and config.rollout.max_num_seqs is None and config.has_rollouts:
            count = self.effective.rollout.sequences
            sinks.note(f"an engine decodes at most {count} sequences at a time (rollout.max_num_seqs=null)")
        sinks.note(f"kernels: {choose_kernels(config.actor.megatron, self.device, config.model.dtype).describe()}")
        if self.folder.moved_to is not None:
            sinks.note(f"an earlier run's files are now in {self.folder.moved_to}")

    def _build_models(self) -> None:
        """Bring the models into their state before the first step: warmed up, or restored."""
        config, checked, actor = self.effective, self.checked, self.config.actor
        if self.resumed_from is None and config.sft.steps:
            warm_up(config, checked, self.policy, self.heartbeat, self.sinks.note, self.save_hf, self.inputs)
        num_updates, period = (actor.num_updates(n, config.data.train_batch_size) for n in (config.policy_steps, 1))
        self.policy.set_optimizer(actor.optim, max(1, num_updates), period=period)
        self.reward_model = build_reward_model(config, checked, self.mesh, self.device)
        self.critic = build_critic(config, checked, self.mesh, self.device)
        self.trained = [
            *(self.reward_model.trained if self.reward_model else ()),
            *([self.critic] if self.critic else ()),
        ]
        if self.resumed_from is not None:
            self.checkpoints.load(self.resumed_from, self.policy, self.trained)
            self.sinks.note(f"resumed from {self.resumed_from}: {counted(self.first_step, 'step')} done")
            if self.changed_keys:
                self.sinks.note(announcement(self.changed_keys, self.policy.num_updates, num_updates))
        parts = config, self.policy, self.first_step
        self.references = References(*parts) if needs_reference(config.algorithm, actor) else None
        self.teachers = build_teachers(config, checked, self.policy, self.first_step)
        if self.teachers is not None:
            self._opened.callback(self.teachers.close)
            if self.placement.generator is not None:
                self.placement.generator.on_complete = self.teachers.start
        self.renewed = [
            *([self.references] if self.references else ()),
            *(self.teachers.renewed if self.teachers else ()),
        ]

    def _build_step(self) -> None:
        """Build what a step does with the models, and restore what a checkpoint has besides them."""
        config = self.effective
        self.correction = Correction(config.algorithm, config.actor, self.mesh, config.data)
        self.entropy = EntropyController(config.actor)
        self.loss = self._build_loss(self.entropy.applied())
        self.experts, self.expert_samples = None, list[Sample]()  # CHORD's rows, and those of the last batch
        if size := config.algorithm.chord.batch_size:
            rows = Sampler(self.checked.supervised_rows, size, config.data.shuffle, config.data.seed)
            self.experts = FileCollector(rows, self.mesh)
        self.guards = Guards(config, self.mesh, self.save_hf, self.heartbeat.phase)
        self.metrics = Metrics(self.device.synchronize, in_float32=config.model.exact)
        self.metrics.within = self.heartbeat.phase
        self.resumed = {} if self.resumed_from is None else run_state(self.resumed_from)
        self.num_steps_ahead = len((self.resumed.get("collector") or {}).get("ahead", ()))
        self._restore(self.resumed, self.first_step + self.num_steps_ahead)

    def _restore(self, state: Mapping[str, Any], first_step: int) -> None:
        if state.get("kl"):
            self.correction.kl.load_state(state["kl"])
        if entropy := state.get("entropy"):
            self.entropy.coefficient, self.entropy.is_low = entropy
            self.loss = self._build_loss(self.entropy.applied())
        self.placement.provenance.load_state(state.get("weights_digests", {}), first_step)

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def sample(self, prompts: Sequence[AskedPrompt | Prompt], n: int | None = None) -> list[Sample]:
        """Generate `n` responses to each prompt (None: `rollout.n`), graded where the config has a reward function.

        A prompt is a row of the task (a mapping; its reward grades the responses), a text or chat messages (both as the
        task's question; without a reward), or some of `run.prompts`. Syncs first if the engine has other
        weights than the policy. Returns this rank's samples, in the order of prompts. Their tokens, log-probabilities and
        rewards are `response_ids`, `rollout_logprobs` and `reward`. Set `reward` to use one of your own. Rewards of
        reward models are added in `batch`. Raises RuntimeError in a run whose ranks do not sample, ValueError.
        """
        generator, config = self.placement.generator, self.config
        if n is not None and n < 1:
            raise ValueError(f"n={n} responses to a prompt; ask for one or more, or leave n out for rollout.n")
        if isinstance(prompts, str | Mapping):
            raise ValueError("prompts is one prompt; give a list of them")
        if generator is None:
            raise RuntimeError(
                f"algorithm.source={config.algorithm.source}, rollout.placement={config.rollout.placement}: this rank has"
                " no engine to sample with; set source=policy and placement=colocated, or use Trainer"
            )
        if not self._is_synced or self._has_stepped:
            self.sync()
        asked = [prompt if isinstance(prompt, Prompt) else self._prompt(prompt) for prompt in prompts]
        samples = generator.sample(
            asked,
            config.rollout.n if n is None else n,
            round_id=self.step + (self._num_rounds << 32),
            version=self.step,
            max_tokens=config.data.max_response_length,
            temperature=config.rollout.temperature,
            truncation=training_truncation(config.rollout),
            greedy=advantage_estimators.facts(config.algorithm.adv_estimator).needs_greedy_reward,
            limits_by_prompt=n is None,
            metrics=self.metrics,
        )
        for sample in samples:
            sample.prompt_index += self._num_prompts
        self._num_prompts += len(asked)
        self._num_rounds += 1
        return samples

    def batch(self, samples: Sequence[Sample], advantages: str | Numbers | None = None) -> Batch:
        """Make this rank's share of a training batch: rewards of every rank, who trains on what, tokens, log-probabilities.

        `advantages`: the name of an estimator, "module:function", or numbers of your own in the order of `samples`: one
        per sample, one per response token, or None (the sample is left out). None: `algorithm.adv_estimator`. The result
        has columns [rows of this rank, longest response], `table` (all samples) and `plan`. Raises ValueError.
        """
        self._leave_rollout()
        self._num_prompts = 0
        algorithm, given = self.config.algorithm, None
        table = self._rewarded(samples)
        if isinstance(advantages, str):
            algorithm = self._with_estimator(advantages)
        elif advantages is not None:
            given = self._by_row(samples, advantages, table)
        if self.experts is not None:
            samples, table = self._with_experts(self.experts, samples, table)
        with self.metrics.phase("adv"):
            plan = assign_rows(
                table,
                algorithm,
                self.config.actor,
                dp=self.mesh.dp,
                train_batch_size=self.config.data.train_batch_size,
                cost=sequence_cost(self.policy.arch),
                exact=self.config.model.exact,
                given=given,
                distills=self.teachers is not None,
            )
        if self.teachers is not None:
            with self.metrics.phase("teachers"):
                self.teachers.wait(samples)
        batch = exchange(samples, table, plan, self.mesh)
        if self.config.algorithm.rollout_correction.prox_logp_method == "loglinear":
            set_ages(samples, batch, table, self.step, self.mesh)
        batch.old_logprobs = self._old_logprobs(batch)  # None: the update's own
        batch.ref_logprobs = self._ref_logprobs(batch)
        if self.teachers is not None:
            with self.metrics.phase("teachers"):
                batch.teacher = self.teachers.score(batch)
                if self.config.teachers.keys() - self.config.local_teachers.keys():
                    table = without_failed(batch, table, self.mesh, self.metrics)
        table = self.correction.with_columns(batch, table, self.metrics)  # rejected tokens, KL in the reward
        if self.critic is not None:
            table = self.critic.with_columns(batch, table, plan, self.metrics)  # values
        with self.metrics.phase("adv"):
            limit, distills = self.config.data.max_response_length, self.teachers is not None
            actor = self.config.actor
            batch.plan = weigh(plan, table, algorithm, actor, max_response_length=limit, distills=distills)
            batch.table = table
            if self.experts is not None:
                self.metrics.constant("actor/chord_mu", mu := mixing_weight(self.step, algorithm.chord))
                batch.plan, weights = mix(batch.plan, table, mu)
                apply_experts(batch, table, weights)
            apply_plan(batch, batch.plan, self.mesh.dp_rank)
            self.correction.select(batch, actor)
            if actor.echo_coef:
                apply_observations(batch, table, observation_weights(batch.plan, table, actor.echo_coef))
            if self.teachers is not None:
                self.teachers.weigh(batch)
            if self.critic is not None:
                self.critic.set_returns(self.step, batch, table, self.metrics)
        return batch

    def forward_backward(
        self, batch: Batch, loss: str | PolicyLoss | None = None, mini_batch: int = 0
    ) -> dict[str, float]:
        """Compute the gradients of one mini-batch, in place of earlier ones. Returns the loss's metrics over all ranks.

        `loss`: a name of `actor.loss_mode`, "module:function", or a function with the signature of
        `algo.losses.PolicyLoss`: [B, R] tensors -> the loss of each token, which the batch's token weights add up. None:
        `actor.loss_mode`. `batch.mini_batches` has one entry per optimizer step of the config. "loss" is the total, with
        KL penalty and entropy. Raises IndexError for a mini-batch that the batch lacks.
        """
        self._leave_rollout()
        if not 0 <= mini_batch < (number := len(batch.mini_batches)):
            why = "" if number else ": no sample has a reward, or every token was rejected"
            raise IndexError(f"mini_batch={mini_batch}, and the batch has {number} (actor.ppo_mini_batch_size){why}")
        sums = self._compute_gradients(batch, self._loss_of(loss), mini_batch)
        ranks = self.mesh.all_gather(metric_parts(sums) if self.mesh.is_replica_reporter else {})
        return metric_values(ranks, self.config.actor)

    def optim_step(self) -> dict[str, float]:
        """Clip the gradients of the last `forward_backward` and step. Returns gradient norm, learning rate, skipped steps.

        A step that a guard forbids (section `guards`) is skipped. Raises TooManySkippedSteps, GuardStop, and RuntimeError
        without gradients.
        """
        if self._last_pass is None:
            raise RuntimeError("no gradients: call run.forward_backward(batch) before run.optim_step()")
        return self.policy.update_metrics([self._step()])

    def sync(self) -> dict[str, float]:
        """Send the policy's weights to the engine, and attest them. Returns the metrics so far, and clears them.

        The digests of the engine's memory are those of the policy, and `rollout/probe_logp_diff_mean` compares the
        log-probabilities of fixed tokens. Raises RankError otherwise.
        """
        self._leave_rollout()
        self.step += int(self._has_stepped)
        self._has_stepped, self._num_rounds = False, 0
        self._verbs.enter_context(self.rollout(self.step))
        self._is_synced = True
        return self.metrics.reduce(self.mesh.all_gather)

    def save_state(self, path: Path | str) -> Path:
        """Write a checkpoint: policy, optimizer, random state, critic and reward model. Returns its folder.

        The folder is complete or absent, and replaces an earlier one. `convert.to_hf` reads it. Raises RankError.
        """
        self._leave_rollout()
        steps_done, target = self.step + int(self._has_stepped), Path(path)
        saved = self.checkpoints.save(steps_done, self.policy, self.config, self.state(), self.trained, target=target)
        self.checkpoints.wait()
        return saved

    def load_state(self, path: Path | str) -> None:
        """Restore what `save_state`, or a checkpoint of Trainer, has written, in any layout. Raises RankError, StorageError."""
        self._leave_rollout()
        self.step = self.checkpoints.load(Path(path), self.policy, self.trained)
        self._restore(run_state(Path(path)), self.step)
        self._has_stepped, self._num_rounds, self._last_pass = False, 0, None

    # -- what the verbs are made of ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def rollout(self, step: int) -> Iterator[None]:
        """Inside the block, the engine is awake and has the policy's weights as version `step`. Collective."""
        self.step = step
        with self.placement.rollout(step, self.metrics):
            yield

    def update(self, batch: Batch) -> None:
        """Make every optimizer step of the config on a batch: `actor.ppo_epochs` times each mini-batch. Records metrics."""
        sums, norms = [], []
        with self.metrics.phase("update_actor"):
            for _ in range(self.config.actor.ppo_epochs):
                for mini_batch in range(len(batch.mini_batches)):
                    sums.append(self._compute_gradients(batch, self.loss, mini_batch))
                    norms.append(self._step())
            constants = self.policy.update_metrics(norms)
        record_update(self.metrics, sums, constants, self.mesh.is_replica_reporter)
        if self.config.actor.entropy_target is not None:
            self._adapt_entropy([one["actor/entropy"] for one in sums if "actor/entropy" in one])

    def _adapt_entropy(self, parts: list[MetricSum]) -> None:
        """Adapt the entropy bonus of the next step to the mean entropy of this one. Collective."""
        pairs = [(float(part.total), int(part.num_tokens or 0)) for part in parts]
        of_ranks = self.mesh.all_gather(pairs if self.mesh.is_replica_reporter else [])
        total, count = (math.fsum(pair[i] for of_rank in of_ranks for pair in of_rank) for i in range(2))
        self.metrics.constant("actor/entropy_coeff", self.entropy.applied().entropy_coeff)
        if count:
            self.entropy.update(total / count)
        self.loss = self._build_loss(self.entropy.applied())

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint has besides models and optimizers, as plain JSON."""
        return {
            "kl": self.correction.kl.state(),
            "entropy": [self.entropy.coefficient, self.entropy.is_low] if self.config.actor.entropy_target else [],
            "inputs": self.inputs.state() if self.inputs else {},
            "weights_digests": self.placement.provenance.state(),
        }

    def _leave_rollout(self) -> None:
        """The engine sleeps, and the optimizer is on the device."""
        self._is_synced = False
        self._verbs.close()

    def _prompt(self, question: AskedPrompt) -> Prompt:
        environment, config = self.checked.environment, self.config
        reward = "" if environment and environment.gives_rewards else reward_name(config.reward)
        renderer = environment.renderer if environment else None
        return prompt_of(question, config.data, self.checked.tokenizer, reward, renderer)

    def _rewarded(self, samples: Sequence[Sample]) -> GroupTable:
        """Every sample's reward, on every rank."""
        table = gather_groups(samples, self.mesh)
        if names := self.config.algorithm.gdpo_reward_keys:
            table = with_reward_parts(samples, table, names, self.mesh)
        if self.reward_model is not None:
            table = self.reward_model.reward(self.step, samples, table, self.metrics)
        self.guards.begin(self.step, table)
        reward = self.config.reward
        table = with_overlong_penalty(table, reward.overlong_buffer, self.config.data.max_response_length)
        return with_length_reward(table, reward.length)

    def _with_experts(
        self, experts: FileCollector, samples: Sequence[Sample], table: GroupTable
    ) -> tuple[list[Sample], GroupTable]:
        """Add the step's rows of CHORD's expert, which are a function of the step's number. Collective."""
        size = self.config.algorithm.chord.batch_size
        experts.cursor = self.step * size
        self.expert_samples = numbered_samples(experts.groups(self.step, size, self.metrics))
        for sample in self.expert_samples:
            sample.prompt_index += max(table.prompt_index, default=-1) + 1
        return [*samples, *self.expert_samples], with_experts(table, gather_groups(self.expert_samples, self.mesh))

    def _old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        config = self.config
        if not reasons_for_old_pass(config.algorithm, config.actor, config.data.train_batch_size):
            return None
        with self.metrics.phase("old_log_prob"):
            if selected_by(config.actor) == "entropy":
                batch.old_entropy = torch.zeros_like(batch.rollout_logprobs)
            if advantage_estimators.facts(config.algorithm.adv_estimator).needs_score_norms:
                batch.squares = torch.zeros_like(batch.rollout_logprobs)
            return self.policy.logprobs(batch, entropies=batch.old_entropy, squares=batch.squares)

    def _ref_logprobs(self, batch: Batch) -> torch.Tensor | None:
        with self.metrics.phase("ref"):
            return None if self.references is None else self.references.logprobs(batch)

    def _compute_gradients(self, batch: Batch, loss: LossFunction, mini_batch: int) -> MetricSums:
        micro_batches, num_forward_only = batch.updates()[mini_batch]
        result = self.policy.forward_backward(batch, micro_batches, loss, num_forward_only)
        if self.correction.is_folded and batch.old_logprobs is None:  # a batch used again keeps those of its first pass
            batch.old_logprobs = self.policy.from_last_stage(result.host_logprobs())
            self.correction.measure(batch, self.metrics)
        self._last_pass = batch, micro_batches, result.sums
        return result.sums

    def _step(self) -> float:
        """Make the optimizer step if the guards allow it. Returns the gradient's norm, or infinity."""
        assert self._last_pass is not None
        norm = self.policy.optim_step(partial(self.guards, *self._last_pass))
        self._last_pass, self._has_stepped = None, True
        return norm

    def _loss_of(self, loss: str | PolicyLoss | None) -> LossFunction:
        if loss is None:
            return self.loss
        if isinstance(loss, str):
            policy_losses.get(loss)  # raises ValueError, which names the nearest known loss
            return self._build_loss(self.config.actor.model_copy(update={"loss_mode": loss}))
        return self._build_loss(self.config.actor, loss)

    def _build_loss(self, actor: ActorConfig, loss: PolicyLoss | None = None) -> LossFunction:
        config = self.config
        discount = config.distillation.discount
        return build_loss(actor, config.algorithm, loss, teachers=tuple(config.teachers), discount=discount)

    def _with_estimator(self, name: str) -> AlgorithmConfig:
        advantage_estimators.get(name)  # raises ValueError, which names the nearest known estimator
        if advantage_estimators.facts(name).needs_values and self.critic is None:
            raise ValueError(f"advantages={name!r} needs the values of a critic; set algorithm.adv_estimator={name}")
        if advantage_estimators.facts(name).needs_score_norms and name != self.config.algorithm.adv_estimator:
            raise ValueError(
                f"advantages={name!r} reads the policy's probabilities; set algorithm.adv_estimator={name}"
            )
        return self.config.algorithm.model_copy(update={"adv_estimator": name})

    def _by_row(self, samples: Sequence[Sample], numbers: Numbers, table: GroupTable) -> Advantages:
        """The user's numbers of all ranks, by table row."""
        if self.critic is not None or has_kl_in_reward(self.config.algorithm):
            raise ValueError(
                "advantages of your own would be replaced: a critic and algorithm.use_kl_in_reward change advantages when"
                " log-probabilities are known; set algorithm.adv_estimator=grpo and use_kl_in_reward=false"
            )
        problem = None
        if len(numbers) != len(samples):
            problem = f"advantages has {len(numbers)} entries for {len(samples)} samples; give one per sample"
        local: dict[tuple[int, int], Any] = {}
        for sample, number in zip(samples, numbers, strict=False):
            value = torch.as_tensor(float("nan") if number is None else number, dtype=torch.float64)
            if value.dim() and len(value) != len(sample.response_ids):
                problem = f"advantages has {len(value)} numbers for a response of {len(sample.response_ids)} tokens"
            elif number is not None and not bool(value.isfinite().all()):
                problem = (
                    f"advantages has {number} for sample {sample.index} of prompt {sample.prompt_index}: not finite"
                )
            local[sample.prompt_index, sample.index] = None if number is None else value.tolist()
        if problem:
            raise ValueError(problem)
        merged = gather_samples(local, self.mesh)
        return [merged[key] for key in zip(table.prompt_index, table.index, strict=True)]
