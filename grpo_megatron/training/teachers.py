"""Teachers in the loop: models beside the policy, or the policy itself, that score its responses (algo/distillation.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.advantages import copies_of
from grpo_megatron.algo.distillation import LEAST_LOGPROB
from grpo_megatron.algo.plan import pack_units, row_weights
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, Config, TeacherConfig
from grpo_megatron.models.lora.peft_folder import PeftFolder
from grpo_megatron.models.policy import Policy, Reference
from grpo_megatron.parallel.control import Parcel
from grpo_megatron.parallel.exchange import build_batch
from grpo_megatron.parallel.mesh import Mesh, SecondLayout
from grpo_megatron.rewards.teacher_server import teacher_server
from grpo_megatron.training.beside import References, policy_start
from grpo_megatron.training.remote_teacher import RemoteTeacher
from grpo_megatron.types import GREEDY, Batch, Plan, Sample, TeacherScores


class Teachers:
    """The teachers of a run, in the policy's layout or their own. They sleep as the reference does. Build it on every rank."""

    def __init__(self, config: Config, checked: Checked, policy: Policy, first_step: int) -> None:
        self.config, self.mesh, self.num_ids = config, policy.mesh, policy.arch.vocab_size
        archs = (checked.teachers.get(name, policy.arch) for name in config.teachers)  # a server may have any
        self.num_rows = [arch.vocab_size for arch in archs]  # of their vocabularies
        self.layouts = [_layout(config, teacher, policy) for teacher in config.teachers.values()]
        self.models: list[Policy | Reference | References | RemoteTeacher] = []
        for name, layout in zip(config.teachers, self.layouts, strict=True):
            with layout.active() if layout is not None else contextlib.nullcontext():
                mesh = policy.mesh if layout is None else layout.mesh
                self.models.append(_build(config, checked, policy, name, mesh, first_step))
        remote = zip(config.teachers, self.models, strict=True)
        self.servers = {name: model.server for name, model in remote if isinstance(model, RemoteTeacher)}
        self.renewed = [model for model in self.models if isinstance(model, References)]
        objective = config.distillation
        self.top_k = objective.top_k if objective.kl != "sampled" else 0
        self.heads: list[Tensor | None] = []  # of the distributions over the whole vocabulary
        if objective.reads_states:
            for name, teacher in config.teachers.items():
                dtype, path = getattr(torch, teacher.dtype or config.model.dtype), teacher.path or policy_start(config)
                self.heads.append(policy.teacher_head(path, checked.teachers[name], dtype))

    def start(self, sample: Sample) -> None:
        """Send a complete sample to its teacher's server, if it has one, while the engine generates others. Returns at once."""
        prompt = sample.prompt
        if sample.index != GREEDY and prompt.teacher in self.servers:
            row = [*(prompt.teacher_ids or prompt.prompt_ids)], sample.response_ids
            sample.scores = self.servers[prompt.teacher].start(row, self.top_k)

    def wait(self, samples: Sequence[Sample]) -> None:
        """Wait for the servers' scores of what `start` has sent."""
        for sample in samples:
            if isinstance(sample.scores, Future):
                sample.scores = sample.scores.result()

    def close(self) -> None:
        """Forget what no server has been asked yet."""
        for server in self.servers.values():
            server.close()

    def score(self, batch: Batch) -> TeacherScores:
        """Compute what the objective reads of the responses. Collective."""
        objective, index = self.config.distillation, self._index(batch)
        rows: list[Tensor | None] = [None] * len(batch) if self.mesh.is_last_stage else []  # their distributions
        logprobs = torch.zeros(batch.response_mask.shape)
        for number, layout in enumerate(self.layouts):
            part, unknown = self._known(self._part(batch, index, number), number)
            scored = self._scored(part, number) if layout is None else self._scored_elsewhere(part, number, layout)
            of_part, distributions = scored
            logprobs += of_part.masked_fill(unknown & (of_part != 0), LEAST_LOGPROB)  # 0 in the rows of others
            for row, distribution in enumerate(distributions):
                rows[row] = distribution if distribution is not None else rows[row]
        scores = TeacherScores(index, torch.zeros_like(logprobs), logprobs, kl=objective.kl, beta=objective.beta)
        if objective.kl == "sampled":
            return scores
        return replace(scores, top=rows) if objective.top_k else replace(scores, states=rows, heads=self.heads)

    def _known(self, part: Batch, number: int) -> tuple[Batch, Tensor]:
        """Replaces ids that a teacher has no row for, and returns which response tokens [B, R] they are.

        They belong to no token: models of one tokenizer differ in the rows that fill up a vocabulary.
        """
        last = self.num_rows[number] - 1
        unknown = torch.zeros(part.response_mask.shape, dtype=torch.bool)
        for row, (tokens, length) in enumerate(zip(part.tokens, part.prompt_lengths, strict=True)):
            unknown[row, : len(tokens) - length] = tokens[length:] > last
        return replace(part, tokens=[tokens.clamp(max=last) for tokens in part.tokens]), unknown

    def _scored(self, part: Batch, number: int) -> tuple[Tensor, list[Tensor | None]]:
        """Returns log-probabilities [B, R] and distributions of the rows in micro-batches of `part`. Collective."""
        objective, built = self.config.distillation, self.models[number]
        model = built.reference if isinstance(built, References) else built
        if objective.kl == "sampled":
            return model.logprobs(part), []
        return model.distribution(part, objective.top_k, self.num_ids)

    def _scored_elsewhere(self, part: Batch, number: int, layout: SecondLayout) -> tuple[Tensor, list[Tensor | None]]:
        """`_scored` by a teacher of another layout. Rows travel between replicas of both layouts that have a rank in common.

        Each row goes to all ranks of one replica of the teacher, and its scores to all ranks of the policy's replica.
        Collective.
        """
        local, other = self.mesh, layout.mesh
        ranks = local.ranks_of_replica(local.dp_rank)
        rows = [row for mini in part.mini_batches for micro in mini for row in micro]
        rows.sort(key=lambda row: (-len(part.tokens[row]), row))
        scorers = sorted({other.replica_of(rank) for rank in ranks})
        parcels = []
        for place, scorer in enumerate(scorers):
            destinations = other.ranks_of_replica(scorer)
            if local.rank == min({*ranks} & {*destinations}):
                dealt = rows[place :: len(scorers)]
                sent = [(row, part.tokens[row].int(), part.prompt_lengths[row]) for row in dealt]
                parcels.append(Parcel(tuple(destinations), local.rank, (local.dp_rank, sent)))
        received = [parcel.content for parcel in local.route(parcels)]
        taken = [(replica, *row) for replica, sent in received for row in sent]
        batch = self._batch_of([tokens.long() for _, _, tokens, _ in taken], [prompt for *_, prompt in taken], number)
        with layout.active():
            logprobs, distributions = self._scored(batch, number)
        parcels = []
        for replica in sorted({replica for replica, *_ in taken}) if other.is_last_stage and other.tp_rank == 0 else ():
            places = [place for place, one in enumerate(taken) if one[0] == replica]
            values = [(taken[i][1], logprobs[i], distributions[i] if distributions else None) for i in places]
            ranks = local.ranks_of_replica(replica)
            last = ranks[-len(ranks) // local.pp :]
            parcels.append(Parcel(tuple(last), local.rank, values))
            if first := ranks[: -len(last)]:
                parcels.append(Parcel(tuple(first), local.rank, [(row, value, None) for row, value, _ in values]))
        out, of_rows = torch.zeros(part.response_mask.shape), list[Tensor | None]([None] * len(part))
        for parcel in local.route(parcels):
            for row, value, distribution in parcel.content:
                length = len(part.tokens[row]) - part.prompt_lengths[row]
                out[row, :length], of_rows[row] = value[:length], distribution
        return out, of_rows if local.is_last_stage and self.config.distillation.kl != "sampled" else []

    def _batch_of(self, tokens: list[Tensor], prompt_lengths: list[int], number: int) -> Batch:
        """Sequences in micro-batches of a teacher, as many on every rank. Collective."""
        actor = list(self.config.teachers.values())[number].layout(self.config.actor)
        rows, none = list(range(len(tokens))), [0.0] * len(tokens)
        packed = self._packed([len(one) for one in tokens], rows, actor)
        lengths = [len(one) - prompt for one, prompt in zip(tokens, prompt_lengths, strict=True)]
        return build_batch(
            rows,
            Plan([*none], none, [[packed]]),
            0,
            tokens=tokens,
            prompt_lengths=prompt_lengths,
            rollout_logprobs=[torch.zeros(length) for length in lengths],
        )

    def _packed(self, lengths: list[int], rows: list[int], actor: ActorConfig) -> list[list[int]]:
        """Micro-batches of `rows`, as many on every rank: experts need equal counts. Collective."""
        [packed] = pack_units([[[row] for row in rows]], lengths, actor)
        count = max(self.mesh.all_gather(len(packed)))
        return packed + [[] for _ in range(count - len(packed))]

    def _index(self, batch: Batch) -> list[int]:
        """The number of each row's teacher; -1: none, of prompts that no data file has."""
        names = list(self.config.teachers)
        if self.config.distillation.key is None:
            return [0] * len(batch)
        return [names.index(name) if name else -1 for name, *_ in batch.teacher_prompts]

    def _part(self, batch: Batch, index: list[int], number: int) -> Batch:
        """The rows of one teacher, in the micro-batches of the update; with prompts of its own, in others.

        The other rows stay in the columns, so that each row has its place. Collective.
        """
        teacher = list(self.config.teachers.values())[number]
        if teacher.prompt_column is None:
            minis = [[[row for row in micro if index[row] == number] for micro in mini] for mini in batch.mini_batches]
            return replace(batch, mini_batches=minis, routes=None, recorded_routes=None)
        tokens, lengths = list(batch.tokens), list(batch.prompt_lengths)
        rows = [row for mini in batch.mini_batches for micro in mini for row in micro if index[row] == number]
        for row in rows:
            if ids := batch.teacher_prompts[row][1]:
                tokens[row], lengths[row] = torch.cat([torch.tensor(ids), tokens[row][lengths[row] :]]), len(ids)
        packed = self._packed([len(one) for one in tokens], rows, teacher.layout(self.config.actor))
        return replace(
            batch,
            tokens=tokens,
            prompt_lengths=lengths,
            mini_batches=[packed],
            shares_prompts=False,
            routes=None,
            recorded_routes=None,
        )

    def weigh(self, batch: Batch) -> None:
        """Set the weights of the scores, when the plan has its token weights. Counts are of the whole mini-batch."""
        assert batch.teacher is not None and batch.plan is not None and batch.table is not None
        config, weights = self.config, batch.token_weights
        if (mode := config.distillation.loss_agg_mode) is not None:
            actor = config.actor.model_copy(update={"loss_agg_mode": mode})
            copies = copies_of(batch.table, config.algorithm)
            limit = config.data.max_response_length
            of_rows = row_weights(batch.plan.mini_batches, batch.table, copies, actor, limit)
            weights = torch.tensor([of_rows[row] for row in batch.rows])[:, None] * batch.loss_mask
        coefficients = torch.tensor([*(teacher.coefficient for teacher in config.teachers.values()), 0.0])  # -1: none
        weights = coefficients[batch.teacher.index][:, None] * weights
        assert not bool(((weights != 0) & (batch.token_weights == 0)).any()), "a token of a teacher is not in the loss"
        batch.teacher = replace(batch.teacher, weights=weights)


def _layout(config: Config, teacher: TeacherConfig, policy: Policy) -> SecondLayout | None:
    """Make the groups of a teacher's layout; None: it is the policy's. Collective."""
    if teacher.tensor_model_parallel_size is None:
        return None
    sizes = {"tp": teacher.tensor_model_parallel_size, "pp": teacher.pipeline_model_parallel_size}
    sizes["ep"] = teacher.expert_model_parallel_size
    return SecondLayout(policy.mesh, policy.device, **sizes, timeout_s=config.trainer.timeout_s)


def _build(
    config: Config, checked: Checked, policy: Policy, name: str, mesh: Mesh, first_step: int
) -> Policy | Reference | References | RemoteTeacher:
    """Build one teacher. The policy as it is needs no memory, and with LoRA nor does the policy as it started. Collective."""
    teacher = config.teachers[name]
    if teacher.url is not None:
        server = teacher_server(name, teacher, policy.arch.vocab_size)
        return RemoteTeacher(server, policy.mesh, config.reward.max_failed_ratio)
    if teacher.self == "current":
        return policy
    if teacher.path is None:
        return References(config, policy, first_step, name)
    dtype = teacher.dtype or config.model.dtype
    parts = (teacher.path, dtype, checked.teachers[name], teacher.layout(config.actor), mesh, policy.device)
    options: dict[str, Any] = {"temperature": config.rollout.temperature}
    if teacher.adapters is not None:
        options["read"] = PeftFolder(teacher.adapters).merged(checked.teachers[name], getattr(torch, dtype))
    return Reference.load(*parts, **options)


def build_teachers(config: Config, checked: Checked, policy: Policy, first_step: int) -> Teachers | None:
    """Build the teachers of the config; None without. Collective."""
    return Teachers(config, checked, policy, first_step) if config.teachers else None
