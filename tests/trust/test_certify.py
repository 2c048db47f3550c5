"""`certify` on a tiny run: all lines green, and a planted fault turns its line red and leaves the base run's others green.

The runs are those of the command, on forked ranks: RankBench replaces the start of a program alone. The command itself is in
`make soak`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import grpo_megatron
from grpo_megatron import ConfigError
from grpo_megatron.checks import validate
from grpo_megatron.report.kit import PAGE_PARTS
from grpo_megatron.report.trace_file import Leaves, StepFile, TraceFolder
from grpo_megatron.trust import certify
from grpo_megatron.trust.certify import PROOFS, Bench, CertifyOptions
from grpo_megatron.types import BRANCH
from grpo_megatron.untrusted import parse_yaml
from tests import worlds
from tests.runs import make_run
from tests.trust.test_diff import change_step

ROOT = Path(__file__).resolve().parents[2]
REWARDS = "reward.function=tests.trust.rewards_of_certify:"
SETTINGS = [
    *("rollout.engine=transformers", "data.train_batch_size=4", "actor.optim.lr=0.01", f"{REWARDS}odd"),
    "trainer.n_gpus_per_node=1",
]
NOT_HERE = {"tokens over turns", "memory asleep", "delays between roles"}  # one turn, CPU, one role


def run_program(words: Sequence[str], log: Path, variables: dict[str, str]) -> int:
    """Runs the program as a rank, with its output in `log`."""
    from grpo_megatron.cli.main import main

    os.environ.update(variables)
    if name := variables.get("CERTIFY_FAULT"):
        globals()[name]()
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return main(list(words))


def blind() -> None:
    """Plants an attestation that notices nothing."""
    from grpo_megatron.sync.attest import EngineWeights

    EngineWeights._attest = lambda self, expected: None  # type: ignore[method-assign]


def template() -> None:
    """Plants a template that renders a turn's answer otherwise for the trainer than for the engine."""

    def change(samples: Any) -> None:
        for one in (one for one in samples if 0 in one.loss_mask):
            one.response_ids[one.loss_mask.index(0)] ^= 1

    change_samples(change)


def race() -> None:
    """Plants a worker that answers with another row's reward where its rank is late."""
    late: list[float] = []

    def change(samples: Any) -> None:
        rewards = [one.reward for one in samples]
        for one, reward in zip(samples, rewards[1:] if late else rewards, strict=False):
            one.reward = reward

    change_samples(change)
    sleep = time.sleep
    certify.time = SimpleNamespace(sleep=lambda seconds: (late.append(seconds), sleep(seconds)))  # type: ignore[attr-defined]


def change_samples(change: Callable[[Any], None]) -> None:
    """Changes the samples of each step of this rank, after the engine's part of it."""
    from grpo_megatron.trainer import Trainer

    collect = Trainer.collect

    def collected(trainer: Any, step: int) -> Any:
        samples = collect(trainer, step)
        change(samples)
        return samples

    Trainer.collect = collected  # type: ignore[method-assign]


class RankBench(Bench):
    fault = ""  # the function above that plants one

    def command(self, name: str, words: Sequence[str], **variables: str) -> int:
        variables |= {"CERTIFY_FAULT": self.fault} if self.fault else {}
        sizes = [int(word.partition("=")[2]) for word in words if word.startswith("trainer.n_gpus_per_node=")]
        arguments = {"words": words[3:], "log": self.work / f"{name}.log", "variables": variables}
        try:
            return max(worlds.run(run_program, (sizes or [1])[-1], **arguments))
        except AssertionError as error:
            with arguments["log"].open("a") as log:
                log.write(str(error))
            return 1


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("certify")) / "run.yaml"


@pytest.fixture(scope="module")
def bench(config: Path) -> Bench:
    """With its base run, and all lines of it."""
    work, arguments = config.parent / "out.certify", [*SETTINGS, f"trainer.output_dir={config.parent / 'out'}"]
    work.mkdir()
    bench = RankBench(
        grpo_megatron.load_config(config, arguments), [f"{config}", *arguments], work, time.monotonic() + 900
    )
    assert certify.run_checks(bench) == 0
    return bench


def states(work: Path) -> dict[str, str]:
    return {row["check"]: row["state"] for row in json.loads((work / "certify.json").read_text())}


def test_all_lines_are_green(bench: Bench) -> None:
    expected = {name: "not applicable" if name in NOT_HERE else "green" for name in ("base run", *PROOFS)}
    assert states(bench.work) == expected, (bench.work / "certify.json").read_text()
    page = (bench.work / "certify.html").read_text()
    assert "<h2>a corrupted tensor: green</h2>" in page and "a red one costs: a dead sync" in page
    assert not any(bench.work.glob("*/checkpoints")) and not (bench.work.parent / "out").exists()


DIRECT = ("weights attested", "engine against trainer", "seeds", "rewards twice")


def reds(bench: Bench) -> dict[str, str]:
    outcomes = {name: PROOFS[name][1](bench) for name in DIRECT}
    return {name: measured for name, (state, measured) in outcomes.items() if state == "red"}


def test_a_fault_in_the_base_run_turns_its_line_red(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.work / "base/trace/step_000001.bin"
    lines = path.with_name("steps.jsonl")
    content, roots = path.read_bytes(), lines.read_text()

    def rewrite(stage: str, column: int | None, row: int, source: int, change: float = 0.0) -> None:
        def changed(stages: dict[str, Leaves]) -> None:
            table = stages[stage].digests if column is None else stages[stage].numbers[:, column]
            table[row] = table[source] + table.dtype.type(change)

        restore()
        change_step(bench.work / "base", 1, changed)

    def restore() -> None:
        path.write_bytes(content)
        lines.write_text(roots)

    rewrite("seeds", None, 3, 2)
    wrong = reds(bench)
    assert (
        list(wrong) == ["seeds"]
        and "sample 2 and step 1" in wrong["seeds"]
        and "sample 3 have one seed" in wrong["seeds"]
    )
    with monkeypatch.context() as patches:  # a branch has the seed of its trajectory
        rows = [(0, 2), (0, 2 + BRANCH), *TraceFolder(bench.work / "base").file(1).rows[2:]]  # type: ignore[union-attr]
        patches.setattr(StepFile, "rows", rows)
        rewrite("seeds", None, 1, 0)
        assert not reds(bench)
    rewrite("engine log-probabilities", 0, 5, 5, 1e-3)
    assert list(reds(bench)) == ["engine against trainer"]
    restore()
    bench.metrics[1].pop("timing_s/attest")
    wrong = reds(bench)
    del bench.metrics
    assert list(wrong) == ["weights attested"] and "1 of 2 steps" in wrong["weights attested"]
    assert not reds(bench)


def test_a_reward_that_reads_the_clock(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = bench.config
    monkeypatch.setattr(
        bench, "config", honest.with_values({"reward.function": "tests.trust.rewards_of_certify:clock"})
    )
    assert list(reds(bench)) == ["rewards twice"]
    outcome = bench.pair("clock", f"{REWARDS}clock")
    assert outcome[0] == "red" and outcome[1].startswith("step 0, rewards, "), outcome


def test_another_run_in_the_output_folder_is_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check in the user's own folder would be that of a resume, and refuse a seed that has changed since."""
    checked = mock.Mock(wraps=validate.validate)
    monkeypatch.setattr(validate, "validate", checked)
    assert PROOFS["rewards twice"][1](bench)[0] == "green"
    assert checked.call_args.args[0].trainer.output_dir.parent == bench.work


def test_a_corrupted_tensor_that_nothing_notices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "fault", "blind")
    for left in ("corrupted", "corrupt.log"):
        (bench.work / left).unlink()
    state, measured = PROOFS["a corrupted tensor"][1](bench)
    assert state == "red" and "ended with 0, and has not named it" in measured


@pytest.mark.soak
def test_a_layout_that_does_not_fit_takes_the_first_layers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 6 MB two of the four layers fit."""
    monkeypatch.setattr(certify, "device_bytes", lambda kind: 6e6)
    shutil.rmtree(bench.work / "layout")
    state, measured = PROOFS["another layout"][1](bench)
    assert state == "green" and "(the first 2 layers; the complete model does not fit): rounding" in measured, measured
    assert {name.split(".")[2] for name in bench.trace("layout").tensors("weights") if "layers" in name} == {"0", "1"}


@pytest.mark.soak
def test_turns_and_delays(tmp_path: Path) -> None:
    """Two roles and several turns: both lines are green, and each is red under a fault that only it covers."""
    folder, template = make_run(tmp_path), tmp_path / "turns.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }} {{ '<eos>' if m.role == 'assistant' else '=' }} {% endfor %}"
    )
    arguments = [
        *(*SETTINGS[:3], f"trainer.output_dir={tmp_path / 'out'}", "rollout.placement=separate", "rollout.num_ranks=1"),
        "trainer.n_gpus_per_node=2",
        *("data.apply_chat_template=true", f"data.chat_template={template}", "data.max_response_length=40"),
        *("rollout.multi_turn.environment=tests.e2e.environments:Judge", "data.max_prompt_length=24"),
        *("rollout.multi_turn.max_assistant_turns=3", "rollout.multi_turn.max_tool_response_length=6"),
        f"rollout.stop_token_ids={list(range(4, 12))}",  # digits: the policy has random weights
    ]
    config = grpo_megatron.load_config(folder / "run.yaml", arguments)

    def base(fault: str) -> Bench:
        work = tmp_path / f"{fault}.certify"
        work.mkdir()
        bench = RankBench(config, [f"{folder / 'run.yaml'}", *arguments], work, time.monotonic() + 900)
        bench.fault, bench.is_exact = fault, True
        assert certify._make_base(bench) == ("base", 0), (work / "base.log").read_text()
        return bench

    bench, turns, delays = base("race"), PROOFS["tokens over turns"][1], PROOFS["delays between roles"][1]
    state, measured = delays(bench)
    assert state == "red" and "rewards" in measured and turns(bench)[0] == "green"  # no rank of the base run is late
    bench.fault = ""
    shutil.rmtree(bench.work / "delayed")
    assert delays(bench)[0] == "green"
    assert turns(base("template"))[0] == "red"


def test_what_is_not_measured_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "deadline", time.monotonic() + 30)
    monkeypatch.setattr(bench, "is_out_of_time", True)  # restored at the end
    state, measured = certify._outcome(PROOFS["the same run again"][1], bench, 90)
    assert state == "skipped" and re.fullmatch(r"0\.5 minutes left, needs about 1\.5; raise --minutes", measured)
    assert certify._outcome(PROOFS["rewards twice"][1], bench, 90)[0] == "skipped"
    assert certify._outcome(PROOFS["delays between roles"][1], bench, 90) == ("not applicable", "one role")


def test_bad_input(config: Path, tmp_path: Path) -> None:
    (tmp_path / "out.certify").mkdir()
    for arguments, message in (
        ([f"trainer.output_dir={tmp_path / 'out'}"], "is not a folder of certify; move it away"),
        (["trainer.outputdir=x"], "outputdir"),
        (["trainer.output_dir=/"], "has no name"),
    ):
        with pytest.raises(ConfigError, match=message):
            certify.certify(CertifyOptions(config=config, overrides=arguments))
    for start in ("", "srun 'a"):
        with pytest.raises(ConfigError, match="--start"):
            CertifyOptions(config=config, start=start)


def test_the_table_of_the_page() -> None:
    texts = parse_yaml((PAGE_PARTS / "checks.yaml").read_text())
    listed = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/trust.md").read_text(), re.M)
    assert [(name, *text) for name, text in texts.items()] == [row for row in listed if row[0] in PROOFS]
    assert list(texts) == list(PROOFS)


@pytest.mark.soak
def test_the_command(config: Path, tmp_path: Path) -> None:
    """Real programs, two ranks: a rank that is killed ends the others. All rewards are 0."""
    settings = [*SETTINGS[:3], f"{REWARDS}zero", "actor.use_kl_loss=false", f"trainer.output_dir={tmp_path / 'out'}"]
    words = [sys.executable, "-m", "grpo_megatron", "certify", str(config), *settings, "--minutes", "20"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "actor.entropy_coeff=0.01" in done.stdout, done.stdout + done.stderr
    assert [name for name, state in states(tmp_path / "out.certify").items() if state != "green"] == [
        name for name in PROOFS if name in NOT_HERE
    ]
