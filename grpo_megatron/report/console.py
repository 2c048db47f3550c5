"""The console: one aligned line per step, and what is printed at the end of a run.

On a terminal a bar under the lines shows the phase and the time that is left.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from grpo_megatron.config import Config
from grpo_megatron.config.problems import counted
from grpo_megatron.config.rollout import VLLM_CPU_HEADS
from grpo_megatron.models.families import read_config
from grpo_megatron.report.metrics import REPORT_FILE, Sink, Sinks
from grpo_megatron.report.progress import FIRST_LINE_S, StepProgress
from grpo_megatron.report.run_folder import METRICS_FILE, read_metrics
from grpo_megatron.storage.run_files import TRACE_FOLDER
from grpo_megatron.untrusted import visible

# -- columns of runs that generate samples, and of supervised ones -----------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of the console's table. With `decimals` None, numbers are in scientific notation."""

    title: str
    metric: str
    decimals: int | None
    legend: str

    def cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        if value is None:
            return "-"
        if not math.isfinite(value) or (value == 0 and self.decimals is None):
            return f"{value:g}"
        if self.decimals is None or abs(value) >= 1e7 or 0 < abs(value) < 0.5 * 10.0**-self.decimals:
            return f"{value:.1e}"  # fixed notation would not fit, or would read 0.0000
        return f"{value:,.{self.decimals}f}"


_VAL_REWARD = Column("val reward", "val reward", 4, "mean on the validation sets of the reward, or of its entry acc")
_VAL_LOSS = Column("val loss", "val loss", 4, "of data.val_loss_files, at validations; training too long raises it")
_LENGTH = Column("resp len", "response_length/mean", 1, "mean response length, tokens")
_ENTROPY = Column("entropy", "actor/entropy", 4, "policy entropy per token, nats; near 0 the policy no longer explores")
_GRAD_NORM = Column("grad norm", "actor/grad_norm", 4, "gradient norm before clipping; spikes are a warning")
_SECONDS = Column("s/step", "timing_s/step", 1, "wall-clock seconds of the step, with validation, without saving")
_SPEED = Column("tok/s", "perf/throughput", 0, "prompt + response tokens per second and device")
_GAP = Column(
    "logp gap",
    "training/rollout_logp_diff_mean",
    None,
    "mean |logprob of the policy - of the engine| per token; should be tiny",
)

CONSOLE_COLUMNS = (
    Column("reward", "critic/score/mean", 4, "mean reward of this step's samples, before penalties; should rise"),
    _VAL_REWARD,
    _LENGTH,
    _ENTROPY,
    _GRAD_NORM,
    Column("clipped", "actor/pg_clipfrac", 4, "share of tokens whose gradient the ratio clip removed"),
    _GAP,
    _SECONDS,
    _SPEED,
)
SUPERVISED_COLUMNS = (
    Column("loss", "actor/pg_loss", 4, "of this step's rows, before the update; should fall"),
    _VAL_LOSS,
    _VAL_REWARD,
    _LENGTH,
    _ENTROPY,
    _GRAD_NORM,
    Column("lr", "actor/lr", None, "learning rate"),
    _SECONDS,
    _SPEED,
)
SCORE_ACCURACY = {  # actor.loss_mode -> the metric that takes the place of the entropy
    "bradley_terry": Column("accuracy", "actor/pair_accuracy", 4, "share of pairs whose chosen response scores higher"),
    "step_labels": Column("accuracy", "actor/step_accuracy", 4, "share of steps that are judged as their label says"),
}


def console_columns(run_config: Mapping[str, Any] | None) -> tuple[Column, ...]:
    """Selects the columns for a run with this config, as plain JSON."""
    sections = ("algorithm", "trainer", "data", "teachers", "distillation", "reward")
    algorithm, trainer, data, teachers, distillation, reward = ((run_config or {}).get(name) or {} for name in sections)
    source = algorithm.get("source")
    validates = trainer.get("val_before_train", True) or trainer.get("test_freq", 1) > 0
    never = [] if validates and (data.get("val_files", True) or data.get("val_tasks")) else [_VAL_REWARD]
    never += [] if validates and data.get("val_loss_files", True) else [_VAL_LOSS]
    columns = [one for one in (SUPERVISED_COLUMNS if source == "file" else CONSOLE_COLUMNS) if one not in never]
    if teachers and algorithm.get("adv_estimator") == "zero" and not reward.get("function") and source != "file":
        metric = f"distillation/{'reverse_kl' if distillation.get('kl') == 'sampled' else 'divergence'}"
        columns[0] = Column("teacher kl", metric, 4, "mean divergence from the teacher per token, nats; should fall")
    if source != "file":
        rollout = (run_config or {}).get("rollout", {})
        legends = {}
        if lag := rollout.get("lag", 0):
            legends[_GAP] = f"as far as the policy moved in rollout.lag={counted(lag, 'step')}; tiny in step 0 alone"
        if (rollout.get("multi_turn") or {}).get("environment"):
            legends[_LENGTH] = f"{_LENGTH.legend}, with those that environments wrote"
        return tuple(replace(column, legend=legends.get(column, column.legend)) for column in columns)
    accuracy = SCORE_ACCURACY.get((run_config or {}).get("actor", {}).get("loss_mode", ""))
    return tuple(accuracy if accuracy and column is _ENTROPY else column for column in columns)


# -- the sink ----------------------------------------------------------------------------------------------------------

VALIDATION_REWARD = re.compile(r"val-core/(?P<source>.+)/mean@\d+")
COLUMN_WIDTH = 11  # 6 + 9 * 11 = 105 characters per line
ROWS_PER_HEADER = 20
BAR_PERIOD_S, LOG_PERIOD_S = 1.0, 5.0


def skip_reason(metrics: Mapping[str, float]) -> str | None:
    """Says why a training step made no update, or fewer than planned. None: it made all, or the metrics are of no step."""
    if "actor/skipped_updates" not in metrics:
        return None
    count = metrics["actor/skipped_updates"]
    if count:
        return f"skipped {counted(round(count), 'update')}: the gradient is not finite"
    if "actor/grad_norm" in metrics:
        return "no update: the gradient is 0" if metrics["actor/grad_norm"] == 0 else None
    if metrics.get("critic/unscorable_ratio") == 1:
        return "skipped: no sample has a reward"
    if metrics.get("critic/zero_variance_ratio", 1) == 1:  # also where dynamic sampling has found no group at all
        return "skipped: no informative group (the samples of each prompt have equal rewards)"
    return "skipped: no sample is in the loss"


class ConsoleSink(Sink):
    """A sink with one aligned line per step. On a terminal the lines scroll above a progress bar; a file gets no bar."""

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        stream: TextIO | None = None,
        columns: Sequence[Column] = CONSOLE_COLUMNS,
    ) -> None:
        self._columns, self._stream, self._rows = columns, stream or sys.stdout, 0
        self._explains = first_step == 0  # a resumed run's columns were explained at its start
        self._bar: Any = tqdm(
            total=total_steps,
            initial=first_step,
            desc="training",
            # Without tqdm's own rate and time left: they would count the start and the warm-up as steps.
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}",
            file=self._stream,
            dynamic_ncols=True,
            disable=not self._stream.isatty(),
        )
        self._progress, self._stopped = StepProgress(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        self._progress.enter(step, phases)

    def _follow(self) -> None:
        """Keeps the bar up to date. Where there is none, prints a line about a step that takes minutes."""
        next_s = FIRST_LINE_S
        while not self._stopped.wait(LOG_PERIOD_S if self._bar.disable else BAR_PERIOD_S):
            passed = self._progress.step_seconds()
            if not self._bar.disable:
                self._bar.set_postfix_str(self._progress.text(self._bar.total - self._bar.n))
            elif passed < FIRST_LINE_S:
                next_s = FIRST_LINE_S
            elif passed >= next_s:
                self.note(self._progress.line())
                next_s = 2 * passed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._rows == 0 and self._explains:
            self.note("\n".join(f"  {column.title:<10} {column.legend}" for column in self._columns) + "\n")
        if self._rows % ROWS_PER_HEADER == 0:
            self.note(f"{'step':>6}" + "".join(f"{column.title:>{COLUMN_WIDTH}}" for column in self._columns))
        self._rows += 1
        rewards = [value for name, value in metrics.items() if VALIDATION_REWARD.fullmatch(name)]
        losses = [value for name, value in metrics.items() if name.startswith("val/loss/")]
        means = {name: sum(of) / len(of) for name, of in (("val reward", rewards), ("val loss", losses)) if of}
        cells = "".join(f"{column.cell({**metrics, **means}):>{COLUMN_WIDTH}}" for column in self._columns)
        version = metrics.get("rollout/validated_version")
        moved = None if version is None else f"val reward: of the weights before step {version:g}"
        self.note("  ".join([f"{step:>6}{cells}", *filter(None, (skip_reason(metrics), moved))]))
        self._progress.finished(metrics.get("timing_s/step"))
        self._bar.set_postfix_str("", refresh=False)
        self._bar.update(min(step + 1, self._bar.total) - self._bar.n)  # after the last step, validation logs once more

    def note(self, text: str) -> None:
        text = visible(text)
        if self._bar.disable:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._bar.set_postfix_str("")
        self._bar.close()


# -- The end of a run: a table of validation results before and after, the learning curves, and the list of files ------

OUTPUTS = {
    "hf": "the trained model, a Hugging Face folder",
    REPORT_FILE: "the run as a page: curves, time, samples, config, events",
    METRICS_FILE: "every metric of every step",
    TRACE_FOLDER: "digests of every step, which `diff` compares with those of another run",
    "calibration.txt": "confidence against accuracy on held-out rows",
    "samples": "completions at each validation, as text",
    "checkpoints": "for resuming the run",
    "warmup": "the model after the supervised warmup",
    "sft": "metrics and checkpoints of the supervised warmup",
    "tensorboard": "the metrics for TensorBoard",
    "config.yaml": "the configuration of the run",
}


NOT_MOVED = (
    "WARNING: no step has moved the weights: in none of them did the samples of a prompt have different rewards.\n"
    "Look at the completions in {samples} and at the reward: too hard a task, a form of answer that the model does not\n"
    "know (warmup, evaluate --samples), a reward that is always the same (docs/troubleshooting.md)."
)
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # choices of --max-lora-rank


def serve_command(folder: Path, config: Config) -> str:
    """Writes the command of an OpenAI-compatible server of the exported folder, with the run's dtype, lengths and layout.

    Without a bound vLLM takes nine tenths of the memory, on a CPU too, and refuses to start where less is free.

    The command `vllm` reads the version of a package named vllm. Where only vllm-cpu is installed and
    requirements/install.sh did not add that name, it ends with an error: the module of the same server runs.
    """
    on_cpu = _is_installed("vllm-cpu")
    serve = "vllm serve"
    if on_cpu and not _is_installed("vllm"):
        serve = "python -m vllm.entrypoints.openai.api_server --model"
    tp = config.rollout.tensor_model_parallel_size
    length = config.data.max_prompt_length + config.data.max_response_length
    layout = f" --tensor-parallel-size {tp}" if tp > 1 else ""
    layout += " --enable-expert-parallel" if config.rollout.has_whole_experts else ""
    eager = " --enforce-eager" if on_cpu or config.rollout.enforce_eager else ""  # as the run's engine
    memory = f" --gpu-memory-utilization {config.rollout.gpu_memory_utilization:g}"
    if on_cpu:
        memory = f" --kv-cache-memory-bytes {int(config.rollout.engine_options.get('kv_cache_gib', 1) * 2**30)}"
    model, adapters = folder, ""
    if (folder / "adapter_config.json").exists():  # a PEFT folder
        model, rank, tokenizer = config.model.path, config.actor.lora.rank or 0, shlex.quote(str(folder))
        largest = next((size for size in VLLM_LORA_RANKS if size >= rank), rank)
        adapters = f" --tokenizer {tokenizer} --generation-config {tokenizer} --enable-lora --max-lora-rank {largest}"
        adapters += f" --lora-modules {shlex.quote(f'{folder}={folder}')}"
    elif (other := config.model.tokenizer_path) is not None:  # the folder's may be loaded as another class
        template = config.data.chat_template
        adapters = f" --tokenizer {shlex.quote(str(other))}"
        adapters += f" --chat-template {shlex.quote(str(template))}" if template is not None else ""
    served = f"{shlex.quote(str(model))} --dtype {config.model.dtype} --max-model-len {length}"
    return f"{serve} {served}{layout}{memory}{eager}{adapters}"


def request_command(folder: Path, config: Config) -> str:
    """Writes a request to that server, of the run's kind: a chat, or plain text."""
    content: dict[str, Any] = {"model": str(folder), "max_tokens": config.data.max_response_length, "temperature": 0}
    path, content["prompt"] = "completions", "TEXT"
    if config.data.apply_chat_template:
        path, content["messages"] = "chat/completions", [{"role": "user", "content": content.pop("prompt")}]
    header, body = "'Content-Type: application/json'", shlex.quote(json.dumps(content))
    return f"curl http://localhost:8000/v1/{path} -H {header} -d {body}"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _unserved_heads(model: Mapping[str, Any]) -> int | None:
    """Returns the size of the heads of a config.json where the installed vLLM, of the CPU, has no attention for it."""
    text = model.get("text_config", model)
    heads = text.get("head_dim") or text.get("hidden_size", 0) // text.get("num_attention_heads", 1)
    is_served = not heads or "kv_lora_rank" in text or heads in VLLM_CPU_HEADS or not _is_installed("vllm-cpu")
    return None if is_served else heads


class Summary:
    """Validation results by step; `show` prints the first beside the last.

    `served`: the config of a run whose exported policy answers prompts. None: it does not.
    """

    def __init__(self, output_dir: Path, served: Config | None = None) -> None:
        self.output_dir, self.served = output_dir, served
        self.results: dict[str, dict[int, float]] = {}  # metric -> step -> value

    def add(self, step: int, results: Mapping[str, float]) -> None:
        for name, value in results.items():
            self.results.setdefault(name, {})[step] = value

    def recall(self) -> None:
        """Adds the validation results from before an interruption, read from the run's own metrics.jsonl."""
        with contextlib.suppress(FileNotFoundError):
            for row in read_metrics(self.output_dir / METRICS_FILE):
                self.add(row["step"], {name: value for name, value in row.items() if name.startswith(("val-", "val/"))})

    def show(self, sinks: Sinks) -> None:
        """Prints the table and the list of files. For rank 0 only."""
        if rows := self._rows():
            sinks.note("\n" + format_table(rows, ["held-out data", "before", "after"]))
        is_adapter = (self.output_dir / "hf/adapter_config.json").exists()
        outputs = OUTPUTS | ({"hf": "the trained adapters, a PEFT folder"} if is_adapter else {})
        samples = "samples/" if (self.output_dir / "samples").exists() else REPORT_FILE  # of validations
        if self._has_not_moved():
            sinks.note(f"\n{NOT_MOVED.format(samples=samples)}")
        paths = {self.output_dir / name: text for name, text in outputs.items() if (self.output_dir / name).exists()}
        width = max((len(str(path)) for path in paths), default=0)
        sinks.note("\n" + "\n".join(f"{path!s:<{width}}  {text}" for path, text in paths.items()))
        folder = self.output_dir / "hf"
        if self.served is not None and folder.exists():
            model: Mapping[str, Any] = {}
            with contextlib.suppress(ValueError):  # the model's folder is gone
                model = read_config(self.served.model.path)
            reads_images, heads = "vision_config" in model, _unserved_heads(model)
            if heads is not None:
                sinks.note(f"\nto serve it: by vLLM on a GPU; on the CPU it has no attention with heads of {heads}")
            elif reads_images and not _is_installed("torchvision"):
                sinks.note("\nto serve it: by vLLM where torchvision is installed, which its server reads images with")
            else:
                sinks.note(f"\nto serve it: {serve_command(folder, self.served)}")
                sinks.note(f"and then:    {request_command(folder, self.served)}")
            asked = f"{shlex.quote(str(folder))}{' --image FILE' if reads_images else ''}"
            asked += " --engine transformers" if heads is not None else ""
            if (other := self.served.model.tokenizer_path) is not None:
                asked += f" --tokenizer {shlex.quote(str(other))}"
            sinks.note(f"to ask it:   python -m grpo_megatron generate --model {asked} --prompt TEXT")
            if self.served.rollout.multi_turn.environment:
                sinks.note(
                    f"             (its first turn: no environment answers there; {samples} has the conversations)"
                )

    def _has_not_moved(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            steps = [row for row in read_metrics(self.output_dir / METRICS_FILE) if "actor/skipped_updates" in row]
            return bool(steps) and all(
                not row.get("actor/grad_norm") and row.get("critic/zero_variance_ratio") == 1 for row in steps
            )
        return False

    def _rows(self) -> list[list[object]]:
        """Lists name, value at the first and at the last validation. val-core comes before val-aux; None: it has no value."""
        steps = sorted({step for values in self.results.values() for step in values})
        if len(steps) < 2:
            return []
        rows: list[list[object]] = []
        for name in sorted(self.results, key=lambda name: (name.startswith("val-aux"), name)):
            before, after = (self.results[name].get(step) for step in (steps[0], steps[-1]))
            if name.startswith("val-core") or None not in (before, after):
                rows.append([name.removeprefix("val-core/").removeprefix("val-aux/"), before, after])
        return rows


def format_table(rows: Sequence[Sequence[object]], header: Sequence[str], num_left: int | None = None) -> str:
    """Aligns plain text. Floats have 4 decimals, None is "-".

    The first `num_left` columns are aligned to the left; by default those that have texts.
    """
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_left = [
        any(isinstance(row[n], str) for row in rows) if num_left is None else n < num_left for n in range(len(header))
    ]
    lines = []
    for line in [cells[0], ["-" * width for width in widths], *cells[1:]]:
        aligned = (f"{cell:{'<' if left else '>'}{n}}" for cell, n, left in zip(line, widths, is_left, strict=True))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
