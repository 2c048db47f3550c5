"""`certify CONFIG`: short runs of a config that should agree, and direct checks of them, in the order of their worth.

Each run is a `train` of its own, of STEPS steps, in a folder beside trainer.output_dir. The first one, the base, gives most
numbers, and the seconds by which later checks are left out where the minutes would not be enough.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import grpo_megatron
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.config.problems import counted
from grpo_megatron.device import device_bytes
from grpo_megatron.registry import find_modules
from grpo_megatron.report.kit import PAGE_PARTS, html_page
from grpo_megatron.report.run_folder import read_metrics
from grpo_megatron.report.trace_file import StepFile, TraceFolder
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.hub import model_folder
from grpo_megatron.storage.run_files import on_disk, rollout_files
from grpo_megatron.sync.attest import FIRST
from grpo_megatron.trust.compare import compare_runs, compare_seams, config_of, precision, row_distances
from grpo_megatron.trust.depth import fitting_depth, write_first_layers
from grpo_megatron.types import BRANCH, BY_MODEL
from grpo_megatron.untrusted import parse_yaml, visible

STEPS, MEMORY_STEPS, WARM_UP_STEPS = 2, 10, 2
RESULT_FILE = "certify.json"  # the result; a folder without it is not replaced
MARGIN = 1.2  # of the estimated seconds of a check
MAX_GROWTH_GB = 1.0  # of the memory that stays while the engine sleeps
NUM_TENSORS, NUM_GRADED, TIMES = 8, 256, 4  # one of these is corrupted; responses that are graded again, so many times
MODELS = ("hf", "megatron", "first_layers")  # folders that are removed at the end
FAULT = "GRPO_MEGATRON_FAULT"  # environment variable of a run: what `plant` does in each of its ranks
# Schedules that STEPS steps would not reach the end of, and which are refused therefore.
CONSTANT = {"lr_warmup_steps": 0, "lr_decay_style": "constant", "lr_wsd_decay_steps": None, "min_lr": 0.0}
SHORT = {f"{part}.optim.{k}": v for part in ("actor", "critic", "sft", "reward_model") for k, v in CONSTANT.items()}
SHORT |= {"trainer.critic_warmup": 0, "critic.pretrain_steps": 0}
ENTROPY = "actor.entropy_coeff=0.01"  # added to a config whose gradient would be 0, with which nothing is proved
GREEN, RED, SKIPPED, NOT_APPLICABLE = "green", "red", "skipped", "not applicable"
ProofResult = tuple[str, str]  # one of these states, and what was measured


class CertifyOptions(Options):
    """The options of `certify`."""

    program = "certify"
    description = "Prove on this machine, by short runs of a config, what training relies on."
    epilog = "Exit codes: 0 if no check is red, 1 if one is, 2 if nothing was checked."
    config: Annotated[Path, Argument("the YAML file of a run", "CONFIG")]
    overrides: Annotated[tuple[str, ...], Argument("replace a value of the file", "section.key=value")] = ()
    minutes: Annotated[float, Option("leave out what would end later (default 10)", "N", gt=0)] = 10.0
    start: Annotated[str | None, Option("the words that start each rank, such as `srun ... python`", "WORDS")] = None

    def problems(self) -> Iterator[str]:
        """Yields a start that is no command."""
        try:
            words = None if self.start is None else shlex.split(self.start)
        except ValueError as error:
            yield f"--start {self.start!r}: {error}"
        else:
            if words == []:
                yield "--start has no words; leave it out"


class NotApplicable(Exception):
    """A check has no meaning for this config. The text is the reason."""


class OutOfTime(Exception):
    """A check applies to this config, and there is no time for its runs."""


class Bench:
    """The runs of one config, in `work`. `arguments`: CONFIG and its overrides. `deadline`: on time.monotonic's clock."""

    def __init__(
        self, config: Config, arguments: Sequence[str], work: Path, deadline: float, start: str | None = None
    ) -> None:
        self.config, self.arguments, self.work, self.deadline = config, arguments, work, deadline
        self.start = None if start is None else shlex.split(start)
        self.num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        self.chance = random.Random(config.trainer.seed)
        self.is_out_of_time = False
        self.is_exact, self.seconds = False, 0.0  # the same run twice was equal to the bit; the time of the base run

    def take_time(self) -> None:
        """Raise OutOfTime where the check that is made has none."""
        if self.is_out_of_time:
            raise OutOfTime

    def command(self, name: str, words: Sequence[str], **variables: str) -> int:
        """Run a command of this program, with NAME.log; returns its exit code. Raises TimeoutExpired at the deadline."""
        seconds, environment = max(1.0, self.deadline - time.monotonic()), {**os.environ, **variables}
        with (self.work / f"{name}.log").open("a") as log:
            return subprocess.run(words, stdout=log, stderr=log, env=environment, timeout=seconds).returncode

    def train(self, name: str, *overrides: str, fault: Mapping[str, Any] | None = None) -> int:
        """Make the run `name`, or resume it; returns its exit code. Raises NotApplicable: the overrides do not fit."""
        self.take_time()
        run, short = self.work / name, {key: v for key, v in SHORT.items() if self.config.at(key) != v}
        settings = [
            *(f"output_dir={run}", f"rollout_data_dir={run / 'rollouts'}", f"total_training_steps={STEPS}"),
            *("total_epochs=null", f"save_freq={STEPS}", "save_hf_at_end=false", "async_save=false", "trace=full"),
            *("trace_keep=null", "test_freq=-1", "val_before_train=false", "logger=[jsonl]", "resume_mode=auto"),
            *("stop_file=null", "stop_at=null"),
        ]
        words = [*(self.start or [sys.executable]), "-m", "grpo_megatron", "train", *self.arguments]
        words += [f"trainer.{setting}" for setting in settings]
        words += [*(f"{key}={'null' if value is None else value}" for key, value in short.items()), *overrides]
        code = self.command(name, words, **({FAULT: json.dumps(fault)} if fault else {}))
        if code == 2 and name not in ("warm-up", "base"):
            raise NotApplicable(f"{' '.join(overrides)} does not fit: {self.last_line(name)}")
        return code

    def last_line(self, name: str) -> str:
        """Return the last line that a run has printed."""
        text = (self.work / f"{name}.log").read_text(errors="replace")
        return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")

    def trace(self, name: str) -> TraceFolder:
        """Read the trace of a run."""
        return TraceFolder(self.work / name)

    def pair(
        self,
        name: str,
        *changes: str,
        fault: Mapping[str, Any] | None = None,
        is_exact: bool = False,
        base: str = "base",
    ) -> ProofResult:
        """Make a run and compare it with `base`, as `diff --tolerance` does. `is_exact`: all bits must be equal."""
        if code := self.train(name, *changes, fault=fault):
            return RED, f"the run ended with {code}: {self.last_line(name)}"
        result = compare_runs(self.trace(base), self.trace(name), tolerance=not is_exact)
        if (first := result.first) is None:
            state = GREEN if result.num_steps == STEPS else RED
            return state, f"every digest of {result.num_steps} steps of {STEPS} is equal"
        place = f"step {first.step}, {first.stage}, {first.count} of {first.total} {first.kind}s"
        if result.verdict == "explained":
            return GREEN, f"rounding explains the differences, the first in {place}: {first.measured}"
        leaf = f" ({first.leaves[0].name})" if first.leaves else ""
        return RED, f"{place}{leaf} {first.measured}: {result.cause}; see diff {self.work}/{base} {self.work}/{name}"

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of the base run's steps."""
        return list(read_metrics(self.work / "base/metrics.jsonl"))

    @functools.cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The samples of the base run. Raises NotApplicable."""
        if not self.config.has_rollouts:
            raise NotApplicable("no engine samples in this run")
        return [row for _, path in rollout_files(self.work / "base/rollouts") for row in read_metrics(path)]


# -- the base run ------------------------------------------------------------------------------------------------------


def _attestation(bench: Bench) -> ProofResult:
    probes = [row["rollout/probe_logp_diff_mean"] for row in bench.metrics if "rollout/probe_logp_diff_mean" in row]
    count = sum("timing_s/attest" in row for row in bench.metrics) if bench.samples else 0
    probed = f"; its log-probabilities of fixed tokens differ by {max(probes):.2g} on average" if probes else ""
    state = GREEN if count == len(bench.metrics) else RED
    return state, f"the engine's memory was attested in {count} of {len(bench.metrics)} steps{probed}"


def _log_probabilities(bench: Bench, chosen: Callable[[int, tuple[int, int]], bool] = lambda *_: True) -> ProofResult:
    """Compare both where the trainer's weights have sampled. `chosen`: whether a step's (prompt, sample) is looked at."""
    lagging = {row["step"] for row in bench.samples if row["version"] != row["step"] or row["replayed"]}
    gaps: list[float] = []
    for step, file in _files(bench, "old log-probabilities"):
        if step not in lagging:
            engine, old = (file.numbers(f"{who} log-probabilities").astype(np.float64) for who in ("engine", "old"))
            distances = row_distances(engine, old, file.numbers("responses")[:, 0])
            trained = file.nodes("old log-probabilities", 0, 0, len(file.rows)) != 0
            gaps += [distances[n] for n, place in enumerate(file.rows) if trained[n] and chosen(step, place)]
    if not gaps:
        raise NotApplicable("the trainer computes no log-probabilities of its own for the engine's samples")
    kind = precision(config_of(bench.work / "base"))
    sizes = f"at most {max(gaps):.2g} per token, median {sorted(gaps)[len(gaps) // 2]:.2g}, bound {FIRST[kind]:g}"
    return GREEN if max(gaps) <= FIRST[kind] else RED, f"{len(gaps)} responses: {sizes} ({kind})"


def _files(bench: Bench, stage: str) -> Iterator[tuple[int, StepFile]]:
    trace = bench.trace("base")
    for step, stages in trace.steps.items():
        if stage in stages and (file := trace.file(step)) is not None:
            yield step, file


def _seeds(bench: Bench) -> ProofResult:
    seen: dict[int, str] = {}
    for step, file in _files(bench, "seeds"):
        for (prompt, index), seed in zip(file.rows, file.nodes("seeds", 0, 0, len(file.rows)).tolist(), strict=True):
            place = f"step {step}, prompt {file.uids[prompt]!r}, sample {index}"
            is_first = 0 <= index < BRANCH and not bench.config.algorithm.replay.ratio  # branches have the trajectory's
            if is_first and seen.setdefault(seed, place) != place:
                return RED, f"{seen[seed]} and {place} have one seed"
    if not seen:
        raise NotApplicable("the samples have no seeds of their own")
    return GREEN, f"{len(seen)} samples have as many different seeds"


def _turns(bench: Bench) -> ProofResult:
    rows = [row for row in bench.samples if len(row.get("turns", ())) > 1 or row["index"] >= BRANCH]
    several = {(row["step"], row["group"], row["index"]) for row in rows}
    if not several:
        raise NotApplicable("no sample has several turns")
    return _log_probabilities(bench, lambda step, place: (step, *place) in several)


def _rewards(bench: Bench) -> ProofResult:
    """Grade the base run's responses TIMES times under load, and compare with the rewards of the run."""
    from grpo_megatron.checks.components import resolved_components
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.data.prompts import reward_item
    from grpo_megatron.rewards.pool import RewardPool
    from grpo_megatron.sampling.wrappers import prompt_sampler

    wanted, prompts = {row["uid"] for row in bench.samples if "response" in row}, dict[str, Any]()
    config = bench.config.with_values({"trainer.output_dir": bench.work / "rewards"})  # OUTPUT_DIR may have another run
    checked, reward = validate(config, bench.num_ranks, dry_run=True), config.reward
    for step in range(10 * STEPS if wanted else 0):  # dynamic sampling reads ahead
        batch = () if wanted <= {*prompts} else prompt_sampler(checked.train_prompts, bench.config.data).batch(step)
        prompts |= {one.uid: one for one in batch if one.uid in wanted and one.reward not in ("", BY_MODEL)}
    rows = [row for row in bench.samples if row["uid"] in prompts][:NUM_GRADED]
    if not rows:
        raise NotApplicable("no reward function grades the samples")
    bench.take_time()
    encode = functools.partial(checked.tokenizer.encode, add_special_tokens=False)
    items = [reward_item(prompts[r["uid"]], r["response"], encode(r["response"]), r["version"]) for r in rows]
    with RewardPool(
        2 * reward.num_workers, reward.timeout_s, reward.kwargs, resolved_components(checked.config)
    ) as pool:
        graded = pool.grade(items * TIMES, quiet=True)
    has_models = bench.config.reward_model.path is not None or bench.config.reward_models  # which `score` has, too
    for number, row in enumerate(rows):
        values = {
            repr(one.reward) if one.status != "timeout" else "none in time" for one in graded[number :: len(rows)]
        }
        values |= set() if has_models or row["score"] is None else {repr(float(row["score"]))}
        if len(values) > 1 or "none in time" in values:
            place = f"step {row['step']}, prompt {row['uid']!r}, sample {row['index']}"
            return RED, f"{place} has the rewards {', '.join(sorted(values))} (reward.timeout_s={reward.timeout_s:g})"
    slowest = f"slowest {max(one.seconds for one in graded):.2g} s of reward.timeout_s={reward.timeout_s:g}"
    return (
        GREEN,
        f"{len(rows)} responses, graded {TIMES} times more with {2 * reward.num_workers} workers: equal; {slowest}",
    )


def _converted(bench: Bench) -> ProofResult:
    if not (saved := on_disk(bench.work / "base")):
        raise NotApplicable("the run saves no checkpoint")
    bench.take_time()
    hf, back = bench.work / "hf", bench.work / "megatron"
    for action in (("to-hf", saved[-1], hf), ("to-megatron", hf, back), ("verify", saved[-1], back)):
        if code := bench.command("convert", [sys.executable, "-m", "grpo_megatron", "convert", *map(str, action)]):
            if code == 2:
                raise NotApplicable(bench.last_line("convert"))
            return RED, f"{action[0]} ended with {code}: {bench.last_line('convert')}"
    return GREEN, bench.last_line("convert")


# -- runs that should agree with it ------------------------------------------------------------------------------------


def _again(bench: Bench) -> ProofResult:
    outcome = bench.pair("again")
    bench.is_exact = outcome[1].startswith("every digest")
    return outcome


def _killed(bench: Bench) -> ProofResult:
    rank, note = bench.chance.randrange(bench.num_ranks), bench.work / "killed"
    phases = sum(name.startswith("timing_s/") for name in bench.metrics[-1])
    fault = {"kill": rank, "phase": bench.chance.randrange(1, max(2, phases // 2)), "note": f"{note}"}
    bench.train("resumed", "trainer.save_freq=1", fault={**fault, "run": f"{bench.work / 'resumed'}"})
    if not note.exists():
        raise NotApplicable(f"rank {rank} has no {fault['phase']} phases in a step: {bench.last_line('resumed')}")
    state, measured = bench.pair("resumed", "trainer.save_freq=1", is_exact=bench.is_exact)
    if state == GREEN and (seams := compare_seams(bench.trace("resumed"))).verdict == "part":
        state, measured = RED, seams.cause
    return state, f"rank {rank} was killed before the phase {note.read_text()}; {measured}"


def _micro_batches(bench: Bench) -> ProofResult:
    actor, data = bench.config.actor, bench.config.data
    limit = min(actor.ppo_max_token_len_per_gpu, *(row.get("global_seqlen/max", math.inf) for row in bench.metrics))
    half = int(max(limit // 2, data.max_prompt_length + data.max_response_length))
    if half >= limit and actor.ppo_micro_batch_size_per_gpu == 1:
        raise NotApplicable("a micro-batch has one sequence")
    change = f"actor.ppo_max_token_len_per_gpu={half}" if half < limit else "actor.ppo_micro_batch_size_per_gpu=1"
    state, measured = bench.pair("micro", change)
    return state, f"{change}: {measured}"


def _layout(bench: Bench) -> ProofResult:
    """Run without tensor parallelism, or on half of the ranks; one rank on CPU: on two. What does not fit: its first layers."""
    tp, trainer = bench.config.actor.megatron.tensor_model_parallel_size, bench.config.trainer
    count, values = bench.num_ranks, {"actor.megatron.tensor_model_parallel_size": 1} if tp > 1 else {}
    if bench.start is None and (bench.num_ranks > 1 or trainer.device == "cpu"):
        count = bench.num_ranks // max(tp, 2) or 2
        nodes = trainer.nnodes if count % trainer.nnodes == 0 else 1
        values |= {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": count // nodes}
    if not values:
        raise NotApplicable("one rank, or --start fixes their number and tensor parallelism is 1")
    base, changes = "base", [f"{key}={value}" for key, value in values.items()]
    changed, device = bench.config.with_values(values), device_bytes(trainer.device)
    depth = None if device is None else fitting_depth(changed, count, [(bench.config, bench.num_ranks)], device)
    if depth is not None:
        base, shallow = "shallow", f"model.path={bench.work / 'first_layers'}"
        arguments = [argument for argument in bench.arguments if argument.startswith("model.path=")]
        model = Path(arguments[-1].partition("=")[2]) if arguments else bench.config.model.path
        write_first_layers(model_folder(model, weights=True), depth, bench.work / "first_layers")
        changes.append(shallow)
        if code := bench.train(base, shallow):
            return RED, f"{shallow} ended with {code}: {bench.last_line(base)}"
    state, measured = bench.pair("layout", *changes, base=base)
    of_depth = "" if depth is None else f" (the first {depth} layers; the complete model does not fit)"
    return state, f"{' '.join(changes)}{of_depth}: {measured}"


def _order(bench: Bench) -> ProofResult:
    if not (bench.work / "layout/trace").is_dir():
        raise NotApplicable("there is no run of another layout to compare with")
    one, other = bench.trace("base"), bench.trace("layout")
    sides = [{(s, k): t.steps[s].get(k) for s in t.steps for k in ("prompts", "seeds")} for t in (one, other)]
    wrong = [
        f"step {step}: the {stage}" for (step, stage), root in sides[0].items() if sides[1].get((step, stage)) != root
    ]
    layouts = (trace.facts_at(0)["layout"] for trace in (one, other))
    sizes = " and ".join(
        f"{counted(layout['world_size'], 'rank')} ({layout['dp']} data-parallel)" for layout in layouts
    )
    return RED if wrong else GREEN, f"{', '.join(wrong) or 'no prompts or seeds'} differ between {sizes}"


def _delays(bench: Bench) -> ProofResult:
    if bench.config.rollout.placement != "separate":
        raise NotApplicable("one role")
    return bench.pair("delayed", fault={"delay": 0.3}, is_exact=bench.is_exact)


def _corrupted(bench: Bench) -> ProofResult:
    note = bench.work / "corrupted"
    fault = {"corrupt": bench.chance.randrange(NUM_TENSORS), "note": f"{note}"} if bench.samples else {}
    code = bench.train("corrupt", "trainer.total_training_steps=1", "trainer.save_freq=-1", fault=fault)
    name = note.read_text() if note.exists() else "no tensor"
    is_named = code != 0 and name in (bench.work / "corrupt.log").read_text(errors="replace")
    ended = "was stopped and named it" if is_named else f"ended with {code}, and has not named it"
    return GREEN if is_named else RED, f"one bit of {name} was changed on its way to the engine; the run {ended}"


def _memory(bench: Bench) -> ProofResult:
    key = "perf/device_memory_asleep_gb"
    if not any(key in row for row in bench.metrics):
        raise NotApplicable("no engine sleeps on this device")
    if code := bench.train("memory", f"trainer.total_training_steps={MEMORY_STEPS}", "trainer.save_freq=-1"):
        return RED, f"the run ended with {code}: {bench.last_line('memory')}"
    sizes = [row[key] for row in read_metrics(bench.work / "memory/metrics.jsonl") if key in row]
    state = GREEN if max(sizes) - sizes[0] < MAX_GROWTH_GB and len(sizes) == MEMORY_STEPS else RED
    return state, f"{sizes[0]:.2f} GiB after the first sleep, at most {max(sizes):.2f} in {len(sizes)} steps"


PROOFS: dict[str, tuple[float, Callable[[Bench], ProofResult]]] = {  # in base runs, the time that each needs
    "weights attested": (0, _attestation),
    "engine against trainer": (0, _log_probabilities),
    "seeds": (0, _seeds),
    "tokens over turns": (0, _turns),
    "the same run again": (1, _again),
    "kill and resume": (2, _killed),
    "another micro-batching": (1, _micro_batches),
    "another layout": (1, _layout),
    "rewards twice": (0.5, _rewards),
    "a corrupted tensor": (1, _corrupted),
    "data order": (0, _order),
    "checkpoint and back": (1, _converted),
    "memory asleep": (2, _memory),
    "delays between roles": (1.5, _delays),
}


# -- faults that a run plants in its own ranks ---------------------------------------------------------------------------


def plant(fault: Mapping[str, Any]) -> None:
    """Patch this rank: kill it in a phase of its second step, change a bit of a tensor of each sync, or delay its phases.

    For `diff --replay`: keep a gradient.
    """
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.sync.attest import EngineWeights

    phase, load, reached, rank = Metrics.phase, EngineWeights.load, [0], int(os.environ.get("RANK", "0"))
    chance = random.Random(rank)

    def watched(metrics: Metrics, name: str) -> Any:
        if "delay" in fault and chance.random() < 0.5:
            time.sleep(chance.random() * fault["delay"])
        if fault.get("kill") == rank and any(on_disk(Path(fault["run"]))):
            reached[0] += 1
            if reached[0] == fault["phase"]:
                write_file(Path(fault["note"]), name)
                os.kill(os.getpid(), signal.SIGKILL)
        return phase(metrics, name)

    def corrupted(weights: EngineWeights, stream: Iterator[Any], *arguments: Any) -> None:
        load(weights, _changed(stream, fault["corrupt"], Path(fault["note"])), *arguments)

    if "gradient" in fault:
        keep_gradient(fault["gradient"], fault["model"], fault["update"], Path(fault["note"]))
        return
    Metrics.phase = watched  # type: ignore[method-assign, assignment]
    if "corrupt" in fault:
        EngineWeights.load = corrupted  # type: ignore[method-assign, assignment]


def keep_gradient(name: str, model: str, update: int, file: Path) -> None:
    """Patch this rank to write a tensor's gradient in an optimizer step; that of the last step stays."""
    import torch

    from grpo_megatron.training.trace import Trace

    digest = Trace.gradients

    def kept(trace: Trace, norm: float, sums: Any, prefix: str = "") -> None:
        digest(trace, norm, sums, prefix)
        if (prefix, len(trace.norms[prefix]) - 1) == (model, update):
            torch.save(trace.models[prefix].gradient(name), file)

    Trace.gradients = kept  # type: ignore[method-assign, assignment]


def _changed(stream: Iterator[Any], number: int, note: Path) -> Iterator[Any]:
    """Yield the buckets of a sync, with the lowest bit of one tensor changed. The sender's memory stays as it is."""
    import torch

    for bucket in stream:
        if 0 <= number < len(bucket):
            name, tensor = bucket[number]
            wrong = tensor.detach().clone(memory_format=torch.contiguous_format)
            wrong.view(-1).view(torch.uint8)[:1].bitwise_xor_(1)
            bucket = [*bucket[:number], (name, wrong), *bucket[number + 1 :]]
            write_file(note, name)
        number -= len(bucket)
        yield bucket


# -- the command -------------------------------------------------------------------------------------------------------


def certify(options: CertifyOptions) -> int:
    """Make the runs, print a line per check, write the page and the JSON; returns the exit code of the epilog."""
    find_modules(Path(options.config))  # such as a reward function, as `train` does
    config, began = grpo_megatron.load_config(options.config, list(options.overrides)), time.monotonic()
    if not config.trainer.output_dir.name:
        raise ConfigError(
            f"trainer.output_dir={config.trainer.output_dir} has no name that a folder beside it could have"
        )
    work = config.trainer.output_dir.absolute().with_name(f"{config.trainer.output_dir.name}.certify")
    if work.exists() and not (work / RESULT_FILE).exists():
        raise ConfigError(f"{work} is not a folder of certify; move it away")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_file(work / RESULT_FILE, "[]\n")
    arguments = [str(options.config), *options.overrides]
    bench = Bench(config, arguments, work, began + 60 * options.minutes, options.start)
    print(
        f"runs of {STEPS} steps in {work}, for {options.minutes:g} minutes at most; the first result may take a while",
        flush=True,
    )
    return run_checks(bench)


def run_checks(bench: Bench) -> int:
    """Make the base run, then the checks; returns the exit code. Raises ConfigError: the config cannot run."""
    try:
        name, code = _make_base(bench)
        base = f"{STEPS} steps on {counted(bench.num_ranks, 'rank')}: {' '.join(bench.arguments)}"
        if code:
            base = f"{name} ended with {code}: {bench.last_line(name)}"
    except subprocess.TimeoutExpired:
        text = f"{STEPS} steps did not end within --minutes, and nothing was checked; give it more (logs: {bench.work})"
        raise ConfigError(text) from None
    if code == 2:
        lines = (bench.work / f"{name}.log").read_text(errors="replace").splitlines()
        problems = [line.removeprefix("error: ") for line in lines if line.startswith(("error: ", "  "))]
        raise ConfigError("\n  ".join([f"the config cannot run for {STEPS} steps:", *problems]))
    results: dict[str, ProofResult] = {}
    for name, (runs, measure) in {"base run": (0.0, lambda _: (RED if code else GREEN, base)), **PROOFS}.items():
        if code == 0 or not results:
            results[name] = _outcome(measure, bench, bench.seconds * runs * MARGIN)
            print(visible(f"{results[name][0]:14}  {name}: {results[name][1]}"), flush=True)
    _write(bench.work, results)
    return int(any(state == RED for state, _ in results.values()))


def _make_base(bench: Bench) -> tuple[str, int]:
    """Make the base run; returns the name and the exit code of the last run. All runs share a warm-up, which rounds, too."""
    if bench.config.sft.steps:
        alone = [f"sft.steps={WARM_UP_STEPS}", "trainer.total_training_steps=0"]
        if bench.config.rollout.placement == "separate":  # nothing is sampled
            alone += [
                f"rollout.{setting}" for setting in ("placement=colocated", "num_ranks=null", "num_nodes=null", "lag=0")
            ]
        if code := bench.train("warm-up", *alone):
            return "warm-up", code
        bench.arguments = [*bench.arguments, f"model.path={bench.work / 'warm-up/warmup'}", "sft.steps=0"]
    began = time.monotonic()
    code = bench.train("base")
    if code == 0 and not any(row.get("actor/grad_norm", 1.0) for row in bench.metrics):
        shutil.rmtree(bench.work / "base")
        del bench.metrics
        bench.arguments, began = [*bench.arguments, ENTROPY], time.monotonic()
        code = bench.train("base")
    bench.seconds = time.monotonic() - began
    return "base", code


def _outcome(measure: Callable[[Bench], ProofResult], bench: Bench, needed: float) -> ProofResult:
    left = bench.deadline - time.monotonic()
    bench.is_out_of_time = left < needed
    try:
        return measure(bench)
    except NotApplicable as reason:
        return NOT_APPLICABLE, str(reason)
    except OutOfTime:
        return SKIPPED, f"{max(0.0, left) / 60:.1f} minutes left, needs about {needed / 60:.1f}; raise --minutes"
    except subprocess.TimeoutExpired:
        return SKIPPED, f"it did not end in the {left / 60:.1f} minutes that were left; raise --minutes"
    except (StorageError, ConfigError, OSError) as error:
        return RED, str(error)


def _write(work: Path, results: Mapping[str, ProofResult]) -> None:
    """Write certify.json and certify.html, and remove what is large: checkpoints and converted models."""
    texts = parse_yaml((PAGE_PARTS / "checks.yaml").read_text(encoding="utf-8"))
    states = [state for state, _ in results.values()]
    title = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    sections, rows = {title: [f"{state}: {name}" for name, (state, _) in results.items()]}, []
    for name, (state, measured) in results.items():
        proves, cost = texts.get(name, ("the config runs", "nothing else can be checked"))
        rows.append({"check": name, "state": state, "measured": measured, "proves": proves, "cost_of_red": cost})
        sections[f"{name}: {state}"] = [measured, f"proves: {proves}", f"a red one costs: {cost}"]
    write_file(work / RESULT_FILE, json.dumps(rows, indent=1) + "\n")
    write_file(work / "certify.html", html_page("diff", f"certify {work.stem}", {}, sections=sections))
    for folder in (*work.glob("*/checkpoints"), *work.glob("*/sft/checkpoints"), *(work / name for name in MODELS)):
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{title}\n{work / 'certify.html'}\n{work / RESULT_FILE}")
