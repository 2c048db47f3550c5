"""Task folders and SWE rows: the formats as their packages define them, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.data.folders import read_folder, task_of_row
from grpo_megatron.data.rows import open_rows
from grpo_megatron.data.task import get_task

# the fields that harbor 0.26 writes into a new task, and some that it reads
HARBOR = """
version = "1.0"
artifacts = ["/data", { source = "out/log" }]
[task]
name = "org/copy"
[metadata]
author_name = "x"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 40.0
env = { LEVEL = "2" }
[environment]
build_timeout_sec = 600.0
cpus = 2
memory = "2G"
storage_mb = 512
env = { MODE = "x" }
"""
TERMINAL_BENCH = """
instruction: |-
  Write hello.
author_name: x
difficulty: easy
parser_name: pytest
max_agent_timeout_sec: 100.0
max_test_timeout_sec: 20.0
run_tests_in_same_shell: false
"""


def harbor(folder: Path, config: str = HARBOR, **files: str) -> Path:
    """Writes a task folder of Harbor; `files` replace its own, and "" removes one."""
    texts = {
        "task.toml": config,
        "instruction.md": "<!-- my-canary GUID 1 -->\n\nWrite hello.\n",
        "tests/test.sh": "true",
    }
    return write(folder, {**texts, "environment/Dockerfile": "FROM debian\n", **files})


def terminal_bench(folder: Path, config: str = TERMINAL_BENCH, **files: str) -> Path:
    texts = {"task.yaml": config, "run-tests.sh": "true", "tests/test_outputs.py": "", "Dockerfile": "FROM debian\n"}
    return write(folder, {**texts, "docker-compose.yaml": "services:\n  client:\n    build: .\n", **files})


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        if not text and not name.endswith(".py"):
            (folder / name).unlink()
    return folder


def test_a_folder_of_harbor(tmp_path: Path) -> None:
    task = read_folder(harbor(tmp_path / "copy"))
    assert (task.name, task.instruction, task.writes_reward) == ("org/copy", "Write hello.", True)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.cpus, task.memory_mib, task.disk_mib) == (
        30,
        40,
        2,
        2048,
        512,
    )
    assert (task.variables, task.verifier_variables, task.artifacts) == (
        {"MODE": "x"},
        {"LEVEL": "2"},
        ("/data", "/out/log"),
    )
    assert (
        task.tests == {"/tests": tmp_path / "copy/tests"}
        and task.dockerfile == tmp_path / "copy/environment/Dockerfile"
    )
    assert (task.is_shared, task.network, task.image) == (None, False, None)
    config = 'version = "1.0"\n[environment]\ndocker_image = "a:1"\nworkdir = "/w"\nnetwork_mode = "public"\n'
    config += '[verifier]\nenvironment_mode = "shared"'
    task = read_folder(harbor(tmp_path / "image", config, **{"environment/Dockerfile": ""}))
    assert (task.image, task.workdir, task.network, task.is_shared, task.dockerfile) == ("a:1", "/w", True, True, None)


def test_a_folder_of_terminal_bench(tmp_path: Path) -> None:
    task = read_folder(terminal_bench(tmp_path / "hello"))
    assert (task.name, task.instruction, task.writes_reward) == ("hello", "Write hello.", False)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.verifier) == (100, 20, ("bash", "/tests/run-tests.sh"))
    assert set(task.tests) == {"/tests", "/tests/run-tests.sh"} and task.context == tmp_path / "hello"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"instruction.md": ""}, "there is no instruction.md"),
        ({"instruction.md": "# canary\n\n"}, "instruction.md is empty"),
        ({"tests/test.sh": ""}, "no tests/test.sh, the verifier"),
        ({"task.yaml": "instruction: x"}, "both task.toml .* and task.yaml .*; remove one"),
        ({"task.toml": "[["}, "task.toml cannot be read"),
        ({"task.toml": "environment = 3"}, "environment is no table"),
        ({"task.toml": '[[steps]]\nname = "a"'}, r"\[\[steps\]\]: tasks with several steps are not supported"),
        ({"task.toml": '[environment]\nos = "windows"'}, "environment.os"),
        ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus: tasks with gpus"),
        ({"task.toml": '[environment]\nmemory = "much"'}, "environment.memory='much' is no size; write 512M or 2G"),
        ({"task.toml": '[environment.env]\nKEY = "${API_KEY}"'}, "environment.env.KEY wants a variable of the host"),
        (
            {"environment/docker-compose.yaml": "services: {main: {}, db: {}}"},
            "with main, db: tasks with several services",
        ),
    ],
)
def test_a_wrong_folder_of_harbor(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        read_folder(harbor(tmp_path, 'version = "1.0"', **files))
    assert str(error.value).startswith(f"task folder {tmp_path}: ")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"task.yaml": "difficulty: easy"}, "no text `instruction`"),
        ({"task.yaml": "a: [1"}, "task.yaml cannot be read"),
        ({"run-tests.sh": ""}, "there is no run-tests.sh"),
        ({"task.yaml": "instruction: x\nrun_tests_in_same_shell: true"}, "run_tests_in_same_shell"),
        ({"docker-compose.yaml": "services: {client: {}, db: {}}"}, "client, db"),
    ],
)
def test_a_wrong_folder_of_terminal_bench(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        read_folder(terminal_bench(tmp_path, **files))


def test_a_folder_of_folders_is_a_data_file(tmp_path: Path) -> None:
    """Its rows are the folders by name, of both formats; other folders in it are none. A table may name folders, too."""
    tasks = [harbor(tmp_path / "tasks/b"), terminal_bench(tmp_path / "tasks/a")]
    (tmp_path / "tasks/notes").mkdir()
    rows = open_rows(tmp_path / "tasks")
    assert list(rows.rows(0, 2)) == [{"folder": str(folder)} for folder in tasks[::-1]] and len(rows) == 2
    assert rows.place(1) == str(tasks[0]) and list(open_rows(tasks[0]).rows(0, 1)) == [{"folder": str(tasks[0])}]
    task = get_task("folders")
    assert task.read_row({"folder": str(tasks[0])}) == ("Write hello.", "") and task.reward is None
    for row, problem in (
        ({"folder": str(tmp_path / "x")}, "no such folder; it needs task.toml"),
        ({"a": 1}, "'folder'"),
    ):
        with pytest.raises(ValueError, match=problem):
            task.read_row(row)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="holds no data set"):
        open_rows(tmp_path / "none")


SWE = {
    "instance_id": "a__b-1",
    "problem_statement": "Fix it.",
    "image_name": "swe/a:1",
    "base_commit": "abc",
    "FAIL_TO_PASS": json.dumps(["tests/test_a.py::test_x[1 2]"]),
    "PASS_TO_PASS": ["tests/test_a.py::test_y"],
    "test_patch": "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n",
}


def test_a_row_of_swe() -> None:
    task = task_of_row(SWE)
    assert (task.name, task.image, task.workdir, task.instruction) == ("a__b-1", "swe/a:1", "/testbed", "Fix it.")
    script = task.tests["/tests/test.sh"].decode().splitlines()  # type: ignore[union-attr]
    assert script[0].startswith("git checkout -q abc -- tests/test_a.py") and script[1].startswith("git apply")
    assert script[-1].endswith("'tests/test_a.py::test_x[1 2]' tests/test_a.py::test_y") and "pytest" in script[-1]
    own = {**SWE, "install_config": {"test_cmd": ["make x", "run"]}, "FAIL_TO_PASS": ["a (B)"]}
    assert task_of_row(own).tests["/tests/test.sh"].decode().splitlines()[-2:] == [
        "make x",
        "run 'a (B)' tests/test_a.py::test_y",
    ]  # type: ignore[union-attr]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"image_name": None}, "image_name"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": None}, "name no test"),
        ({"FAIL_TO_PASS": ["test_a (B)"]}, "no test of pytest; give the row a field test_cmd"),
        ({"PASS_TO_PASS": {"a": 1}}, "no list of names"),
    ]
    for change, problem in wrong:
        with pytest.raises(ValueError, match=problem):
            task_of_row({**SWE, **change})
