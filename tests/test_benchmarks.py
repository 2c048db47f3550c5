"""The hour on a GPU: it resumes, says what was not run, and runs here in toy sizes. The other benchmarks run at all."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import ranks
from tools.benchmarks import hour
from tools.benchmarks.hour import Case, NotRun

ROOT = Path(__file__).parents[1]


def test_the_hour_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured case stays; a failure, an absence and what time was short for are tried again; another device starts anew."""
    monkeypatch.setenv("GRPO_GPU_TESTS_ON", "cpu")
    calls, is_broken = [], True

    def good(folder: Path) -> dict[str, float]:
        calls.append("good")
        return {"tok/s": 11900.0}

    def broken(folder: Path) -> dict[str, float]:
        calls.append("broken")
        if is_broken:
            raise RuntimeError("first line\nout of memory")
        return {"s": 2.0}

    def refused(folder: Path) -> dict[str, float]:
        raise NotRun("this needs FP8")

    cases = [
        Case("good", good, published="11,900 tok/s", is_rank=False),
        Case("broken", broken, is_rank=False),
        Case("refused", refused, is_rank=False),
        Case("absent", good, needs=("no_such_package",), is_rank=False),
    ]
    monkeypatch.setattr(hour, "PARTS", {"a": ("first", cases), "b": ("second", [Case("good", good, is_rank=False)])})

    def run(parts: str = "ab", minutes: float = 50.0) -> tuple[int, dict[str, str], str]:
        code = hour.hour(argparse.Namespace(folder=tmp_path, work=None, parts=parts, minutes=minutes))
        cases = json.loads((tmp_path / "a.json").read_text())["cases"]
        return code, {name: case["state"] for name, case in cases.items()}, (tmp_path / "hour.md").read_text()

    assert run("a", minutes=-1) == (0, dict.fromkeys(("good", "broken", "refused", "absent"), "not run"), run("", 1)[2])
    code, states, page = run("a")
    assert (code, states) == (1, {"good": "measured", "broken": "failed", "refused": "not run", "absent": "not run"})
    assert calls == ["good", "broken"]
    for line in (
        "| good | tok/s 11,900 | 11,900 tok/s | 0.0 |",
        "| broken | failed: out of memory |",
        "| refused | not run: this needs FP8 |",
        "| absent | not run: no_such_package is not installed |",
        "## b. second",
        "| good | not run: not reached yet |  |  |",
    ):
        assert line in page
    is_broken = False
    assert run()[:2] == (0, {"good": "measured", "broken": "measured", "refused": "not run", "absent": "not run"})
    assert calls == ["good", "broken", "broken", "good"]
    monkeypatch.setattr(hour, "device", lambda: "another GPU")
    assert run()[0] == 0 and calls[4:] == ["good", "broken", "good"]


@ranks(1)
def toys(folder: Path) -> list[dict[str, float]]:
    """The trainer alone, in toy sizes."""
    os.environ["GRPO_GPU_TESTS_ON"] = "cpu"
    chosen = hour.PARTS["a"][1][:1]
    return [case.function(folder, **case.arguments) for case in chosen]


def test_cases_of_the_hour_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first; make soak has all. The arguments of the others fit their functions. An unknown part is refused."""
    hour.add_arguments(parser := argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--parts", "ax"])
    assert "no part x: the parts are abcdefg" in capsys.readouterr().err
    for _, cases in hour.PARTS.values():
        for case in cases:
            inspect.signature(case.function).bind(tmp_path, **case.arguments)
    [[trained]] = toys(folder=tmp_path)
    assert trained["tok/s"] > 0


@pytest.mark.soak
def test_the_hour_runs_here_in_toy_sizes(tmp_path: Path) -> None:
    """Every case that a CPU can run. What it cannot: TRL, Transformer Engine, batch invariance, and the same toy twice."""
    command = [sys.executable, "-m", "tools.benchmarks", "hour", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for part, (_, cases) in hour.PARTS.items():
        results = json.loads((tmp_path / f"{part}.json").read_text())["cases"]
        assert list(results) == [case.name for case in cases]
        for case in cases:
            is_here = not case.needs and not case.same_toy_as
            assert results[case.name]["state"] == ("measured" if is_here else "not run"), results[case.name]
    (curve,) = json.loads((tmp_path / "g.json").read_text())["cases"].values()
    assert (
        list(curve["figures"]["accuracy by step"]) == ["0", "1", "2"] and len(curve["figures"]["reward by step"]) == 2
    )


TOYS = """
passes --workload 0.4_M --repeats 1
head --hidden 64 --vocabulary 500
saving --steps 1 --repeats 1
saving --ranks 1 --repeats 1
overlap --milliseconds 1 --prompts 4 --repeats 1
waiting --steps 1
roles --steps 1
routes --steps 2
lora --workload 0.4M --rank 8 --steps 2 --rounds 1
sync --preset llama-70b
scale --ranks 64 --samples 1024
mirror --workload 0.4M --steps 1 --repeats 1
start --ranks 1 --engine transformers --repeats 1
convert --gigabytes 0.05 --repeats 1
rollout --workload 0.4M --repeats 1
update --workload 0.4M --repeats 1
transformers --workload 0.4M --repeats 1
exact --workload 0.4M --repeats 1
distill --workload 0.4M --repeats 1
service --workload 0.4M --repeats 1
"""


@pytest.mark.soak
@pytest.mark.parametrize("command", TOYS.strip().splitlines())
def test_a_benchmark_runs(command: str) -> None:
    words = [word.replace("_", " ") for word in command.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.benchmarks", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
