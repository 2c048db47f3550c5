"""A teacher behind a server in a world of ranks: one rank of a replica asks, and rows without a score leave the loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError
from grpo_megatron.rewards.teacher_server import PROBES, TeacherServer
from grpo_megatron.training.remote_teacher import RemoteTeacher, without_failed
from grpo_megatron.types import TeacherScores
from tests import tiny
from tests.algo.tables import make_table
from tests.models.policies import LAYOUTS, Layout, share, world
from tests.rewards.test_teacher_server import LOGPROBS, REFUSED, Stub
from tests.rewards.waiting import QuietHandler, serving
from tests.runs import SIZES, write_rows
from tests.tiny import make_model
from tests.training.test_teachers import large, make_teachers, steps
from tests.worlds import ranks

PAIRS = [([1], [2, 3, 4]), ([REFUSED], [5, 6]), ([7, 8], [9]), ([3], [0, 1])]  # the server refuses the second


@pytest.fixture
def address() -> Iterator[str]:
    Stub.requests = []
    with serving(Stub) as address:
        yield f"{address}/v1"


@ranks()
def scored(address: str, layout: Layout, max_failed_ratio: float) -> Any:
    _, mesh = world(layout)
    rows = share(len(PAIRS), mesh.dp_rank, mesh.dp)
    batch = tiny.make_batch(PAIRS, [[list(range(len(rows)))]], rows)
    batch.rows = rows
    teacher = RemoteTeacher(TeacherServer("math", address, "m", num_ids=20, retries=0), mesh, max_failed_ratio)
    try:
        logprobs, top = teacher.distribution(batch, 2, 20)
    except RuntimeError as error:
        return str(error)
    batch.teacher = TeacherScores([0] * len(rows), batch.token_weights, logprobs, top=top)
    table, metrics = make_table([[1.0, 0.0], [1.0, 0.0]], [[3, 2], [1, 2]]), mock.Mock()
    table = without_failed(batch, table, mesh, metrics)
    of_rows = batch.teacher.logprobs.tolist(), batch.teacher.index, batch.loss_mask.tolist()
    ids = [None if part is None else part[:, :2].tolist() for part in top]
    return (
        dict(zip(rows, zip(*of_rows, strict=True), strict=True)),
        ids,
        table.num_kept_tokens,
        tuple(metrics.constant.call_args.args),
    )


@pytest.mark.parametrize("layout", ["DP2", "TP2xPP2+SP"])
def test_a_row_without_a_score_leaves_the_loss(address: str, layout: str) -> None:
    results = scored(LAYOUTS[layout].world, address=address, layout=LAYOUTS[layout], max_failed_ratio=0.3)
    assert len(Stub.requests) == len(PAIRS)
    for rank, (rows, ids, kept, metric) in enumerate(results):
        for row, (logprobs, index, mask) in rows.items():
            response, is_scored = PAIRS[row][1], row != 1
            want = [LOGPROBS[token] for token in response] if is_scored else [0.0] * len(response)
            assert logprobs[: len(response)] == pytest.approx(want)
            assert index == (0 if is_scored else -1) and sum(mask) == (len(response) if is_scored else 0)
        is_last = layout == "DP2" or rank >= 2
        assert ids == [[[0, 1]] * len(PAIRS[row][1]) if row != 1 else None for row in rows] if is_last else ids == []
        assert kept == [3, 0, 1, 2] and metric == ("distillation/failed_ratio", 0.25)


class Served(QuietHandler):
    """The replies of vLLM for a model that transformers computes."""

    model: Any
    lengths: list[int]  # of the requests

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, entries = body["prompt"], list[Any]([None])
        type(self).lengths.append(len(ids))
        with torch.no_grad():
            logp = type(self).model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for token, row in zip(ids[1:], logp, strict=False):
            best = {*row.topk(body["prompt_logprobs"]).indices.tolist(), token}
            entries.append({str(one): {"logprob": row[one].item()} for one in best})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"prompt_logprobs": entries}]}).encode())


def test_a_run_learns_from_a_server_as_from_its_folder(tmp_path: Path) -> None:
    """Sampled and best tokens, beside rewards or without, also with a prompt of its own; the check asks the server, too.

    Each response is sent once, when it is complete: before the step's rewards and batch are made.
    """
    make_teachers(tmp_path)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{n} + 1 =", "hint": f"{n} + 1 = {n + 1} ."} for n in range(9)])
    make_model(tmp_path / "large", "mistral", seed=3, **SIZES)  # a server's ids of padding leave fewer than k
    Served.model, Served.lengths = AutoModelForCausalLM.from_pretrained(tmp_path / "large"), []
    with serving(Served) as address:
        local = [*large(tmp_path), "rollout.temperature=1.0", "algorithm.adv_estimator=zero"]
        remote = [*local[1:], f"teachers.t.url={address}/v1", "teachers.t.model=large"]
        modes = [], ["distillation.kl=reverse", "distillation.top_k=8", "teachers.t.prompt_column=hint"]
        cases = [[*teacher, *mode] for mode in modes for teacher in (local, remote)]
        results = steps(2, folder=tmp_path, cases=cases)
    assert sum(length < PROBES for length in Served.lengths) == 2 * 12
    for rank in results:
        for one, other in zip(rank[::2], rank[1::2], strict=True):
            assert one["pairs"] == other["pairs"] and (one["num_sent"], other["num_sent"]) == (0, 6)
            given, want = other["batch"].teacher, one["batch"].teacher
            torch.testing.assert_close(given.logprobs, want.logprobs, rtol=0, atol=2e-5)
            assert torch.equal(given.weights, want.weights) and bool(want.weights.any())
            for part, expected in zip(given.top, want.top, strict=True):
                torch.testing.assert_close(part, expected, rtol=0, atol=1e-4)
            for (name, number), (_, expected) in zip(
                *(sorted(r["metrics"][0].items()) for r in (other, one)), strict=True
            ):
                assert number == pytest.approx(expected, abs=1e-4), name


def test_a_server_without_the_model_is_named_before_the_run(tmp_path: Path, address: str) -> None:
    make_teachers(tmp_path)
    settings = [f"teachers.t.url={address}", "teachers.t.model=unknown", "algorithm.adv_estimator=zero"]
    config = load_config(tmp_path / "run.yaml", [*settings, "rollout.engine=transformers", "actor.use_kl_loss=false"])
    with pytest.raises(ConfigError, match=r"teachers\.t \(model 'unknown' at http.*HTTP status 404"):
        validate(config, 2, rehearsed=True)
    validate(config, 2, rehearsed=True, dry_run=True, elsewhere=True)  # a plan for other machines, which may reach it


def test_too_many_failures_stop_the_run(address: str) -> None:
    for message in scored(2, address=address, layout=LAYOUTS["DP2"], max_failed_ratio=0.2):
        assert "1 of 4 responses (25 %) have no score, more than reward.max_failed_ratio=0.2 allows" in message
        assert "the first failure: teachers.math (model 'm' at http://127.0.0.1" in message and "status 400" in message
