"""Stand-ins for tests in one process: a mesh of one rank, engines, collectors, workers, environments, and a whole run.

`run_trainer` is the real Trainer over stand-ins for models, engine and ranks: milliseconds per step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from grpo_megatron.config import Config
from grpo_megatron.data.responses import WrittenResponse
from grpo_megatron.parallel.exchange import build_batch
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.report import metrics as sinks_module
from grpo_megatron.report.console import Summary
from grpo_megatron.report.metrics import Sink
from grpo_megatron.rewards.reward import RewardItem, RewardResult
from grpo_megatron.rollout.engine import FULL, Completion, Request, RolloutEngine, stable_hash
from grpo_megatron.sampling.collector import Group, State
from grpo_megatron.sampling.multi_turn import Answer, Trajectory, TrajectoryLimits
from grpo_megatron.sync.digest import Expected
from grpo_megatron.sync.weight_sync import SyncHeader
from grpo_megatron.types import GREEDY, Prompt, Sample
from tests import tiny


class LoneMesh(Mesh):
    """A world of one rank without process groups. It can report `world_size` blocks, for cuts that send nothing."""

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        sizes = {"tp": 1, "pp": 1, "dp": world_size, "ep": 1, "rollout_tp": 1}
        places = {"tp_rank": 0, "pp_rank": 0, "dp_rank": rank}
        groups = {"control": None, "tp_group": None, "pp_group": None, "ep_group": None}
        super().__init__(world_size=world_size, rank=rank, **sizes, **places, **groups)

    def total(self, values: list[int]) -> list[int]:
        return values

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    gather = all_gather

    def agree(self, problem: str | None) -> None:
        if problem is not None:
            raise RankError(problem)

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None: ...


class SeedEngine:
    """The response to a request is its seed modulo 100, and then 7 more tokens where that is odd; the longer ones finish last.

    Records requests and versions. `after_step` is called in each step.
    """

    def __init__(self, after_step: Callable[[], None] = lambda: None) -> None:
        self.version = 0
        self.requests: list[Request] = []
        self.versions: list[int] = []
        self.after_step = after_step
        self._queue: dict[str, Request] = {}

    require: Any = lambda self, version: None
    stream = RolloutEngine.stream
    generate = RolloutEngine.generate

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    def submit(self, request_id: str, request: Request, version: int) -> None:
        self.requests.append(request)
        self.versions.append(version)
        self._queue[request_id] = request

    def poll(self) -> list[tuple[str, Completion]]:
        self.after_step()
        even = {i: r for i, r in self._queue.items() if r.seed % 2 == 0}
        finished = even or self._queue
        self._queue = {i: r for i, r in self._queue.items() if i not in finished}
        ids = {i: [r.seed % 100] * (1 if even else 8) for i, r in finished.items()}
        return [(i, Completion(ids[i], [-1.0] * len(ids[i]), "stop")) for i in finished]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._queue[request_id]

    def cache_statistics(self) -> tuple[int, int]:
        return 8, 6


class CountingEngine(SeedEngine):
    """The response to prompt `number` is 0, 1, 2, ... of `lengths[number]` tokens; a request gives max_tokens of them at most."""

    def __init__(self, lengths: Sequence[int], after_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(after_step)
        self.lengths = lengths

    def poll(self) -> list[tuple[str, Completion]]:
        self.after_step()
        finished, self._queue = self._queue, {}
        return [(i, self._completion(request)) for i, request in finished.items()]

    def _completion(self, request: Request) -> Completion:
        start, length = request.num_written, self.lengths[request.prompt_ids[0]]
        assert request.prompt_ids[1:] == tuple(range(start)), "the prompt must end with the response so far"
        end = min(length, start + request.max_tokens)
        ids = list(range(start, end))
        return Completion(ids, [-1.0 - request.seed % 7] * len(ids), "stop" if end == length else "length")


def prompt(number: int) -> Prompt:
    return Prompt(f"p/{number}", (number,), f"question {number}", "answer", "task", "reward")


class ScriptedCollector:
    """Prompt number p of the endless sequence gets the rewards `script[p % len(script)]`. Records the requests."""

    def __init__(self, script: Sequence[tuple[float, ...]], mesh: Mesh) -> None:
        self.script, self.mesh, self.cursor = list(script), mesh, 0
        self.requests: list[tuple[int, int]] = []  # step, count

    def groups(self, step: int, count: int, metrics: Any) -> list[Group]:
        self.requests.append((step, count))
        groups = []
        for number in range(self.cursor, self.cursor + count):
            rewards = self.script[number % len(self.script)]
            held = range(self.mesh.engine_replica, len(rewards), self.mesh.num_engine_replicas)
            samples = [
                Sample(
                    prompt=prompt(number),
                    prompt_index=number - self.cursor,
                    index=i,
                    response_ids=[number, i],
                    rollout_logprobs=[-0.1, -0.2],
                    finish_reason="stop",
                    version=step,
                    reward=rewards[i],
                )
                for i in held
            ]
            groups.append(Group(step, samples))
        self.cursor += count
        return groups

    def epoch(self) -> float:
        return self.cursor / len(self.script)

    def state(self) -> State:
        return {"cursor": self.cursor}

    def load_state(self, state: State) -> None:
        self.cursor = state["cursor"]


class FakeRewardPool:
    """Grades the n-th sample of a sample with `grade(completion, n)`. `events` tells the order of all calls."""

    num_workers = 2

    def __init__(
        self,
        grade: Callable[[str, int], RewardResult] = lambda text, n: RewardResult(float(len(text)), {"acc": 1.0}),
        problem: str | None = None,
    ) -> None:
        self.grade, self.problem = grade, problem
        self.events: list[str] = []
        self.items: list[RewardItem] = []

    def begin(self) -> None:
        self.events, self.items = ["begin"], []

    def submit(self, item: RewardItem) -> None:
        self.events.append("submit")
        self.items.append(item)

    def serve(self) -> None:
        self.events.append("serve")
        if self.problem:
            raise RuntimeError(self.problem)

    def collect(self) -> list[RewardResult]:
        self.events.append("collect")
        return [self.grade(item.completion, number) for number, item in enumerate(self.items)]


class FakeGenerator:
    """Responses with the rewards `reward(prompt, index, round_id)`; records every sample."""

    def __init__(
        self, reward: Callable[[Prompt, int, int], float] = lambda prompt, index, round_id: float(index)
    ) -> None:
        self.reward, self.mesh = reward, LoneMesh()
        self.draws: list[dict[str, Any]] = []

    def sample(
        self, prompts: Sequence[Prompt], n: int, *, greedy: bool = False, metrics: Any, **arguments: Any
    ) -> list[Sample]:
        self.draws.append({"uids": [p.uid for p in prompts], "n": n, "greedy": greedy, **arguments})
        indices = [*([GREEDY] if greedy else []), *range(n)]
        return [
            Sample(
                prompt=p,
                prompt_index=place,
                index=index,
                response_ids=[1, 2 + index],
                rollout_logprobs=[-1.0, -1.0],
                finish_reason="stop",
                version=arguments["version"],
                reward=self.reward(p, index, arguments["round_id"]),
            )
            for place, p in enumerate(prompts)
            for index in indices
        ]


# -- Trajectories: tokens are numbers below 100; what comes next is a hash of the request alone ---------------------------

LIMITS = TrajectoryLimits(prompt=8, response=40, turns=4)
END = 99  # the token that ends a turn


def trajectory(number: int, **changes: object) -> Trajectory:
    settings = {"row": {"number": number}, "environment_seed": 7, "seed": number, "limits": LIMITS}
    settings |= {"temperature": 1.0, "truncation": FULL, "version": 3}
    return Trajectory(key=f"t{number}", **{**settings, **changes})  # type: ignore[arg-type]


class FakeEngine:
    """A turn takes as many polls as it has tokens; at most `width` requests are served at a time. Records the batches."""

    def __init__(self, width: int = 3) -> None:
        self.width, self.version = width, 3
        self.queue: dict[str, tuple[Request, Completion, int]] = {}  # id -> request, completion, polls left
        self.batches: list[tuple[str, ...]] = []
        self.requests: list[tuple[str, Request]] = []
        self.aborted: list[str] = []

    def submit(self, request_id: str, request: Request, version: int) -> None:
        assert version == self.version and request_id not in self.queue
        draw = stable_hash(repr((request.prompt_ids, request.seed)))
        length = 1 + draw % 7
        ids = [(draw >> i) % 90 for i in range(length - 1)] + [END]
        reason = "stop" if length <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        self.requests.append((request_id, request))
        self.queue[request_id] = (request, Completion(ids, [-0.5] * len(ids), reason), length)

    def poll(self) -> list[tuple[str, Completion]]:
        served = list(self.queue)[: self.width]
        assert served, "polled without a request"
        self.batches.append(tuple(served))
        finished = []
        for key in served:
            request, completion, left = self.queue[key]
            self.queue[key] = (request, completion, left - 1)
            if left == 1:
                del self.queue[key]
                finished.append((key, completion))
        return finished

    def cache_statistics(self) -> tuple[int, int]:
        return 8, 2

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for key in request_ids:
            del self.queue[key]


class FakeAnswers:
    """The environment's answer is a hash of the response so far. `log` has every call."""

    def __init__(self, done_after: int = 3, fail: dict[tuple[str, int], str] | None = None) -> None:
        self.done_after, self.fail = done_after, fail or {}
        self.finishes = False
        self.open: set[str] = set()
        self.asked: set[str] = set()
        self.takes: list[tuple[str, ...]] = []

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        self.open |= {t.key for t in trajectories}
        self.asked |= self.open

    def ask(self, trajectory: Trajectory) -> None:
        assert trajectory.key in self.open - self.asked and not trajectory.is_over
        self.asked.add(trajectory.key)

    def ask_to_finish(self, trajectory: Trajectory) -> bool:
        assert trajectory.is_over and trajectory.key in self.open - self.asked
        if self.finishes and trajectory.status in ("turn_limit", "length"):
            self.asked.add(trajectory.key)
            return True
        return False

    def take(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
        self.takes.append(tuple(t.key for t in trajectories))
        return [self._answer(t) for t in trajectories]

    def _answer(self, t: Trajectory) -> Answer:
        self.asked.remove(t.key)
        if status := self.fail.get((t.key, t.num_generated)):
            if status == "lost":
                raise RuntimeError("no worker can run")
            return Answer([], status=status, message="why")
        if t.is_over:
            return Answer([], reward=0.25, done=True, metrics={"graded": 1.0})
        if not t.turns:
            return Answer([1, 2, t.row["number"]])
        draw = stable_hash(repr(t.response_ids))
        done = t.num_generated == self.done_after
        observation = [] if done else [END, *(draw >> i & 63 for i in range(draw % 4))]
        return Answer(observation, reward=0.5 if draw % 2 else None, done=done, metrics={"calls": 1.0})

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        for t in trajectories:
            assert t.is_over
            self.open.remove(t.key)


# -- A run: every stand-in appends its calls to one list of events -------------------------------------------------------
# Trainer, Run, cadence, collectors, plan, correction, colocation, references, validation, metrics and trainer.json are real.

WEIGHTS = "weights.txt"  # in a folder that a run has saved: the name of the weights


def tiny_arch() -> Any:
    from grpo_megatron.models.families import architecture_of

    return architecture_of({**tiny.COMMON, "model_type": "llama"})


def logprob_under(weights: str) -> float:
    """The log-probability of every token: -1, as in generated samples, minus 0.01 per update."""
    kind, _, updates = weights.rpartition(" ")
    return -1.0 - 0.01 * (int(updates) if kind == "policy after" else 0)


class NamedWeights:
    """The part that policy and reference share: `weights` is the name of what they hold."""

    weights: str

    def logprobs(
        self, batch: Any, temperature: float | None = None, entropies: Any = None, squares: Any = None
    ) -> torch.Tensor:
        return logprob_under(self.weights) * batch.response_mask

    def hf_weights(self, bucket_megabytes: int) -> Iterator[Any]:
        yield self.weights

    def engine_weights(self, weight_sync: Any, version: int) -> Iterator[Any]:
        return self.hf_weights(0)

    def expected_digests(self, weight_sync: Any) -> Expected:
        return Expected({}, self.weights, [])


class FakePolicy(NamedWeights):
    """`updates` counts optimizer steps: what a checkpoint restores and what `copy_from` would copy."""

    lora = None

    def __init__(self, events: list[Any], device: Any) -> None:
        self.events, self.device, self.mesh, self.updates = events, device, LoneMesh(), 0
        self.arch, self.multiple, self.is_offloaded = tiny_arch(), 1, False
        self.stage_of: dict[str, int] = {}

    def set_optimizer(self, optim: Any, total_steps: int, *, period: int = 1) -> None:
        self.period = period
        assert not self.is_offloaded
        self.events.append(("optimizer", optim.lr, total_steps))

    @property
    def weights(self) -> str:  # type: ignore[override]
        return f"policy after {self.updates}"

    @property
    def num_updates(self) -> int:
        return self.updates * self.period

    def forward_backward(self, batch: Any, micro_batches: Any, loss: Any, num_forward_only: int = 0) -> Any:
        self.events.append(("update", len(batch)))
        return SimpleNamespace(sums={}, host_logprobs=lambda: self.logprobs(batch))

    def from_last_stage(self, logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs

    def optim_step(self, allows: Any = None) -> float:
        self.updates += 1
        return 1.0

    def update_metrics(self, norms: Any) -> dict[str, float]:
        return {"actor/lr": 0.0}

    def update(self, batch: Any, loss: Any, *, epochs: int = 1, guard: Any = None) -> Any:
        self.updates += 1
        self.events.append(("update", len(batch)))
        return [], {"actor/lr": 0.0, "actor/pg_loss": 0.0}

    def has_finite_weights(self) -> bool:
        return True

    def offload(self) -> None:
        self.is_offloaded = True

    def onload(self) -> None:
        self.is_offloaded = False


class NoReport(Sink):
    def log(self, step: int, metrics: Any) -> None: ...


class FakeReference(NamedWeights):
    """Holds the name of its weights: of a folder that the run has saved, or of a given folder."""

    def __init__(self, path: Path, *arguments: Any, temperature: float, exact: bool = False) -> None:
        saved = path / WEIGHTS
        self.weights = saved.read_text() if saved.exists() else f"folder {path.name}"

    def copy_from(self, policy: FakePolicy) -> None:
        self.weights = policy.weights


class FakeWeightSync:
    bytes_received, header = 0, SyncHeader(0)

    def connect(self) -> None: ...

    def accept(self, weights_digest: str) -> None: ...


class NamedEngine:
    """Holds the name of the weights that were streamed into it."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.held, self.version = events, "", -1

    reads_shards = False

    def digests(self) -> None:
        return None

    def load_weights(self, stream: Iterator[Any], version: int) -> None:
        (self.held,), self.version = list(stream), version
        self.events.append(("sync", version, self.held))

    def logprobs(self, sequences: list[list[int]]) -> Any:
        return [[logprob_under(self.held)] * (len(tokens) - 1) for tokens in sequences]

    def sleep(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_kv_cache(self) -> None: ...

    def shutdown(self) -> None:
        self.events.append("shutdown")


class WatchedGenerator(FakeGenerator):
    """Records samples among the events; the engine must hold the version that is asked for."""

    def __init__(self, engine: NamedEngine, *_: Any, **options: Any) -> None:
        super().__init__()
        self.engine = engine

    def sample(self, prompts: Any, n: int, **arguments: Any) -> Any:
        assert arguments["version"] == self.engine.version
        kind = "validate" if arguments["round_id"] < 0 else "draw"
        self.engine.events.append(
            (kind, arguments["version"], [p.prompt_ids[0] for p in prompts], arguments["round_id"])
        )
        samples = super().sample(prompts, n, **arguments)
        for sample in samples:
            sample.weights_digest = self.engine.held
        return samples


class FakeRewardModel:
    trained = ()

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def reward(self, step: int, samples: Any, table: Any, metrics: Any) -> Any:
        self.events.append(("reward model", step))
        return table

    def learn(self, step: int, metrics: Any) -> None:
        self.events.append(("reward model learns", step))


class FakeCheckpoints:
    """Writes trainer.json and the policy's count of updates, nothing else."""

    def __init__(self, events: list[Any], output_dir: Path) -> None:
        self.events, self.root = events, output_dir / "checkpoints"
        self.last = self.pending = None

    def newest(self) -> Path | None:
        return max(self.root.glob("step_*"), default=None)

    def save(self, step: int, policy: FakePolicy, config: Config, run: Any, parts: Any = ()) -> Path:
        folder: Path = self.root / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": step, "updates": policy.updates, "run": run, "config": config.record()}
        (folder / "trainer.json").write_text(json.dumps(content))
        self.events.append(("save", step))
        return folder

    def wait(self) -> None: ...

    def load(self, path: Path, policy: FakePolicy, parts: Any = ()) -> int:
        policy.updates = json.loads((path / "trainer.json").read_text())["updates"]
        self.events.append(("load", path.name))
        return 0


class FakeStopping:
    def __init__(self, events: list[Any], stop_after: int | None, lock: Any = None) -> None:
        self.events, self.stop_after, self.lock = events, stop_after, lock

    def after(self, steps_done: int, save: Any) -> None:
        assert self.lock is None or self.lock.is_in_place()
        self.events.append(("after", steps_done))
        if steps_done == self.stop_after:
            save(steps_done)
            raise KeyboardInterrupt

    def finished(self, steps_done: int, checkpoint: Any) -> None:
        self.events.append(("finished", steps_done))


def run_trainer(
    output_dir: Path,
    *,
    rows: list[Any] | None = None,
    num_loss_rows: int = 0,
    stop_after: int | None = None,
    stop_warm_up_after: int | None = None,
    has_report: bool = False,
    **sections: dict[str, Any],
) -> tuple[list[Any], list[dict[str, float]]]:
    """Run a Trainer of six prompts, two per step, and three held-out ones. Returns the events and metrics.jsonl.

    With algorithm.source=file, the six prompts have one response each and nothing is held out. `sections` are merged into
    the config. `stop_after`, `stop_warm_up_after`: interrupted, as by a signal, after so many steps. `rows` are those of the
    warm-up. `num_loss_rows`: rows of `data.val_loss_files`, of 1, 2, 3... response tokens. `has_report`: write report.html, which
    takes longer than the run.
    """
    from grpo_megatron import run as run_module
    from grpo_megatron import trainer as trainer_module
    from grpo_megatron.training import beside, colocation, placement, validation, warm_up

    raw: dict[str, Any] = {
        "model": {"path": "start"},
        "data": {"train_batch_size": 2, "shuffle": False},
        "rollout": {"n": 2, "probe_tolerance": 1e-6},
        "trainer": {
            "total_training_steps": 4,
            "output_dir": output_dir,
            "device": "cpu",
            "logger": ["jsonl"],
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": -1,
            "save_hf_at_end": False,
            "trace": "off",
        },
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    config = Config.model_validate(raw)
    is_from_file = config.algorithm.source == "file"
    checked = SimpleNamespace(
        config=config,
        arch=tiny_arch(),
        tokenizer=SimpleNamespace(decode=lambda ids, **options: " ".join(f"token{i}" for i in ids)),
        train_prompts=[prompt(i) for i in range(6)],
        val_prompts=[] if is_from_file else [prompt(100 + i) for i in range(3)],
        supervised_rows=[
            (replace(prompt(0), prompt_ids=tuple(ids)), [response], [1.0]) for ids, response in rows or []
        ],
        offline_groups=[(prompt(i), [WrittenResponse([7, 1])], [1.0]) for i in range(6)] if is_from_file else [],
        end_tokens=None,
        environment=None,
        scored_folder=None,
        reward_folder=None,
        reward_folders={},
        critic_folder=None,
        val_loss_groups=[
            (replace(prompt(200 + i), uid=f"task/held_out/{i}"), [WrittenResponse([7] * i + [1])], [1.0])
            for i in range(num_loss_rows)
        ],
    )
    events: list[Any] = []
    policies: list[FakePolicy] = []

    def build_policy(*arguments: Any, **named: Any) -> FakePolicy:
        policies.append(FakePolicy(events, arguments[5]))
        return policies[-1]

    def build_rollout_engine(config: Config, checked: Any, mesh: Any, device: Any) -> NamedEngine:
        events.append(("engine", "policy offloaded" if policies[-1].is_offloaded else "policy on the device"))
        return NamedEngine(events)

    def save_hf(stream: Any, source: Path, tokenizer: Path, target: Path, mesh: Any, serving: Any, arch: Any) -> None:
        (weights,) = stream
        target.mkdir(parents=True)
        (target / WEIGHTS).write_text(weights)
        events.append(("save hf", str(target.relative_to(output_dir)), weights))

    def local_exchange(samples: Any, table: Any, plan: Any, mesh: Any) -> Any:
        held = {(s.prompt_index, s.index): s for s in samples}
        chosen = sorted(plan.owner())
        drawn = [held[table.prompt_index[row], table.index[row]] for row in chosen]
        return build_batch(
            chosen,
            plan,
            0,
            tokens=[torch.tensor([*s.prompt.prompt_ids, *s.response_ids]) for s in drawn],
            prompt_lengths=[len(s.prompt.prompt_ids) for s in drawn],
            rollout_logprobs=[torch.tensor(s.rollout_logprobs) for s in drawn],
            loss_spans=[table.spans_of(row) for row in chosen],
        )

    def show(summary: Summary, sinks: Any) -> None:
        events.append(("summary", sorted({step for values in summary.results.values() for step in values})))

    stand_ins: dict[Any, dict[str, Any]] = {
        run_module: {
            "join_world": lambda config, device: LoneMesh(),
            "destroy_mesh": lambda: events.append("destroy mesh"),
            "Checkpoints": lambda output_dir, *_, **__: FakeCheckpoints(events, output_dir),
            "build_reward_model": lambda config, checked, mesh, device: FakeRewardModel(events),
            "exchange": local_exchange,
            "checkpoint_bytes": lambda *parts: 0,
        },
        trainer_module: {"Stopping": lambda config, mesh, lock, budget: FakeStopping(events, stop_after, lock)},
        placement: {
            "RewardPool": lambda *_: SimpleNamespace(close=lambda: events.append("pool closed")),
            "Generator": WatchedGenerator,
        },
        warm_up: {
            "Checkpoints": lambda output_dir, *_, **__: FakeCheckpoints(events, output_dir),
            "Stopping": lambda config, mesh, steps: FakeStopping(events, stop_warm_up_after),
            "exchange": local_exchange,
        },
        validation: {"exchange": local_exchange},
        colocation: {
            "save_hf": save_hf,
            "Policy": SimpleNamespace(load=build_policy),
            "build_rollout_engine": build_rollout_engine,
            "build_weight_sync": lambda *_: FakeWeightSync(),
        },
        beside: {"Reference": SimpleNamespace(load=FakeReference)},
        sinks_module: {} if has_report else {"ReportSink": lambda *_: NoReport()},
    }
    with ExitStack() as stack:
        for module, names in stand_ins.items():
            for name, stand_in in names.items():
                stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(mock.patch.object(Summary, "show", show))
        try:
            trainer_module.Trainer(config, checked).run()  # type: ignore[arg-type]
        except KeyboardInterrupt:
            events.append("stopped")
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return events, [json.loads(line) for line in lines]


def only(events: list[Any], *kinds: str) -> list[Any]:
    """The events of these kinds, in order."""
    return [event for event in events if (event if isinstance(event, str) else event[0]) in kinds]
