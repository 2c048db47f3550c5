"""The scripts of slurm/ without Slurm: stand-ins of a few lines replace its commands and record the calls.

Every row of the table in train_70b.sh's header, how an attempt ends, is a case here. test_jobs.py has the real Slurm.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.slurm.lab import HANG_S, Lab

ROOT = Path(__file__).parents[2]
STUBS = {
    "scontrol": """
        case "$1 $2" in
            "show hostnames") tr , '\\n' <<<"$3" ;;
            "-o show") echo "JobId=7 PreemptTime=${PREEMPTED:-None} ExcNodeList=${EXCLUDED:-(null)} Features=(null)" ;;
            "requeue 7") echo "requeued" >>"$CALLS"; exit "${REQUEUE_CODE:-0}" ;;
            update*) eval "${UPDATE_DOES:-}"; echo "$*" >>"$CALLS" ;;
        esac""",
    "srun": 'case "$*" in *preflight.py*) eval "$PREFLIGHT_DOES" ;; *) eval "$TRAIN_DOES" ;; esac',
    "squeue": 'case "$*" in *--name=*) printf "%s\\n" $SAME_NAME ;; *) date -d "+1 hour" +%Y-%m-%dT%H:%M:%S ;; esac',
    "sinfo": "printf '%s\\n' ${PARTITION:-node1 node2 node3}",
    "scancel": 'echo "scancel $*" >>"$CALLS"',
    "getent": "true",
}
DONE = 'echo \'{"state": "done", "steps_done": 9}\' >$OUT/outcome.json'
STOPPED = 'mkdir -p $OUT/checkpoints/step_000004; echo \'{"state": "stopped"}\' >$OUT/outcome.json; exit 143'
PROGRESS = "mkdir -p $OUT/checkpoints/step_000004"


class Job:
    """One attempt of slurm/train_70b.sh as job 7 on node1 and node2."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.calls = folder, folder / "out", folder / "calls"
        (folder / "bin").mkdir()
        (folder / "run.yaml").write_text("model: {}\n")
        self.calls.touch()
        for name, body in STUBS.items():
            (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (folder / "bin" / name).chmod(0o755)

    def start(self, *arguments: str, script: str = "train_70b.sh", **variables: str) -> subprocess.Popen[str]:
        slurm = {"JOB_ID": "7", "JOB_NODELIST": "node1,node2", "JOB_PARTITION": "lab", "NTASKS_PER_NODE": "4"}
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "CALLS": str(self.calls),
            "OUT": str(self.out),
            "PREFLIGHT": "0",
            "DEVICE": "cpu",
            "PYTHON": "echo",
            **{f"SLURM_{name}": value for name, value in {**slurm, "RESTART_COUNT": "0"}.items()},
            **variables,
        }
        environment = {name: value for name, value in environment.items() if value}
        arguments = arguments or (str(self.folder / "run.yaml"), f"trainer.output_dir={self.out}")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = ["bash", f"slurm/{script}", *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        text, _ = process.communicate(timeout=HANG_S)
        return process.returncode, text

    def earlier(self, number: int, start: int, *marks: str) -> None:
        attempt = self.out / "attempts" / f"7-{number}"
        attempt.mkdir(parents=True)
        for name, content in {"start": f"{start}\n", **dict.fromkeys(marks, "")}.items():
            (attempt / name).write_text(content)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# -- how an attempt ends ----------------------------------------------------------------------------------------------


KILLED = "a rank was killed (srun: 137)"
NO_STEP = "two attempts in a row have not advanced a step"


@pytest.mark.parametrize(
    ("earlier", "does", "variables", "code", "words"),  # earlier attempts: (start, marks)
    [
        ([], DONE, {}, 0, "attempt 0: finished; newest checkpoint: none"),
        ([], STOPPED, {}, 75, "saved on request; requeued; newest checkpoint: {out}/checkpoints/step_000004"),
        ([], "exit 2", {}, 2, "a mistake in the config or the data"),
        ([], "exit 137", {}, 75, f"{KILLED}; requeued"),
        ([], "exit 1", {}, 1, "failed with 1 before it had saved anything"),
        ([], f"{PROGRESS}; exit 1", {}, 75, "failed with 1 after progress; requeued"),
        ([], f"{DONE}; exit 143", {}, 0, "finished"),
        ([(0,)], "exit 137", {}, 1, NO_STEP),
        ([(0, "interrupted")], "exit 137", {}, 75, "requeued"),  # a pre-emption is no failure of the run
        ([(3,)], "exit 137", {}, 75, "requeued"),  # it started from another step
        # Slurm without preempt_send_user_signal, also twice in a row
        ([(0,)], "exit 143", {"PREEMPTED": "2026-11-21T15:23:35"}, 75, "pre-empted before it could save; requeued"),
        ([(0,), (1,)], f"{PROGRESS}; exit 137", {"MAX_ATTEMPTS": "3"}, 1, "attempt 3 of MAX_ATTEMPTS=3"),
        ([(0,), (1,), (2,)], DONE, {"MAX_ATTEMPTS": "3"}, 1, "MAX_ATTEMPTS=3 have been made"),  # Slurm's own requeue
        ([], STOPPED, {"REQUEUE_CODE": "1"}, 75, "submit it again"),
        # attempts count even if their script died with the first node, before it could decide how to go on
        ([(0,), (0,)], DONE, {}, 1, NO_STEP),
    ],
)
def test_the_last_line_says_what_happened(
    job: Job, earlier: list[Any], does: str, variables: dict[str, str], code: int, words: str
) -> None:
    for number, (start, *marks) in enumerate(earlier):
        job.earlier(number, start, *marks)
    status, text = job.run(TRAIN_DOES=does, SLURM_RESTART_COUNT=str(len(earlier)), **variables)
    assert status == code and words.format(out=job.out) in text.splitlines()[-1], text
    assert ("requeued" in job.calls.read_text()) == (code == 75)
    if "PREEMPTED" in variables:
        assert (job.out / "attempts/7-1/interrupted").exists()


@pytest.mark.parametrize("ends", [False, True])
def test_the_last_node_serves_a_teacher(job: Job, ends: bool) -> None:
    """It has no ranks, which begin when it answers; where it ends first, nothing is trained."""
    serves = "exit 1" if ends else "touch $OUT/serves; exec sleep 3"
    does = f'case "$*" in *--nodelist=node2*"bash -c serve it") {serves} ;; *--nodelist=node1*) {DONE} ;; esac'
    (job.folder / "bin/curl").write_text(
        "#!/usr/bin/env bash\n[[ $* == *http://node2:8000/health ]] && [ -e $OUT/serves ]"
    )
    (job.folder / "bin/curl").chmod(0o755)
    status, text = job.run(TEACHER="large", SERVE="serve it", TRAIN_DOES=does)
    assert (status, "finished" in text) == ((75, False) if ends else (0, True)), text
    command = (job.out / "attempts/7-0/command.txt").read_text().splitlines()
    assert {"teachers.large.url=http://node2:8000/v1", "trainer.nnodes=1"} <= {*command}
    assert ("the teacher's server has ended" in text) == ends


def test_usr1_stops_the_run(job: Job) -> None:
    waits = f"touch $OUT/runs; until [ -e $OUT/attempts/7-0/stop ]; do sleep 0.05; done; {STOPPED}"
    process = job.start(TRAIN_DOES=waits)
    Lab.until((job.out / "runs").exists)
    process.send_signal(signal.SIGUSR1)
    text, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 75 and "saved on request; requeued" in text.splitlines()[-1], text
    command = (job.out / "attempts/7-0/command.txt").read_text().splitlines()
    assert f"trainer.stop_file={job.out}/attempts/7-0/stop" in command
    assert any(line.startswith("trainer.stop_at=") for line in command)


@pytest.mark.slow
def test_a_hanging_run_leaves_stacks_and_is_ended(job: Job) -> None:
    status, text = job.run(TRAIN_DOES="exec sleep 1000", HANG_SECONDS="1")
    assert status == 75 and "it hung; requeued" in text.splitlines()[-1], text
    assert "scancel --signal=USR2 7" in job.calls.read_text()


# -- pre-flight -------------------------------------------------------------------------------------------------------

NODE2_IS_BAD = "cd $OUT/attempts/7-0/preflight; echo ok >node1.verdict; echo 7 GPUs, 8 expected >node2.verdict"


def test_bad_nodes_are_named_and_excluded(job: Job) -> None:
    """Also where Slurm refuses the exclusion twice, while it still ends the job."""
    refuses_twice = "echo refused >>$OUT/refused; [ $(wc -l <$OUT/refused) -gt 2 ] || exit 1"
    status, text = job.run(PREFLIGHT="1", PREFLIGHT_DOES=NODE2_IS_BAD, EXCLUDED="node9", UPDATE_DOES=refuses_twice)
    assert status == 75, text
    assert "pre-flight node1: ok" in text and "pre-flight node2: 7 GPUs, 8 expected" in text
    assert "bad nodes: node2; requeued without node9,node2" in text.splitlines()[-1]
    assert job.calls.read_text().splitlines() == ["requeued", "update jobid=7 ExcNodeList=node9,node2"]


@pytest.mark.parametrize(
    ("does", "partition", "code", "words"),
    [
        (NODE2_IS_BAD, "node1 node2", 1, "bad nodes: node2; the partition has 1 others, and 2 are needed"),
        ("echo ok >$OUT/attempts/7-0/preflight/node2.verdict", "node1 node2 node3", 75, "requeued without node1"),
        ("cd $OUT/attempts/7-0/preflight; echo ok | tee node1.verdict >node2.verdict", "node1 node2", 0, "finished"),
    ],
    ids=["too few good nodes", "no verdict", "all good"],
)
def test_the_verdicts_decide(job: Job, does: str, partition: str, code: int, words: str) -> None:
    status, text = job.run(PREFLIGHT="1", PREFLIGHT_DOES=does, PARTITION=partition, TRAIN_DOES=DONE)
    assert status == code and words in text.splitlines()[-1], text
    assert (job.calls.read_text() == "") == (code != 75)


@pytest.mark.parametrize(
    "does",
    [
        "cd $OUT/attempts/7-*/preflight; echo 'all-reduce: timed out' | tee node1.verdict >node2.verdict",
        "exit 1",  # the image cannot be read: no verdict at all
    ],
)
def test_where_all_nodes_fail_the_infrastructure_is_named_and_no_node_excluded(job: Job, does: str) -> None:
    status, text = job.run(PREFLIGHT="1", PREFLIGHT_DOES=does)
    words = "all 2 nodes fail the pre-flight: the infrastructure (shared file system, image or network), no single node"
    assert status == 75 and f"{words}; requeued; newest" in text.splitlines()[-1], text
    assert job.calls.read_text() == "requeued\n"
    status, text = job.run(PREFLIGHT="1", PREFLIGHT_DOES=does.replace("7-*", "7-1"), SLURM_RESTART_COUNT="1")
    assert status == 1 and f"{words}, and two attempts in a row" in text.splitlines()[-1], text
    assert job.calls.read_text() == "requeued\n"


SLOW = "all-reduce at 2.00 GB/s, below 20"


@pytest.mark.parametrize(
    ("first", "num_nodes", "code", "words"),
    [
        ("", 4, 75, f"bad link between node1 and node2 ({SLOW}); requeued"),
        ("", 3, 1, f"and node2 ({SLOW}); the partition has 1 others, and 2 are"),
        ("7 GPUs, 8 expected; ", 3, 75, "bad nodes: node1; requeued without node1"),  # one end is at fault
    ],
)
def test_of_two_nodes_a_bad_link_is_named(job: Job, first: str, num_nodes: int, code: int, words: str) -> None:
    """It is no fault of the infrastructure, and no fault of either node that anyone could see."""
    does = f"cd $OUT/attempts/7-0/preflight; echo '{first}link with node2: {SLOW}' >node1.verdict"
    does += f"; echo 'link with node1: {SLOW}' >node2.verdict"
    nodes = " ".join(f"node{number}" for number in range(1, num_nodes + 1))
    status, text = job.run(PREFLIGHT="1", PREFLIGHT_DOES=does, PARTITION=nodes)
    assert status == code and words in text.splitlines()[-1], text


@pytest.fixture
def preflight(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("preflight", ROOT / "slurm" / "preflight.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gpus_and_versions_are_looked_at(preflight: ModuleType) -> None:
    good = ["NVIDIA H100 80GB HBM3", "4", "0", "Not Active"]
    assert preflight.gpu_problems([good] * 8, 8) == []
    bad = [good, [good[0], "70000", "0", "Not Active"], [*good[:2], "3", "Not Active"], [*good[:3], "Active"]]
    assert preflight.gpu_problems(bad, 8) == [
        "4 GPUs, 8 expected",
        "GPU 1: 70000 MiB in use by another process",
        "GPU 2: 3 uncorrected ECC errors",
        "GPU 3: hardware slowdown (heat or power)",
    ]
    gpus = ("H100", "H100", "L40S", "L40S")  # of two nodes that train, and of two that generate
    facts = [
        {"node": f"n{i}", "draws": i > 1, "versions": {"torch": "2.13.0", "gpu": gpu}} for i, gpu in enumerate(gpus)
    ]
    assert preflight.odd_versions(facts) == {}
    facts[3]["versions"]["gpu"] = "A10"
    assert preflight.odd_versions(facts) == {"n3": ["gpu A10, but L40S on 1 nodes"]}
    facts[3]["versions"]["gpu"] = "L40S"
    for node_facts, rails in zip(facts, ("8 x 400 Gb/s", "8 x 400 Gb/s", "2 x 200 Gb/s", "2 x 200 Gb/s"), strict=True):
        node_facts["versions"]["rails"] = rails  # type: ignore[index]
    assert preflight.odd_versions(facts) == {}
    facts[0]["versions"]["torch"] = "2.12.1"
    assert preflight.odd_versions(facts) == {"n0": ["torch 2.12.1, but 2.13.0 on 3 nodes"]}


def test_imports_come_before_the_clock_and_the_facts(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rendezvous has a limit of its own; an import that fails is a problem of the node, which all others can read."""
    now, waited = [0.0], []

    def slow_import(name: str) -> None:
        now[0] += 500.0
        raise ImportError("libcudart.so.13 is not here\nmore")

    monkeypatch.setattr(preflight.importlib, "import_module", slow_import)
    monkeypatch.setattr(preflight.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(preflight.time, "sleep", lambda seconds: waited.append(now.append(now.pop() + 10.0)))
    facts = {"node": "n1", "draws": False, "first_rank": 0, "problems": [], "versions": {}}
    monkeypatch.setattr(preflight, "check_node", lambda device: facts)
    monkeypatch.setattr(preflight, "NODE", "n1")
    monkeypatch.setattr(sys, "argv", ["preflight.py", str(tmp_path), "--device", "cpu"])
    assert preflight.main() == 0
    assert 10 * len(waited) >= preflight.RENDEZVOUS_S > preflight.PEER_S  # from the end of the imports
    assert (tmp_path / "n1.verdict").read_text() == "imports: ImportError: libcudart.so.13 is not here"


def test_rails_are_active_ports(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nine ports of eight GPUs, as Linux lists them: one is down, one of another network is slower, one runs at half its rate."""
    rates = ["400 Gb/sec (4X NDR)"] * 7 + ["200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"]
    for number, rate in enumerate(rates):
        port = tmp_path / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{rate}\n")
        (port / "state").write_text("1: DOWN\n" if number == 0 else "4: ACTIVE\n")
    monkeypatch.setattr(preflight, "Path", lambda name: {"/sys/class/infiniband": tmp_path}[name])
    assert preflight.rails() == [400.0] * 6 + [200.0, 100.0]
    (tmp_path / "mlx5_1/ports/1/rate").write_text("\n")  # some drivers leave it so
    monkeypatch.setattr(preflight, "gpu_facts", list)
    assert any(
        "mlx5_1/ports/1/rate is '\\n'; it should begin" in text for text in preflight.check_node("cuda")["problems"]
    )


@pytest.mark.parametrize(("rails", "speed", "floor"), [(400.0, 150.0, "160"), (25.0, 15.0, "20"), (50.0, 19.0, "20")])
def test_a_link_is_held_to_its_rails(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, rails: float, speed: float, floor: str
) -> None:
    """8 x 400 Gb/s are 400 GB/s, of which an all-reduce must reach 0.4. Within a node: 300 GB/s."""
    link_of(preflight, monkeypatch, speed)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
    facts = [{"node": "n1", "rails": 400.0}, {"node": "n2", "rails": rails}]
    (problem,) = preflight.network_problems("cuda", facts)
    assert problem == f"link with n2: all-reduce at {speed:.2f} GB/s, below {floor}"
    link_of(preflight, monkeypatch, float(floor) + 1)
    assert preflight.network_problems("cuda", facts) == []


def link_of(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    """Two nodes of 8: 300 GB/s within each, `speed` between them."""
    monkeypatch.setattr(preflight, "bandwidth", lambda group, size, *_: 300.0 if size == 8 else speed)
    for name in ("new_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    monkeypatch.setattr("grpo_megatron.parallel.control.join_default_group", lambda *_: None)


def test_a_slow_link_is_named_by_its_other_end(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    link_of(preflight, monkeypatch, 2.0)
    monkeypatch.setenv("PREFLIGHT_PAIR_GBPS", "20")
    assert preflight.network_problems("cpu", [{"node": "n1"}, {"node": "n2"}]) == [
        "link with n2: all-reduce at 2.00 GB/s, below 20"
    ]


def test_every_node_meets_its_neighbours_once(preflight: ModuleType) -> None:
    for nodes in range(1, 10):
        rounds = preflight.ring_rounds(nodes)
        for pairs in rounds:
            members = [node for pair in pairs for node in pair]
            assert len(set(members)) == len(members)
        met = [frozenset(pair) for pairs in rounds for pair in pairs]
        assert len(met) == len(set(met)) == {1: 0, 2: 1}.get(nodes, nodes)


# -- arguments, dry run, tidiness -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (("nowhere.yaml",), {}, "no config nowhere.yaml"),
        (("examples/quickstart.yaml", "resume"), {}, "'resume' is not of the form section.key=value"),
        (("examples/quickstart.yaml",), {"SLURM_JOB_ID": ""}, "not in a Slurm job"),
        (("examples/quickstart.yaml",), {"CONTAINER": "x", "CONTAINER_RUNTIME": "docker"}, "set pyxis or apptainer"),
        (("examples/quickstart.yaml",), {"REPO": "/"}, "submit from the project's root"),
        (("trainer.save_freq=5",), {"MODEL": "/nowhere"}, "no model /nowhere; set MODEL, or give a config"),
        (("trainer.save_freq=5", "model.path=/away"), {}, "no model /away"),
        (("examples/quickstart.yaml",), {"HEALING": "1", "SPARES": "9"}, "leave none to train"),
    ],
)
def test_mistakes_are_named(job: Job, arguments: tuple[str, ...], variables: dict[str, str], words: str) -> None:
    status, text = job.run(*arguments, **variables)
    assert status == 2 and "error: " in text and words in text, text


def test_dry_run_shows_the_plan_and_every_command(job: Job) -> None:
    """No command of Slurm is called. The program is `echo`, so that the arguments show."""
    nothing = dict.fromkeys(["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE"], "")
    variables = {**nothing, "DRY_RUN": "1", "PREFLIGHT": "1", "DEVICE": "cuda"}
    before = set(ROOT.iterdir())
    status, text = job.run("examples/qwen2_72b.yaml", "trainer.save_freq=5", **variables)
    assert status == 0, text
    assert "8 nodes x 8 = 64 ranks on cuda, rank 0 at node1:20000" in text
    assert "-m grpo_megatron train examples/qwen2_72b.yaml trainer.save_freq=5 --dry-run --world-size 64" in text
    preflight, train = re.findall(r"^ srun .*", text, re.MULTILINE)
    assert "--nodes=8 --ntasks=64 --ntasks-per-node=8" in train and "slurm/preflight.py" in preflight
    assert "trainer.nnodes=8 trainer.n_gpus_per_node=8" in train and "--kill-on-bad-exit=1" in train
    assert job.calls.read_text() == "" and set(ROOT.iterdir()) == before

    healing = job.run("examples/qwen2_72b.yaml", **variables, HEALING="1", SPARES="1")[1]
    train = re.findall(r"^ srun .*", healing, re.MULTILINE)[1]
    assert "--nodes=8" in train and "--ntasks=8 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0" in train
    assert "slurm/as_rank.sh --node" in train and "--kill-on-bad-exit=1" not in train and "--ntasks=64" not in train
    assert "trainer.healing.layouts=auto trainer.healing.spares=1" in train and "trainer.nnodes=7" in train
    assert "--world-size 56" in healing
    pyxis = job.run("examples/qwen2_72b.yaml", **variables, CONTAINER="/i.sqsh", CONTAINER_MOUNTS="/a:/a")[1]
    assert pyxis.count("--container-image=/i.sqsh --container-mounts=/a:/a --container-workdir=") == 2
    apptainer = job.run("examples/qwen2_72b.yaml", **variables, CONTAINER="/i.sif", CONTAINER_RUNTIME="apptainer")[1]
    assert apptainer.count("apptainer exec --nv --bind") == 2


def test_a_job_without_a_config_trains_the_70b_model_in_fp8(job: Job, tmp_path: Path) -> None:
    """A dry run needs no model: then the example's own path stays, which is an architecture."""
    options = ("trainer.save_freq=5", f"trainer.output_dir={job.out}")
    text = job.run(*options, DRY_RUN="1", MODEL="/nowhere")[1]
    assert "train examples/llama3_70b_fp8.yaml trainer.save_freq=5 " in text and "model.path" not in text
    status, text = job.run(*options, DRY_RUN="1", MODEL=str(tmp_path), DATA="/rows")
    files = r"data.train_files=\[/rows/train.jsonl\] data.val_files=\[/rows/test.jsonl\]"
    assert status == 0 and f"llama3_70b_fp8.yaml model.path={tmp_path} {files} trainer.save_freq=5" in text, text


def test_a_job_is_named_after_its_output_folder(job: Job) -> None:
    """sbatch knows the script's name for it only. A later job of the same name would share the folder."""
    variables = {"TRAIN_DOES": DONE, "SLURM_JOB_NAME": "grpo-70b"}
    assert job.run(**variables, SAME_NAME="7 9")[0] == 0
    assert job.calls.read_text() == "update jobid=7 JobName=out\n"
    status, text = job.run(**variables, SAME_NAME="9 6")
    assert status == 2 and "job 6 is called out, too" in text
    job.calls.write_text("")
    assert job.run(**{**variables, "SLURM_JOB_NAME": "mine"}, SAME_NAME="6")[0] == 0 and job.calls.read_text() == ""


def test_ports_are_the_same_for_an_attempt_and_others_for_the_next(job: Job) -> None:
    def port(**variables: str) -> int:
        text = job.run("examples/quickstart.yaml", DRY_RUN="1", **variables)[1]
        return int(re.findall(r"rank 0 at node1:(\d+)", text)[0])

    attempts = ("41", "0"), ("41", "0"), ("41", "1"), ("42", "0")
    ports = [port(SLURM_JOB_ID=job_id, SLURM_RESTART_COUNT=count) for job_id, count in attempts]
    assert ports[0] == ports[1] and len(set(ports)) == 3
    assert all(20000 <= p < 30000 for p in ports)


def test_evaluation_runs_as_ranks_and_checks_its_layout(job: Job) -> None:
    status, text = job.run("outputs/x/hf", "--samples", "4", script="evaluate_70b.sh", DRY_RUN="1", TP="4")
    assert status == 0 and "-m grpo_megatron evaluate --model outputs/x/hf --tasks gsm8k" in text
    assert "--tp 4 --device cpu --samples 4" in text
    status, text = job.run("m", script="evaluate_70b.sh", DRY_RUN="1", TP="3")
    assert status == 2 and "TP=3 does not divide the 4 ranks (1 nodes x 4)" in text
    status, text = job.run("--samples", script="evaluate_70b.sh")
    assert status == 2 and "the first argument is the model" in text


def test_certify_starts_every_run_as_ranks(job: Job) -> None:
    status, text = job.run("run.yaml", "rollout.n=2", script="certify.sh", DRY_RUN="1", NODES="2")
    assert status == 0 and "certify run.yaml rollout.n=2 trainer.nnodes=2 trainer.n_gpus_per_node=4" in text
    assert r"--start srun\ --nodes=2\ --ntasks=8" in text and r"bash\ slurm/as_rank.sh\ echo" in text
    inside = job.run("run.yaml", script="certify.sh", DRY_RUN="1", NODES="1", CONTAINER="/x.sqsh")[1]
    assert "srun --nodes=1 --ntasks=1 --container-image=/x.sqsh" in inside and "--start" not in inside
    status, text = job.run("a.b=1", script="certify.sh", DRY_RUN="1")
    assert status == 2 and "the first argument is the config" in text


def test_scripts_are_clean() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None, "shellcheck is in requirements/dev.lock"
    scripts = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "slurm").glob("*.sh"))
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(scripts) == 6, done.stdout
    for script in scripts:
        text = (ROOT / script).read_text()
        assert text.isascii() and len(text.splitlines()) <= 240
