"""Environments of task folders: the agent's sandbox, the verifier out of its reach, and failures that are no reward."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.environments.environment import Outcome
from grpo_megatron.environments.folders import FolderEnvironment
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.environments.sandboxes import backend
from grpo_megatron.environments.sandboxes.backend import SandboxError
from grpo_megatron.environments.sandboxes.local import LocalSandbox, walls_problem
from grpo_megatron.processes.process import tree
from tests.data.test_folders import harbor, terminal_bench
from tests.environments.test_sandbox import folder_for_all

pytestmark = pytest.mark.skipif(bool(walls_problem()), reason=f"no namespaces here: {walls_problem()}")
CONFIG = 'version = "1.0"\n[agent]\ntimeout_sec = 20.0\n[verifier]\ntimeout_sec = 10.0\n'
TEST = "grep -qx hello out.txt && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
DOCKERFILE = "FROM debian\nWORKDIR /app\nCOPY word .\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives all sandboxes a folder of their own, in which nothing may be left."""
    with folder_for_all() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder
        assert os.listdir(folder) == []


def row_of(
    folder: Path, test: str = TEST, config: str = CONFIG, dockerfile: str = DOCKERFILE, **files: str
) -> dict[str, Any]:
    files = {"tests/test.sh": test, "environment/Dockerfile": dockerfile, "environment/word": "hello\n", **files}
    return {"folder": str(harbor(folder, config, **files)), "messages": [{"role": "user", "content": "Write hello."}]}


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def played(row: dict[str, Any], *commands: str, **kwargs: Any) -> tuple[float | None, list[str], dict[str, float]]:
    """Plays a trajectory in this process. Returns (reward, what the model was shown, metrics of the end)."""
    import asyncio

    environment, shown = FolderEnvironment(**kwargs), []
    assert environment.reset(row, 7) == row["messages"]
    for command in commands:
        step = asyncio.run(environment.step(call(command)))
        shown += [message["content"] for message in step.messages]
        if step.done:
            return step.reward, shown, step.metrics
    step = asyncio.run(environment.step("I am done."))
    assert step.done
    return step.reward, shown, step.metrics


def test_a_trajectory_works_and_is_graded(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    reward, shown, metrics = played(row, "cat word; ls /tests", "cat word > out.txt", "cat missing")
    assert reward == 1.0 and metrics["verifier_seconds"] > 0
    assert shown[0].startswith("hello\n") and shown[1] == "" and shown[2].endswith("[exit code 1]")
    assert played(row)[0] == 0.0  # each has its own sandbox
    assert played(row, "echo hello > out.txt", verifier="shared")[0] == 1.0


def test_one_process_serves_several_trajectories_in_sandboxes_of_their_own(tmp_path: Path) -> None:
    """The second one finds nothing of the first."""
    row, rewards, processes = row_of(tmp_path / "task"), [], []
    kwargs = {"memory_mib": 256, "disk_mib": 16, "episodes": 2}
    with EnvironmentPool("folders", kwargs, timeout_s=60.0) as pool:
        for number, command in enumerate(("cat word > out.txt", "test -e out.txt || true")):
            key = str(number)
            pool.start(key, row, 7)
            for turn in (call(command), "done"):
                assert pool.wait([key])[key].step
                pool.step(key, turn)
            end = pool.wait([key])[key].step
            assert end
            rewards.append(end.reward)
            processes.append([tree(host._process.pid) for host in pool._processes._hosts])
            pool.end([key])
    assert rewards == [1.0, 0.0]
    assert processes[0] == processes[1]


def test_the_forms_of_a_reward(tmp_path: Path) -> None:
    several = 'echo \'{"reward": 0.5, "tests": 3}\' > /logs/verifier/reward.json'
    reward, _, metrics = played(row_of(tmp_path / "json", several))
    assert (reward, metrics["tests"]) == (0.5, 3.0)
    for number, (text, reward) in enumerate({"test -e out && cat $TEST_DIR/data": 1.0, "test -e in": 0.0}.items()):
        folder = terminal_bench(
            tmp_path / f"tb{number}", **{"run-tests.sh": text, "tests/data": "x", "Dockerfile": "FROM x\nWORKDIR /a/b"}
        )
        row = {"folder": str(folder), "messages": []}
        assert played(row | {"messages": [{"role": "user", "content": "x"}]}, "echo > out")[0] == reward


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("true", "has written neither reward.txt nor reward.json"),
        ("echo much > /logs/verifier/reward.txt", "reward.txt is no reward .*much"),
        ("echo nan > /logs/verifier/reward.txt", "no finite number"),
        ("echo '{\"tests\": 3}' > /logs/verifier/reward.json", "written no reward, but tests"),
        ("sleep 99", "has not ended as it should .*after 1 s"),
        ("exec no-such-program", "exit code 127"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "more than 65536 bytes"),
        ("rm -r /logs/verifier/; ln -s /etc/passwd /logs/verifier", "has written neither|exit code"),
    ],
)
def test_a_verifier_without_a_reward_is_a_failure(test: str, problem: str, tmp_path: Path) -> None:
    """Never the reward 0."""
    with pytest.raises(RuntimeError, match=problem):
        played(row_of(tmp_path, test, CONFIG.replace("10.0", "1.0" if test == "sleep 99" else "10.0")))


POISON = {  # left by the agent -> the verifier, which would be fooled by it
    "a program before others on the path": (
        "mkdir -p ~/bin /tmp/bin; for d in ~/bin /tmp/bin .; do printf '#!/bin/sh\\nexit 0\\n' > $d/grep; chmod +x $d/grep; done;"
        " echo 'export PATH=~/bin:.:$PATH' | tee ~/.bashrc ~/.profile ~/.bash_profile > /dev/null",
        "grep -qx hello out.txt && r=1 || r=0",
    ),
    "a module beside the working folder": (
        "for m in json unittest; do echo 'print(1, flush=True); import os; os._exit(0)' > $m.py; done",
        "r=$(/usr/bin/python3 -c 'import json, unittest; print(0)')",
    ),
    "a module of the user": (
        "d=$(/usr/bin/python3 -m site --user-site); mkdir -p $d; echo 'print(1); import os; os._exit(0)' > $d/usercustomize.py",
        "r=$(/usr/bin/python3 -c 'print(0)')",
    ),
    "a verifier in its place": ("mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh", "r=0"),
    "a reward in its place": ("echo '{\"reward\": 1}' | tee /logs/verifier/reward.json /logs/reward.txt", "r=0"),
    "a link in place of the logs": ("rm -r /logs/verifier; ln -s /app /logs/verifier; echo 1 > reward.json", "r=0"),
    "a library before others": (
        "echo /app/evil.so > /etc/ld.so.preload; export LD_PRELOAD=/app/evil.so; echo > evil.so",
        "r=0",
    ),
    "a process that outlives": (
        "setsid nohup sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 & sleep 0.2",
        "sleep 0.3; r=0",
    ),
}


@pytest.mark.parametrize("mode", ["separate", "shared"])
@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_workspace_gives_no_reward(name: str, mode: str, tmp_path: Path) -> None:
    command, test = POISON[name]
    row = row_of(tmp_path, f"{test}\necho $r > /logs/verifier/reward.txt\n")
    assert played(row, command, verifier=mode)[0] == 0.0


def test_a_conftest_of_the_agent_is_not_read_by_pytest(tmp_path: Path) -> None:
    """With the pytest of this Python, which the option `readable` shows to the sandbox."""
    import pytest as installed

    packages = str(Path(installed.__file__).parents[1])
    test = f"PYTHONPATH={packages} /usr/bin/python3 -m pytest -q -p no:cacheprovider /tests/test_out.py\n"
    row = row_of(
        tmp_path,
        f"{test}test $? = 0 && r=1 || r=0\necho $r > /logs/verifier/reward.txt",
        **{"tests/test_out.py": "def test_x(): assert open('out.txt').read() == 'hello'"},
    )
    evil = "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    evil += "    (yield).get_result().outcome = 'passed'\n"
    poison = f"printf {evil!r} > conftest.py; printf '[pytest]\\naddopts = -p conftest\\n' > pytest.ini; cp conftest.py pytest.py"
    assert played(row, poison, readable=[packages])[0] == 0.0
    assert played(row, poison, "printf hello > out.txt", readable=[packages])[0] == 1.0


def test_what_the_agent_cannot_leave_behind(tmp_path: Path) -> None:
    """A workspace that nobody can archive is graded as an empty one. A task's other folders come along if it names them."""
    row = row_of(tmp_path / "a", "ls -A | wc -l | tee /logs/verifier/reward.txt")
    assert played(row, "rm word; touch a b")[0] == 2.0
    assert played(row, "for n in $(seq 9); do truncate -s 7M sparse$n; done", disk_mib=8)[0] == 0.0
    config = f'artifacts = ["/data"]\n{CONFIG}'
    row = row_of(
        tmp_path / "b",
        "cat /data/x /home2/x > /logs/verifier/reward.txt",
        config,
        "FROM x\nWORKDIR /app\nRUN echo 1 > a\nCOPY word /data/\nCOPY word /home2/x\n",
    )
    with pytest.raises(RuntimeError, match="3hello"):
        played(row, "echo 3 | tr -d '\\n' > /data/x; echo 4 > /home2/x")


def test_limits_of_a_run_end_a_trajectory_graded(tmp_path: Path) -> None:
    """`finish` is a call of its own; a replay of it is the same; the sandboxes of all are removed."""
    row = row_of(tmp_path)
    with EnvironmentPool("folders", {"call_timeout_s": 60.0}, timeout_s=60.0) as pool:

        def outcome(key: str) -> Outcome:
            return pool.wait([key])[key]

        pool.start("a", row, 7)
        assert outcome("a").step
        pool.step("a", call("cat word > out.txt"))
        assert outcome("a").step
        pool.step("a", None)
        step = outcome("a").step
        assert step and (step.reward, step.done, step.metrics["unfinished"]) == (1.0, True, 1.0)
        pool.start("b", row, 7, [call("cat word > out.txt"), None])
        step = outcome("b").step
        assert step and step.reward == 1.0
        pool.end(["a", "b"])


def test_the_time_of_an_agent_ends(tmp_path: Path) -> None:
    """Its commands together have the task's time; then the verifier runs."""
    row = row_of(tmp_path, config=CONFIG.replace("20.0", "1.0"))
    reward, shown, _ = played(row, "echo hello > out.txt; sleep 30", "echo never")
    assert reward == 1.0 and len(shown) == 1 and "has not ended after 1 s" in shown[0]


def test_failures_of_the_machinery_are_retried_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PAUSE_S", 0.0)
    failures, start = [2], LocalSandbox.start

    def failing(self: LocalSandbox) -> None:
        if failures[0]:
            failures[0] -= 1
            raise SandboxError("no space")
        start(self)

    monkeypatch.setattr(LocalSandbox, "start", failing)
    row = row_of(tmp_path)
    assert played(row, "cat word > out.txt")[0] == 1.0 and failures == [0]
    failures[0] = 3
    with pytest.raises(
        SandboxError, match=r"task .*: the start of a sandbox has failed 3 times; the last time: no space"
    ):
        FolderEnvironment().reset(row, 7)
    environment = FolderEnvironment()
    environment.reset(row, 7)
    failures[0] = 3
    with pytest.raises(SandboxError, match="its verifier has failed 3 times"):
        environment.finish()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"backend": "dockr"}, "unknown sandbox 'dockr'|dockr"),
        ({"memory": 3}, "has no option memory .*it has: .*memory_mib"),
        ({"verifier": "none"}, "verifier='none': write separate or shared"),
        ({"cpus": 0}, "cpus=0: write a whole number"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        FolderEnvironment(**kwargs)


def test_a_task_that_cannot_run_here_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"its verifier may take 10 s, and a command 20 s; set rollout.multi_turn.timeout_s=40 \(it is 29\)",
    ):
        FolderEnvironment(call_timeout_s=29.0).reset(row_of(tmp_path / "a"), 7)
    row = row_of(tmp_path / "b", config=f'{CONFIG}[environment]\nnetwork_mode = "public"\n')
    with pytest.raises(ValueError, match="wants a network; set rollout.multi_turn.kwargs.network=true"):
        FolderEnvironment().reset(row, 7)


AGENT = """
import json, os, subprocess, sys, urllib.request
given = json.loads(sys.stdin.readline())["row"]
def do(command): return subprocess.run([*given["sandbox"], command], capture_output=True, text=True)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": given["instruction"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as reply: said = json.load(reply)
one = do(said["choices"][0]["message"]["content"])
assert (one.stdout, one.returncode) == ("hello\\n", 3), one
do("cat word > out.txt")
print("whatever it says", file=sys.stderr)
"""


def test_an_agent_of_ones_own_works_in_the_sandbox(tmp_path: Path) -> None:
    """A program that speaks OpenAI's API runs commands there; the verifier gives the reward, and not what it prints."""
    (tmp_path / "agent.py").write_text(AGENT)
    row = row_of(tmp_path / "task")
    turn = {
        "text": "cat word; exit 3",
        "token_ids": [1],
        "tokens": ["x"],
        "logprobs": [0.0],
        "finish_reason": "stop",
        "prompt_tokens": 1,
    }
    kwargs = {"command": [sys.executable, str(tmp_path / "agent.py")], "call_timeout_s": 90.0}
    with EnvironmentPool("folders_command", kwargs, timeout_s=90.0) as pool:
        pool.start("a", row, 7)
        begun = pool.wait(["a"])["a"].step
        assert begun and begun.messages[0]["content"] == "Write hello."
        pool.step("a", json.dumps(turn))
        ended = pool.wait(["a"])["a"]
        assert ended.step and ended.step.done and ended.step.reward == 1.0, ended
        pool.start("b", row, 7)
        assert pool.wait(["b"])["b"].step
        pool.step("b", None)  # it still waits for its answer
        ended = pool.wait(["b"])["b"]
        assert ended.step and ended.step.reward == 0.0, ended
        pool.end(["a", "b"])
