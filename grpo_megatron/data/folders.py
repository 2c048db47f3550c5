"""Task folders and SWE rows, `data.task: folders`: an instruction, an environment, and a verifier that gives the reward.

    Harbor          task.toml, instruction.md, environment/ (Dockerfile), tests/test.sh, which writes /logs/verifier/reward.txt
                    (a number) or reward.json ({"reward": 1, ...})
    Terminal-Bench  task.yaml (instruction), Dockerfile, run-tests.sh, tests/; exit code 0 is the reward 1, any other 0
    SWE             a row with problem_statement, an image, FAIL_TO_PASS, PASS_TO_PASS and test_patch; all tests pass: 1

A data file is a folder of task folders, or a table with a field "folder" or the fields of SWE. What would change a task and is
not done here is an error that names it: steps, services beside the main one, Windows, GPUs, variables of the host.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from grpo_megatron.untrusted import ReadError, parse_yaml, read_text, reason_of, shown

if TYPE_CHECKING:  # not at the start of each command of an agent's sandbox: it imports all of the config
    from grpo_megatron.data.rows import Question

MAX_TEXT = 1 << 20  # bytes of a file that is read here
CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\n", re.IGNORECASE)  # marks of benchmarks, at the beginning
HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"  # data/rows.py: TASK_FILES
REWARDS = "/logs/verifier"
MEMORY_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.IGNORECASE)
IMAGE_FIELDS = ("image_name", "docker_image")  # `image` is a picture (data/images.py)


@dataclass(frozen=True)
class FolderTask:
    """One task. `tests`: path in the sandbox -> file, folder or content, written after the agent has ended."""

    name: str
    instruction: str
    context: Path | None = None  # of the build
    dockerfile: Path | None = None
    image: str | None = None
    workdir: str | None = None  # None: that of the Dockerfile or the image
    variables: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 360.0
    verifier_timeout_s: float = 60.0
    cpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    network: bool = False  # the task wants one
    tests: Mapping[str, Path | bytes] = field(default_factory=dict)
    verifier: tuple[str, ...] = ()  # the command
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    writes_reward: bool = False  # to REWARDS; else the exit code says it
    is_shared: bool | None = None  # the verifier runs in the agent's sandbox; None: the task does not say
    artifacts: tuple[str, ...] = ()  # folders that a verifier in another sandbox needs, besides the working one


def read_row(row: dict[str, Any]) -> tuple[Question, str]:
    """Reads (instruction, ""). Raises ValueError for a row or folder that is wrong."""
    return task_of_row(row).instruction, ""


def task_of_row(row: Mapping[str, Any]) -> FolderTask:
    """Reads the task of a row. Raises ValueError."""
    from grpo_megatron.data.rows import missing_field, text_field

    if "folder" in row:
        return read_folder(Path(text_field(dict(row), "folder")))
    if "problem_statement" in row:
        return _swe(dict(row))
    raise missing_field(["folder", "problem_statement"], dict(row))


def read_folder(folder: Path) -> FolderTask:
    """Reads a task folder in one of the two formats. Raises ValueError that names the file and the remedy."""
    formats = [name for name in (HARBOR, TERMINAL_BENCH) if (folder / name).exists()]
    if len(formats) != 1:
        what = f"has both {HARBOR} (Harbor) and {TERMINAL_BENCH} (Terminal-Bench); remove one" if formats else ""
        there = "" if folder.is_dir() else "there is no such folder; "
        raise ValueError(
            f"task folder {folder}: {what or f'{there}it needs {HARBOR} (Harbor) or {TERMINAL_BENCH} (Terminal-Bench)'}"
        )
    try:
        return _harbor(folder) if formats == [HARBOR] else _terminal_bench(folder)
    except (OSError, ReadError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise ValueError(f"task folder {folder}: {formats[0]} cannot be read: {reason}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"task folder {folder}: {error}") from error


def _harbor(folder: Path) -> FolderTask:
    config = tomllib.loads(read_text(folder / HARBOR, MAX_TEXT))
    environment, verifier, agent = (_table(config, name) for name in ("environment", "verifier", "agent"))
    _refuse(config.get("steps"), "[[steps]]", "several steps")
    _refuse(environment.get("os", "linux").lower() != "linux", "environment.os", "another system than linux")
    for name in ("gpus", "tpu", "mcp_servers", "healthcheck"):
        _refuse(environment.get(name), f"environment.{name}", name.replace("_", " "))
    _refuse(
        verifier.get("environment") or verifier.get("collect"),
        "verifier.environment and verifier.collect",
        "another image for the verifier",
    )
    variables = {
        key: _plain_variables(table, key) for key, table in (("environment", environment), ("verifier", verifier))
    }
    if not (folder / "instruction.md").exists():
        raise ValueError("there is no instruction.md; write what the agent shall do into it")
    if not (folder / "tests/test.sh").exists():
        raise ValueError(f"there is no tests/test.sh, the verifier, which writes the reward to {REWARDS}/reward.txt")
    mode, network = environment.get("network_mode"), environment.get("allow_internet", False)
    _refuse(mode == "allowlist", "environment.network_mode=allowlist", "a list of hosts")
    artifacts = [one if isinstance(one, str) else one["source"] for one in config.get("artifacts", [])]
    shared = verifier.get("environment_mode")
    return FolderTask(
        name=str(_table(config, "task").get("name", folder.name)),
        instruction=_instruction(read_text(folder / "instruction.md", MAX_TEXT), "instruction.md"),
        context=folder / "environment",
        **_image(folder / "environment", environment.get("docker_image")),
        workdir=environment.get("workdir"),
        variables=variables["environment"],
        agent_timeout_s=float(agent.get("timeout_sec") or 600.0),
        verifier_timeout_s=float(verifier.get("timeout_sec") or 600.0),
        cpus=None if environment.get("cpus") is None else max(1, int(environment["cpus"])),
        memory_mib=_mib(environment, "memory"),
        disk_mib=_mib(environment, "storage"),
        network=mode == "public" or bool(network),
        tests={"/tests": folder / "tests"},
        verifier=("bash", "/tests/test.sh"),
        verifier_variables=variables["verifier"],
        writes_reward=True,
        is_shared=None if shared is None else shared == "shared",
        artifacts=tuple(str(PurePosixPath("/", one)) for one in artifacts),
    )


def _terminal_bench(folder: Path) -> FolderTask:
    config = parse_yaml(read_text(folder / TERMINAL_BENCH, MAX_TEXT))
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise ValueError(f"{TERMINAL_BENCH} has no text `instruction`")
    for name in ("run-tests.sh", "tests"):
        if not (folder / name).exists():
            raise ValueError(f"there is no {name}, the verifier")
    _refuse(config.get("run_tests_in_same_shell"), "run_tests_in_same_shell", "a verifier in the shell of the agent")
    return FolderTask(
        name=folder.name,
        instruction=_instruction(config["instruction"], TERMINAL_BENCH),
        context=folder,
        **_image(folder, None),
        agent_timeout_s=float(config.get("max_agent_timeout_sec", 360.0)),
        verifier_timeout_s=float(config.get("max_test_timeout_sec", 60.0)),
        tests={"/tests": folder / "tests", "/tests/run-tests.sh": folder / "run-tests.sh"},
        verifier=("bash", "/tests/run-tests.sh"),
        verifier_variables={"TEST_DIR": "/tests"},
    )


def _swe(row: dict[str, Any]) -> FolderTask:
    from grpo_megatron.data.rows import missing_field, text_field

    name = str(row.get("instance_id", "row"))
    image = next((str(row[key]) for key in IMAGE_FIELDS if row.get(key)), None)
    if image is None:
        raise missing_field(IMAGE_FIELDS, row)
    install = row.get("install_config")
    command = row.get("test_cmd") or (install.get("test_cmd") if isinstance(install, dict) else None)
    tests = [*_names(row, "FAIL_TO_PASS"), *_names(row, "PASS_TO_PASS")]
    if not tests:
        raise ValueError("FAIL_TO_PASS and PASS_TO_PASS name no test")
    if command is None and (other := [test for test in tests if ".py" not in test]):
        raise ValueError(
            f"{shown(other[0])} is no test of pytest; give the row a field test_cmd, which runs the tests named behind it"
        )
    patch = str(row.get("test_patch") or "")
    touched = sorted(set(re.findall(r"^\+\+\+ b/(.+)$", patch, re.MULTILINE)))
    base = str(row.get("base_commit") or "HEAD")
    lines = [
        f"git checkout -q {shlex.quote(base)} -- {shlex.quote(path)} 2>/dev/null || rm -f {shlex.quote(path)}"
        for path in touched
    ]
    lines += ["git apply --whitespace=nowarn /tests/test.patch || exit 90"] if patch.strip() else []
    commands = [command] if isinstance(command, str) else command or ["python -m pytest -q -p no:cacheprovider"]
    lines += [*map(str, commands[:-1]), f"{commands[-1]} {' '.join(map(shlex.quote, tests))}"]
    return FolderTask(
        name=name,
        instruction=_instruction(text_field(row, "problem_statement"), "problem_statement"),
        image=image,
        workdir=str(row.get("workdir") or "/testbed"),
        agent_timeout_s=float(row.get("agent_timeout_s") or 1800.0),
        verifier_timeout_s=float(row.get("verifier_timeout_s") or 600.0),
        tests={"/tests/test.sh": "\n".join(lines).encode(), "/tests/test.patch": patch.encode()},
        verifier=("bash", "/tests/test.sh"),
    )


def _names(row: Mapping[str, Any], key: str) -> list[str]:
    value = row.get(key) or []
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"field {key!r} is no list of names of tests")
    return value


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{name} is no table")
    return table


def _refuse(condition: object, key: str, what: str) -> None:
    if condition:
        raise ValueError(f"{key}: tasks with {what} are not supported; leave the folder out")


def _plain_variables(table: Mapping[str, Any], name: str) -> dict[str, str]:
    variables = {str(key): str(value) for key, value in table.get("env", {}).items()}
    if wanted := [key for key, value in variables.items() if "${" in value]:
        raise ValueError(f"{name}.env.{wanted[0]} wants a variable of the host, which no sandbox gets; write its value")
    return variables


def _instruction(text: str, where: str) -> str:
    while match := CANARY.match(text):
        text = text[match.end() :]
    if not text.strip():
        raise ValueError(f"{where} is empty")
    return text.strip()


def _image(folder: Path, image: Any) -> dict[str, Any]:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            compose = parse_yaml(read_text(folder / name, MAX_TEXT))
            services = [*((compose or {}).get("services") or {})]
            _refuse(len(services) > 1, f"{name} with {', '.join(services)}", "several services")
    dockerfile = folder / "Dockerfile"
    return {"image": image and str(image), "dockerfile": dockerfile if dockerfile.exists() else None}


def _mib(environment: Mapping[str, Any], name: str) -> int | None:
    """Reads memory_mb, or the older memory = "2G"."""
    if (value := environment.get(f"{name}_mb")) is not None:
        return int(value)
    if (text := environment.get(name)) is None:
        return None
    if (match := MEMORY_SIZE.fullmatch(str(text))) is None:
        raise ValueError(f"environment.{name}={text!r} is no size; write 512M or 2G")
    return max(1, int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()]))
