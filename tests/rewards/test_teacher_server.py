"""A teacher behind a server: a stub with vLLM's replies for scores and failures, and, in `make soak`, `vllm serve` itself.

The stub's log-probability of token t is -t / 8 in every place, so that e^0 + ... is above 1; it numbers 20 tokens.
"""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.rewards.teacher_server import TAIL, ServerError, ServerScores, TeacherServer
from tests import tiny
from tests.evaluation.serving import served
from tests.rewards.waiting import QuietHandler, serving
from tests.runs import write_tokenizer

LOGPROBS = [-2.0 - token / 8 for token in range(20)]
REFUSED = 19  # a prompt that begins with this token
PROBLEMS: dict[str, Any] = {
    "not-json": b"<html>",
    "no-scores": {"choices": [{"text": "x"}]},
    "too-few": {"choices": [{"prompt_logprobs": [None]}]},
    "nan": {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": math.nan}}, {"6": {"logprob": -1}}]}]},
    "other-token": {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1}}, {"6": {"logprob": -1}}]}]},
}


class Stub(QuietHandler):
    """Replies as vLLM does, or with the problem that the model's name asks for."""

    requests: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and (body["temperature"], body["max_tokens"]) == (1.0, 1)
        type(self).requests.append(body)
        model, count = body["model"], sum(request == body for request in type(self).requests)
        status = {"busy": 503 if count < 3 else 200, "down": 500, "unknown": 404}.get(model, 200)
        status = 400 if body["prompt"][0] == REFUSED else status
        entries: list[Any] = [None]
        for token in body["prompt"][1:] if status == 200 else ():
            kept = {*sorted(range(20), key=lambda t: -LOGPROBS[t])[: body["prompt_logprobs"]], token}
            texts = {t: {"logprob": LOGPROBS[t], "rank": t + 1, "decoded_token": f" w{t}"} for t in kept}
            entries.append({str(t): entry for t, entry in texts.items()})
        reply = PROBLEMS.get(model, {"choices": [{"prompt_logprobs": entries}]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(Stub) as address:
        yield f"{address}/v1"


def teacher(address: str, model: str = "m", num_ids: int = 20, **options: Any) -> TeacherServer:
    Stub.requests = []
    return TeacherServer("math", address, model, num_ids=num_ids, **{"retries": 2, "timeout_s": 60.0, **options})


def test_scores_of_responses(address: str) -> None:
    """Ids from 3 on are not the policy's: 3 ids are fewer than k; the response's token 7 is then not among the best."""
    rows = [([1, 2], [7, 1]), ([3], [0])]
    first, second = teacher(address, "busy", num_ids=3).score(rows, 4)
    assert isinstance(first, ServerScores) and isinstance(second, ServerScores)
    assert [*first.logprobs] == [LOGPROBS[7], LOGPROBS[1]] and [*second.logprobs] == [LOGPROBS[0]]
    tail = math.log(1 - sum(math.exp(LOGPROBS[token]) for token in range(3)))
    assert [*first.top] == [0, 1, 2, -1, *LOGPROBS[:3], -math.inf, pytest.approx(tail)] * 2
    [plain] = teacher(address).score(rows[:1], 0)
    assert plain == (first.logprobs, array("f"))


def test_a_tail_without_digits_is_bounded(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rewards.test_teacher_server.LOGPROBS", [0.0, *[-9.0 - t for t in range(19)]])
    [scores] = teacher(address).score([([1], [0, 5])], 1)
    assert isinstance(scores, ServerScores)
    assert [*scores.top[2::3]] == pytest.approx([math.log(TAIL), -13.0])


@pytest.mark.parametrize(
    ("model", "says", "attempts"),
    [
        ("down", r"after 3 attempts: HTTP status 500", 3),
        ("unknown", r"after 1 attempts: HTTP status 404", 1),
        ("not-json", r"log-probabilities of 0 of 3 tokens; it begins with b'<html>'.*vllm serve", 1),
        ("no-scores", r"log-probabilities of 0 of 3 tokens", 1),
        ("too-few", r"log-probabilities of 1 of 3 tokens", 1),
        ("nan", r"no number below 0", 1),
        ("other-token", r"no log-probability of token 5, number 0", 1),
    ],
)
def test_a_failure_is_that_of_its_row_and_names_the_teacher(address: str, model: str, says: str, attempts: int) -> None:
    """It is never a score of 0."""
    [problem] = teacher(address, model).score([([1], [5, 6])], 0)
    assert isinstance(problem, ServerError)
    with pytest.raises(ServerError, match=rf"teachers\.math \(model '{model}' at http://127.*/completions\).*{says}"):
        raise problem
    assert len(Stub.requests) == attempts


def test_the_check_compares_tokens(address: str) -> None:
    teacher(address).check(4, lambda token: f"w{token}")
    teacher(address).check(4, lambda token: f"<{token}>")  # special tokens and bytes have other forms
    with pytest.raises(ServerError, match=r"token 2 is ' w2' there and 'w3' in the policy's tokenizer"):
        teacher(address).check(4, lambda token: f"w{token + (token > 1)}")


@pytest.mark.soak
def test_vllm_serve(tmp_path: Path) -> None:
    """Against transformers in float64; a tail of 2e-4 is exact to float32's digits of 1."""
    from transformers import AutoModelForCausalLM

    folder = tiny.make_model(tmp_path / "model", "qwen2")
    write_tokenizer(folder, [f"w{i}" for i in range(101)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = tiny.make_sequences(4)
    line = (
        f"vllm serve {folder} --served-model-name m --dtype float32 --max-model-len 64 --enforce-eager --max-logprobs 8"
    )
    with (
        contextlib.ExitStack() as resources,
        served(line, tmp_path, tmp_path / "log") as client,
    ):

        class Relay(QuietHandler):
            """The server listens on a Unix socket."""

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                answer = client.post(self.path, content=content, headers={"Content-Type": "application/json"})
                self.send_response(answer.status_code)
                self.end_headers()
                self.wfile.write(answer.content)

        address = resources.enter_context(serving(Relay))
        server = TeacherServer("math", f"{address}/v1", "m", num_ids=101)
        server.check(8, lambda token: f"w{token}")
        results = server.score([*rows, ([1] * 60, [2] * 60)], 8)
    for (prompt, response), scores in zip(rows, results, strict=False):
        with torch.no_grad():
            logp = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        best, want = logp.topk(8), logp.gather(1, torch.tensor(response)[:, None]).squeeze(1)
        assert isinstance(scores, ServerScores)
        top = torch.tensor(scores.top, dtype=torch.float64).view(-1, 17)
        torch.testing.assert_close(torch.tensor(scores.logprobs, dtype=torch.float64), want, rtol=0, atol=1e-5)
        assert torch.equal(top[:, :8].long(), best.indices)
        torch.testing.assert_close(top[:, 8:16], best.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(top[:, 16].exp(), 1 - best.values.exp().sum(1), rtol=0, atol=1e-5)
    assert isinstance(results[-1], ServerError) and "context length" in str(results[-1])
