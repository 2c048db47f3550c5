"""A stand-in for the program `docker`, for machines without a daemon: images are folders, containers are local sandboxes.

`python fake_docker.py STATE ARGUMENTS...` understands the calls of sandboxes/containers.py and no other.
STATE/log has them. With STATE/down there is no daemon.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def sandbox(**task: Any) -> Any:
    """Makes a local sandbox. Most calls need none, and start faster without the import."""
    from grpo_megatron.data.folders import FolderTask
    from grpo_megatron.environments.sandboxes.backend import SandboxLimits
    from grpo_megatron.environments.sandboxes.local import LocalSandbox

    return LocalSandbox(FolderTask("fake", "", **task), SandboxLimits())


def fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(1)


def main() -> None:
    state, arguments = Path(sys.argv[1]), sys.argv[2:]
    with (state / "log").open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    if (state / "down").exists():
        fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
    parser = argparse.ArgumentParser()
    for name in (
        "--format",
        "--filter",
        "-t",
        "-f",
        "--label",
        "--entrypoint",
        "-w",
        "--name",
        "--cpus",
        "--memory",
        "--memory-swap",
    ):
        parser.add_argument(name)
    for name in ("--pids-limit", "--network", "--security-opt", "--cap-drop"):
        parser.add_argument(name)
    parser.add_argument("--ulimit", action="append")
    for name in ("-q", "-d", "-a", "-i", "--init", "--no-trunc", "--size", "-v"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--cap-add", action="append")
    parser.add_argument("-e", action="append", default=[])
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    word = arguments[0] if arguments[0] != "image" else "image inspect"
    words = arguments[2 if word == "image inspect" else 1 :]
    if word == "image inspect":  # its name stands before the options
        words = [*words[1:], words[0]]
    if word in ("rm", "restart"):
        words = words[-1:]
    given = parser.parse_args(words)
    handlers[word](state, given, given.rest)


def image_inspect(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    if not (state / "images" / rest[0].replace("/", "_")).exists():
        fail(f"Error response from daemon: No such image: {rest[0]}")
    print("sha256:1")


def pull(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    fail(f"Error response from daemon: pull access denied for {rest[0]}, repository does not exist")


def build(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    shutil.copytree(rest[0], state / "images" / given.t.replace("/", "_"))


def run(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    image = state / "images" / rest[0].replace("/", "_")
    one = sandbox(context=image, dockerfile=image / "Dockerfile")
    one.start()
    number = given.name
    (state / "containers" / number).write_text(json.dumps({"state": one.state(), "label": given.label}))
    print("a long number", flush=True)
    os._exit(0)  # the folder stays


def read(state: Path, number: str) -> dict[str, object]:
    if not (state / "containers" / number).exists():
        fail(f"Error response from daemon: No such container: {number}")
    return json.loads((state / "containers" / number).read_text())  # type: ignore[no-any-return]


def inspect(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    container = read(state, rest[-1])
    folder = Path(container["state"]["private"])  # type: ignore[index]
    if "Labels" in given.format:
        print(str(container["label"]).partition("=")[2])
    elif "SizeRw" in given.format:
        print(sum(512 * path.lstat().st_blocks for path in (folder / "files").rglob("*")))
    else:
        print(container["state"]["folder"] if "WorkingDir" in given.format else rest[-1])  # type: ignore[index]


def execute(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    number, *command = rest
    one = sandbox()
    one.attach(read(state, number)["state"])  # type: ignore[arg-type]
    one.folder = given.w
    variables = dict(pair.split("=", 1) for pair in given.e)
    one._make_folder("/tests")
    result = one.run(command, 999.0, stdin=sys.stdin.buffer.read(), variables=variables, max_output=1 << 26)
    sys.stdout.buffer.write(result.output)
    sys.stdout.flush()
    os._exit(result.exit_code)


def restart(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    read(state, rest[-1])


def remove(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    container = read(state, rest[-1])
    shutil.rmtree(container["state"]["private"])  # type: ignore[index]
    (state / "containers" / rest[-1]).unlink()


def ps(state: Path, given: argparse.Namespace, rest: list[str]) -> None:
    for path in (state / "containers").iterdir():
        print(path.name)


handlers = {
    "info": lambda *_: print("ID"),
    "image inspect": image_inspect,
    "pull": pull,
    "build": build,
    "run": run,
    "inspect": inspect,
    "exec": execute,
    "restart": restart,
    "rm": remove,
    "ps": ps,
}

if __name__ == "__main__":
    main()
