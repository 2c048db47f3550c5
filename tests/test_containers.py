"""The image and the jobs of other schedulers: schemas, commands, variables; the pods' command as two nodes of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import parse_args

from grpo_megatron.cli import main
from tests import worlds
from tests.runs import make_run
from tests.stored import metric_rows

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "containers"
KUBERNETES, SKYPILOT = FOLDER / "kubernetes.yaml", FOLDER / "skypilot.yaml"


def job_set() -> Any:
    return yaml.safe_load(KUBERNETES.read_text())


def pod() -> Any:
    return job_set()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def in_pod(words: list[str], **variables: str) -> list[str]:
    """The words as Kubernetes expands them. A variable that no pod has stays, and fails the test that parses them."""
    container = pod()["containers"][0]
    known = {row["name"]: row.get("value", "0") for row in container["env"]} | variables
    return [re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), word) for word in words]


def test_the_image_is_built_by_a_lock_and_its_cuda() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    lock = (ROOT / arguments["LOCK"]).read_text()
    assert (
        re.search(r"^FROM nvidia/cuda:(\S+)-devel-ubuntu24.04$", text, re.M)[1] in lock.split("cuda-toolkit==")[1][:8]
    )  # type: ignore[index]
    python, venv = re.search(r"^RUN bash requirements/install.sh (\S+) (\S+) \"\$LOCK\"$", text, re.M).groups()  # type: ignore[union-attr]
    assert python.removeprefix("python") in lock.splitlines()[0] and f"PATH={venv}/bin:" in text
    assert all((ROOT / path).is_file() for path in re.findall(r"requirements/\S+\.(?:lock|sh)", text))
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint is not None, "hadolint is in requirements/dev.lock"
    done = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "schema"), [(KUBERNETES, "jobset"), (SKYPILOT, "skypilot_task")], ids=["jobset", "sky"]
)
def test_a_job_has_its_schedulers_schema(file: Path, schema: str) -> None:
    """As JobSet 0.11, Kubernetes 1.34 and SkyPilot 0.14 define it; a misspelt key is an error."""
    rules, job = json.loads((ROOT / f"tests/data/schemas/{schema}.json").read_text()), yaml.safe_load(file.read_text())
    jsonschema.validate(job, rules)
    wrong = job["spec"] if schema == "jobset" else job["resources"]
    wrong["job_recover"] = wrong.pop("failurePolicy" if schema == "jobset" else "job_recovery")
    with pytest.raises(jsonschema.ValidationError, match="job_recover"):
        jsonschema.validate(job, rules)


@pytest.fixture
def run_in_sky(tmp_path: Path) -> Any:
    """`run` of the SkyPilot task on node 1 of 8. Stand-ins of `python` and `torchrun` record their arguments."""

    def run(torchrun: str, python: str = "true") -> tuple[int, list[str], list[str]]:
        for name, body in (("python", python), ("torchrun", torchrun)):
            (tmp_path / name).write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{tmp_path}/{name}.txt\n{body}\n')
            (tmp_path / name).chmod(0o755)
        script = yaml.safe_load(SKYPILOT.read_text())["run"]
        script = script.replace("/opt/grpo-megatron", str(ROOT)).replace("output=/shared", f"output={tmp_path}")
        sky = {"NUM_NODES": "8", "NUM_GPUS_PER_NODE": "8", "NODE_RANK": "1", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
        variables = {f"SKYPILOT_{name}": value for name, value in sky.items()}
        done = subprocess.run(
            ["bash", "-c", script], env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}, timeout=60
        )
        records = [(tmp_path / f"{name}.txt") for name in ("python", "torchrun")]
        return done.returncode, *[path.read_text().splitlines() if path.exists() else [] for path in records]

    return run


@pytest.mark.parametrize("scheduler", ["kubernetes", "skypilot"])
def test_a_jobs_command_is_one_that_the_program_takes(
    scheduler: str, run_in_sky: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun and the command line parse it; the check before it is the same run, and says what is missing here."""
    monkeypatch.chdir(ROOT)
    if scheduler == "kubernetes":
        (check,), (train,) = pod()["initContainers"], pod()["containers"]
        assert check["image"] == train["image"]
        words = in_pod(train["command"] + train["args"], JOB_COMPLETION_INDEX="1")[1:]
        checked = in_pod(check["command"] + check["args"])[1:]
        (job,) = job_set()["spec"]["replicatedJobs"]
        (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert (rule["onExitCodes"]["containerName"], rule["onExitCodes"]["values"]) == (check["name"], [2])
        name, sizes = job_set()["metadata"]["name"], job["template"]["spec"]
        master = f"{name}-{job['name']}-0-0.{name}"
        assert sizes["parallelism"] == sizes["completions"] == 8 and train["resources"]["limits"] == {
            "nvidia.com/gpu": 8
        }
    else:
        code, checked, words = run_in_sky("true")
        assert code == 0
        master = "10.0.0.1"
    parsed = parse_args(words)
    found = (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank, parsed.master_addr)
    assert found == ("8", "8", 1, master)
    program = parsed.training_script_args
    assert checked[:2] == ["-m", parsed.training_script] and sorted(checked[2:]) == sorted([*program, "--dry-run"])
    assert main.main([*program, "--dry-run"]) == 2  # only because of the files
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors and all("/shared/" in line for line in errors), errors
    assert main.main([*program, "model.path=examples/models/llama3_70b", "--dry-run", "--world-size", "64"]) == 0


def test_the_variables_of_a_job_are_read() -> None:
    """By the program or a library of it, or by the job's own command."""
    sources = [*ROOT.glob("grpo_megatron/**/*.py"), *ROOT.glob("slurm/*.sh")]
    text = "\n".join(path.read_text() for path in sources)
    container, task = pod()["containers"][0], yaml.safe_load(SKYPILOT.read_text())
    commands = json.dumps([container["command"], container["args"], container["lifecycle"]])
    for name in (row["name"] for row in container["env"]):
        assert re.search(rf"\b{name}\b", text) or f"$({name})" in commands, name
    assert all(re.search(rf"\b{name}\b", text) for name in task["envs"])
    mounts = [row["mountPath"] for row in container["volumeMounts"]]
    assert all(word.split("=")[-1].strip("[]").startswith(tuple(mounts)) for word in container["args"] if "/" in word)


@pytest.mark.parametrize(
    ("torchrun", "python", "code"),
    [
        ("exit 1", "exit 2", 2),
        ("exit 1", "true", 1),
        ("mkdir -p $(dirname $0)/outputs/grpo-70b/checkpoints/step_000002; exit 1", "true", 75),
    ],
    ids=["mistake", "no-progress", "progress"],
)
def test_what_skypilot_starts_again(run_in_sky: Any, torchrun: str, python: str, code: int) -> None:
    assert run_in_sky(torchrun, python)[0] == code
    assert (
        code not in yaml.safe_load(SKYPILOT.read_text())["resources"]["job_recovery"]["recover_on_exit_codes"]
        or code == 75
    )


@pytest.mark.soak
def test_two_pods_train_as_one_world(tmp_path: Path) -> None:
    """The pods' own command, with two nodes of one rank: torchrun's agents meet at MASTER_ADDR, and the world has two ranks."""
    make_run(tmp_path)
    train = pod()["containers"][0]
    words = in_pod(train["command"][: train["command"].index("-m")])[1:]
    sizes = {
        "--nnodes": "2",
        "--nproc-per-node": "1",
        "--master-addr": "localhost",
        "--master-port": str(worlds.free_port()),
    }
    own = [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "rollout.engine=transformers",
        f"trainer.output_dir={tmp_path}/out",
    ]
    own += ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.save_hf_at_end=false"]
    processes = []
    for index in "01":
        node = [word.split("=")[0] for word in in_pod(words, JOB_COMPLETION_INDEX=index)]
        values = sizes | {"--node-rank": in_pod(words, JOB_COMPLETION_INDEX=index)[2].split("=")[1]}
        command = [sys.executable, "-m", "torch.distributed.run", *(f"{name}={values[name]}" for name in node)]
        command += ["-m", "grpo_megatron", "train", str(tmp_path / "run.yaml"), *own]
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    texts = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert [row["step"] for row in metric_rows(tmp_path / "out") if "actor/lr" in row] == [0]
    assert {path.stem for path in (tmp_path / "out/heartbeats").glob("rank_*.json")} == {"rank_00000", "rank_00001"}
