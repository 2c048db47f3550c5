"""Pools of judges, remote rewards, and their ledger: against stand-in servers, in this process and in workers."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.methods import budget_problems
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import BudgetConfig, TrainerConfig
from grpo_megatron.rewards import judge, services
from grpo_megatron.rewards.judge import judge_reward
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardItem, check_reward
from grpo_megatron.rewards.services import add_spending, exceeded, record_step, remote_reward, spent
from grpo_megatron.training.stopping import Stopped, Stopping
from tests.fakes import LoneMesh
from tests.rewards.waiting import QuietHandler, serving
from tests.runs import texts


class Service(QuietHandler):
    """A judge that gives 7 for 10 and 2 tokens, where the model is not "down"; and a reward: the length of each completion."""

    requests: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append((self.path, body))
        if self.path == "/score":
            texts = [sample["completion"] for sample in body["samples"]]
            others = {"four": {"score": 4, "level": 2.5}, "none": "busy"}
            results: Any = [others.get(text, len(text)) for text in texts]
            reply = {"results": results if "short" not in texts else [1]}
        else:
            if body["model"] in ("down", "busy"):
                self.send_error(401 if body["model"] == "down" else 503)
                return
            usage = {"usage": {"prompt_tokens": 10, "completion_tokens": 2}} if body["model"] != "free" else {}
            reply = {"choices": [{"message": {"content": "Score: 7"}}], **usage}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(Service) as address:
        yield address


@pytest.fixture
def options(server: str, tmp_path: Path) -> dict[str, Any]:
    Service.requests = []
    judge._verdicts.clear()
    (tmp_path / "judge.txt").write_text("{question} {response}")
    judges = [{"base_url": f"{server}/v1", "model": name, "price": [1.0, 50.0]} for name in ("one", "two")]
    return {"prompt": str(tmp_path / "judge.txt"), "judges": judges, "folder": str(tmp_path / "shared")}


def judged(text: str, options: dict[str, Any], **more: Any) -> dict[str, float]:
    judge._verdicts.clear()  # as in another process
    return asyncio.run(judge_reward(text, "42", **{"prompt_text": "1 + 1 =", **options, **more}))


def test_verdicts_on_disk_depend_on_all_that_matters(options: dict[str, Any], tmp_path: Path) -> None:
    first = judged("a", options)
    # 10 tokens at 1 and 2 at 50 per million: 110e-6
    assert first == {
        "score": 0.7,
        "verdict": 7,
        "attempts": 1,
        "cached": 0,
        "tokens": 12,
        "cost": pytest.approx(1.1e-4),
    }
    assert judged("a", options) == {"score": 0.7, "verdict": 7, "attempts": 0, "cached": 1, "tokens": 0, "cost": 0}
    renamed = [{**one, "model": f"{one['model']}-b"} for one in options["judges"]]
    moved = [{**one, "base_url": f"{one['base_url']}/"} for one in options["judges"]]
    (tmp_path / "other.txt").write_text("Please: {question} {response}")
    others: list[dict[str, Any]] = [
        {"judges": renamed},
        {"options": {"temperature": 1}},
        {"prompt": str(tmp_path / "other.txt")},
        {"prompt_text": "2 + 2 ="},
        {"pattern": r"(\d)"},
    ]
    for change in others:
        assert judged("a", {**options, **change})["cached"] == 0, change
    assert judged("b", options)["cached"] == 0
    assert judged("a", options, judges=moved)["cached"] == 1  # the same address
    assert spent(Path(options["folder"]))[0] == {"requests": 7, "tokens": 84, "cost": pytest.approx(7.7e-4)}
    for file in Path(options["folder"], "cache").rglob("*"):
        if file.is_file():
            file.write_text("{")  # as after a crash of the machine
    assert judged("a", options)["cached"] == 0


def test_a_new_version_of_the_program_asks_again(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judged("a", options)
    monkeypatch.setattr(services, "VERSION", services.VERSION + 1)
    assert judged("a", options)["cached"] == 0


def test_a_sample_has_its_judge_and_another_one_where_that_is_down(options: dict[str, Any]) -> None:
    texts = [f"text {number}" for number in range(20)]
    for text in texts:
        judged(text, options)
    chosen = [body["model"] for _, body in Service.requests]
    assert {*chosen} == {"one", "two"}
    half_down = [
        {**options["judges"][0], "base_url": options["judges"][0]["base_url"], "model": "down"},
        options["judges"][1],
    ]
    results = [judged(text, options, judges=half_down, folder=None) for text in texts]
    assert all(result["score"] == 0.7 for result in results)
    assert [body["model"] for _, body in Service.requests].count("down") == chosen.count("one")
    with pytest.raises(ConnectionError, match="HTTP status 401"):
        judged("x", options, judges=half_down[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "http://localhost/v1", "model": "m"}, "set base_url and model, or judges"),
        ({"judges": []}, "set base_url and model, or judges"),
        (
            {"judges": [{"base_url": "http://localhost/v1", "model": "m", "rpm": 3}]},
            "judges has the key 'rpm'; known are",
        ),
        ({"rate": 5, "folder": None}, "requests_per_minute=5 must be above 0, and needs `folder`"),
        ({"name": "free"}, "the judge's reply has no usage"),
    ],
)
def test_wrong_pools_are_named(options: dict[str, Any], change: dict[str, Any], message: str) -> None:
    changed = {**options, **change}
    rate, name = changed.pop("rate", None), changed.pop("name", None)
    if rate or name:
        changed["judges"] = [{**options["judges"][0], "requests_per_minute": rate, "model": name or "one"}]
    with pytest.raises(ValueError, match=message):
        judged("a", changed)


def test_rates_are_kept(options: dict[str, Any]) -> None:
    limited = [{**options["judges"][0], "requests_per_minute": 600}]  # one per 0.1 s
    start = time.monotonic()
    for number in range(4):
        judged(f"{number}", options, judges=limited)
    assert time.monotonic() - start > 0.29
    with pytest.raises(TimeoutError, match=r"takes the next request in .* s \(requests_per_minute=1\)"):
        for number in range(2):
            judged(f"slow {number}", options, judges=[{**limited[0], "requests_per_minute": 1}], timeout_s=2)


def test_retries_wait_for_their_slots(options: dict[str, Any]) -> None:
    """3 attempts of one sample at one per 0.4 s: 0.8 s, where the pauses alone are 0.3 s. The next sample waits, too."""
    busy = [{**options["judges"][0], "model": "busy", "requests_per_minute": 150}]
    start = time.time()
    with pytest.raises(ConnectionError, match="after 3 attempts: HTTP status 503"):
        judged("a", options, judges=busy, retries=2)
    assert len(Service.requests) == 3 and time.time() - start > 0.75
    content = json.loads(Path(options["folder"], "ledger.json").read_text())
    assert max(content["next"].values()) - start > 1.15


def test_a_wrong_name_of_a_column_is_found_before_the_run() -> None:
    kwargs = {"url": "http://localhost/score", "columns": ["levle"]}
    check_reward("remote", kwargs)  # no row is known
    with pytest.raises(ValueError, match="columns has 'levle', and the row has question, level; correct it"):
        check_reward("remote", kwargs, {"question": "q", "level": None})


def _spend(folder: str) -> None:
    for _ in range(25):
        add_spending(folder, 1, 10, 0.5)


def test_the_ledger_of_several_processes_loses_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_spend, args=(str(tmp_path),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert spent(tmp_path)[0] == {"requests": 100, "tokens": 1000, "cost": 50.0}


def test_a_remote_reward_gets_batches_and_each_sample_once(server: str, tmp_path: Path) -> None:
    Service.requests = []
    kwargs = {"url": f"{server}/score", "columns": ["level"], "folder": str(tmp_path), "timeout_s": 60}
    texts = ["four", "fives", "a", "four"]
    with RewardPool(1, 300.0, kwargs) as pool:
        once = pool.grade([("remote", text, "42", "1 + 1 =") for text in texts])
        again = pool.grade([("remote", text, "42", "1 + 1 =") for text in texts])
    assert [result.reward for result in once] == [4, 5, 1, 4] == [result.reward for result in again]
    assert once[0].metrics == {"level": 2.5, "cached": 0.0} and again[0].metrics["cached"] == 1.0
    sent = [sample["completion"] for _, body in Service.requests for sample in body["samples"]]
    assert sorted(sent) == ["a", "fives", "four"]
    assert Service.requests[0][1]["samples"][0] == {
        "completion": "four",
        "answer": "42",
        "prompt": "1 + 1 =",
        "columns": {},
    }
    with pytest.raises(ValueError, match=r'is no \{"results": \[2 rewards\]\}: b\'\{"results": \[1\]\}\''):
        asyncio.run(remote_reward(["short", "b"], ["", ""], ["", ""], url=kwargs["url"]))


def test_a_run_stops_before_a_step_that_could_exceed_its_budget(tmp_path: Path) -> None:
    """Steps of 3 of 10: after the third, 9 + 3 > 10. An earlier run with the same folder has spent nothing of it."""
    folder, saved = tmp_path / "ledger", list[int]()
    budget = BudgetConfig(folder=folder, cost=10.0, tokens=1000)
    config = TrainerConfig(output_dir=tmp_path, total_training_steps=5)

    def save(steps: int) -> Path:
        saved.append(steps)
        return tmp_path / "step"

    stopping = Stopping(config, LoneMesh(), budget=budget)
    with pytest.raises(Stopped, match="stopped by reward.budget after 3 steps") as stopped:
        for step in range(5):
            add_spending(str(folder), 1, 7, 3.0)
            stopping.after(step + 1, save)
    assert (stopped.value.exit_code, saved) == (75, [3])
    assert json.loads((tmp_path / "outcome.json").read_text())["state"] == "stopped"
    assert exceeded(folder, budget.limits) == "9 cost so far + up to 3 per step, of 10"
    assert exceeded(folder, {"cost": 12.0, "tokens": 28}) == ""
    record_step(folder, {"requests": 3, "tokens": 0, "cost": 9.0})  # a step of 21 tokens
    assert exceeded(folder, {"cost": 12.0, "tokens": 28}) == "21 tokens so far + up to 21 per step, of 28"
    stopping = Stopping(config, LoneMesh(), budget=budget)
    stopping.after(5, save)  # the last step: nothing is to follow


def test_what_is_wrong_is_not_kept(options: dict[str, Any], server: str, tmp_path: Path) -> None:
    """A verdict outside of another run's range, and a result that is no reward, are asked for again."""
    assert judged("a", options)["verdict"] == 7
    with pytest.raises(ValueError, match="verdict 7 is not between 0 and 5"):
        judged("a", options, high=5.0)
    Service.requests = []
    for asked in (1, 2):
        kwargs = {"url": f"{server}/score", "folder": str(tmp_path / "remote")}
        results = asyncio.run(remote_reward(["none", "b"], ["", ""], ["", ""], **kwargs))
        assert results[1]["score"] == 1 and results[0]["score"] == "busy"
        assert len(Service.requests) == asked


def test_columns_of_some_samples_reach_their_service(server: str, tmp_path: Path) -> None:
    Service.requests = []
    items = [RewardItem("remote", text, "42", columns=columns) for text, columns in (("a", {"level": 3}), ("b", {}))]
    with RewardPool(1, 300.0, {"url": f"{server}/score", "columns": ["level"], "timeout_s": 60}) as pool:
        pool.grade(items)
    ((_, body),) = Service.requests
    sent = {sample["completion"]: sample["columns"] for sample in body["samples"]}
    assert sent == {"a": {"level": 3}, "b": {}}  # in one request


@pytest.mark.parametrize(
    ("judge_kwargs", "message"),
    [
        ("folder: FOLDER, judges: [{base_url: u, model: m, price: [1, 2]}]", None),
        ("folder: other, judges: [{base_url: u, model: m, price: [1, 2]}]", "no judge has this folder"),
        ("judges: [{base_url: u, model: m, price: [1, 2]}]", "no judge has this folder"),
        (
            "folder: FOLDER, judges: [{base_url: u, model: m}]",
            "reward.budget.cost=5: no judge of this folder has a price",
        ),
    ],
)
def test_a_budget_that_counts_nothing_is_refused(tmp_path: Path, judge_kwargs: str, message: str | None) -> None:
    folder, config = str(tmp_path / "shared"), tmp_path / "run.yaml"
    config.write_text("model: {path: m}\ndata: {task: arithmetic}\ntrainer: {total_training_steps: 9}\n")
    kwargs = f"reward.kwargs={{prompt: p, {judge_kwargs.replace('FOLDER', folder)}}}"
    budget = f"reward.budget={{folder: {folder}, cost: 5}}"
    problems = texts(budget_problems(load_config(config, ["reward.function=judge", kwargs, budget])))
    only_folder = load_config(config, ["reward.function=mine:score", f"reward.budget.folder={folder}"])
    assert "limits nothing; set reward.budget.cost or reward.budget.tokens" in texts(budget_problems(only_folder))[0]
    assert len(problems) == (message is not None) and (message or "") in "".join(problems)
    assert not [*budget_problems(load_config(config, ["reward.function=mine:score", budget]))]
