"""An evaluation from end to end: sampling on the real engine, killed and continued, on one rank and on two; the command.

The model is random, so no completion is right. The tests show that every way of sampling gives the same samples, that
they are the model's own, and that the command grades and reports them. Right and wrong completions come from ledgers that
the tests write.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from grpo_megatron.cli.main import main
from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import parse
from grpo_megatron.convert import ConvertError, to_megatron
from grpo_megatron.environments import programs
from grpo_megatron.evaluation import grading
from grpo_megatron.evaluation.ask import WEIGHTS_VERSION, Asker, engine_dtype, open_model, stream_weights
from grpo_megatron.evaluation.evaluate import complete_ledger, evaluate, ledger_entry
from grpo_megatron.evaluation.generate import generate
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry, claim_output, write_identity
from grpo_megatron.evaluation.options import EvaluateOptions, GenerateOptions
from grpo_megatron.evaluation.settings import EvaluationSettings, prepare
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine import Request, StopTexts
from grpo_megatron.types import Sample
from tests.evaluation.models import gsm8k_rows, make_folder
from tests.runs import write_rows
from tests.worlds import run as run_ranks

# -- the ranks of a world: all samples are sampled, once whole and once with an interruption -----------------------------

SETTINGS: dict[str, Any] = {"tasks": ["gsm8k", "math"], "samples": 3, "max_tokens": 12, "temperature": 1.0}


def options(model: Path, data: Path, output: Path) -> EvaluateOptions:
    return EvaluateOptions(model=model, data=data, output=output, device="cpu", batch_size=9, **SETTINGS)


class Killed(Exception):
    pass


def draw_all(model: Path, data: Path, output: Path, interrupted: Path | None) -> dict[str, Any]:
    """Sample into `output`; with `interrupted`, also into that folder: killed while writing the second batch, then continued.

    Returns how often the engine generated in each, and the tokens of a greedy completion.
    """
    settings = prepare(options(model, data, output))
    asker = Asker(settings.model, settings.max_model_len)
    engine, mesh = asker.engine, asker.mesh
    assert asker.capacity == 256  # on the CPU, where the options name none
    facts: dict[str, Any] = {"calls": []}

    def draw(target: Path) -> None:
        again = prepare(options(model, data, target))
        if mesh.rank == 0:
            with claim_output(target):
                write_identity(target, again.identity())
        mesh.barrier()
        with mock.patch.object(engine, "stream", wraps=engine.stream) as stream:
            try:
                for one in again.runs:
                    complete_ledger(again, one, asker)
            finally:
                facts["calls"].append(stream.call_count)

    draw(output)
    if interrupted is not None:
        append = Ledger.append

        def torn(self: Ledger, block: int, rows: list[LedgerEntry]) -> None:
            append(self, block, rows)
            file = self.folder / f"block_{block:04d}.jsonl"
            if file.read_bytes().count(b"\n") > 9:  # in the second batch: keep half of it
                file.write_bytes(file.read_bytes()[:-500])
                raise Killed

        with mock.patch.object(Ledger, "append", torn):
            try:
                draw(interrupted)
            except Killed:
                facts["torn"] = True
        draw(interrupted)
        draw(interrupted)
    prompt = settings.runs[0].prompts.prompts[0]
    facts["greedy"] = engine.generate([Request(prompt.prompt_ids, 0, 12, temperature=0.0)], WEIGHTS_VERSION)[
        0
    ].response_ids
    facts["stops"] = stops_draw_less(settings, engine)
    asker.close()
    return facts


def generate_over_ranks(argv: list[str]) -> None:
    """The command `generate` on each rank of a world."""
    assert generate(parse(GenerateOptions, argv), None) == 0


def stops_draw_less(settings: EvaluationSettings, engine: Any) -> tuple[list[LedgerEntry], list[LedgerEntry], int, int]:
    """Entries of one task whose engine knows no stop text, the same when it does, and the tokens that each has sampled."""
    prompts = settings.runs[0].prompts.prompts

    def draw(stop: StopTexts | None) -> list[Sample]:
        requests = [Request(one.prompt_ids, n, 12, temperature=1.0, stop=stop) for n, one in enumerate(prompts)]
        drawn = zip(prompts, engine.generate(requests, WEIGHTS_VERSION), strict=True)
        return [Sample(one, 0, 0, c.response_ids, c.logprobs, c.finish_reason, 0) for one, c in drawn]

    whole = draw(None)
    texts = [settings.model.tokenizer.decode(one.response_ids, skip_special_tokens=True) for one in whole]
    letters = sorted({next((c for c in text if c.isascii() and c.isprintable()), "x") for text in texts[:3]})
    early = draw(StopTexts(settings.model.tokenizer, letters))
    entries = [[ledger_entry(one, letters, settings.model.tokenizer) for one in drawn] for drawn in (whole, early)]
    return entries[0], entries[1], *(sum(len(one.response_ids) for one in drawn) for drawn in (whole, early))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and data/."""
    root = tmp_path_factory.mktemp("evaluation")
    make_folder(root / "model")
    write_rows(root / "data" / "gsm8k" / "test.jsonl", gsm8k_rows(6))
    write_rows(root / "data" / "gsm8k" / "train.jsonl", gsm8k_rows(12))
    texts = [(f"$x+{i}={2 * i}$?", f"So $x=\\boxed{{{i}}}$.", f"Level {i % 2}") for i in range(5)]
    rows = [{"problem": p, "solution": s, "level": level, "type": "Algebra"} for p, s, level in texts]
    write_rows(root / "data" / "math" / "test.jsonl", rows)
    return root


def _samples(output: Path) -> dict[str, Any]:
    return {task: Ledger(output, task).read() for task in ("gsm8k", "math")}


@pytest.mark.slow
def test_killed_or_not_and_on_one_rank_or_two_the_samples_are_the_same(folder: Path, tmp_path: Path) -> None:
    whole, killed, two = (tmp_path / name for name in ("whole", "killed", "two"))
    model, data = folder / "model", folder / "data"
    (alone,) = run_ranks(draw_all, 1, model=model, data=data, output=whole, interrupted=killed)
    run_ranks(draw_all, 2, model=model, data=data, output=two, interrupted=None)
    expected = _samples(whole)
    assert {task: len(rows) for task, rows in expected.items()} == {"gsm8k": 6 * 4, "math": 5 * 4}
    assert _samples(killed) == expected == _samples(two)
    # 24 + 20 samples in batches of 9: 3 + 3; killed in the second, which is sampled again; then all samples are there
    assert alone["torn"] and alone["calls"] == [6, 2, 5, 0]
    assert len(list(two.glob("completions/gsm8k/block_*.jsonl"))) == 2
    cut_afterwards, cut_by_engine, whole_tokens, early_tokens = alone["stops"]
    assert cut_afterwards == cut_by_engine and early_tokens < whole_tokens
    assert {entry.finish_reason for entry in cut_by_engine} == {"stop", "length"}
    assert sum(entry.num_tokens for entry in cut_by_engine) == early_tokens  # nothing is sampled after the stop
    texts = {(d.uid, d.text) for rows in expected.values() for d in rows.values()}
    assert len(texts) > 30  # the samples differ

    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = prepare(options(model, data, whole)).runs[0].prompts.prompts[0]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt.prompt_ids])
    expected_ids = oracle.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    assert alone["greedy"] == expected_ids
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert expected["gsm8k"]["gsm8k/0", -1].text == tokenizer.decode(expected_ids, skip_special_tokens=True)

    # `generate` on one engine of two ranks: the same prompts and end tokens, hence the same greedy answers
    asked = ["--model", str(model), "--file", str(data / "gsm8k" / "test.jsonl"), "--task", "gsm8k"]
    asked += ["--max-tokens", "12", "--tp", "2", "--device", "cpu", "--output", str(tmp_path / "a" / "b")]
    run_ranks(generate_over_ranks, 2, argv=asked)
    rows = [json.loads(line) for line in (tmp_path / "a" / "b").read_text().splitlines()]
    greedy = [expected["gsm8k"][f"gsm8k/{number}", -1] for number in range(6)]
    assert [(row["row"], row["sample"]) for row in rows] == [(number, 0) for number in range(6)]
    assert [(row["completion"], row["tokens"], row["finish_reason"]) for row in rows] == [
        (entry.text, entry.num_tokens, entry.finish_reason) for entry in greedy
    ]


def test_a_checkpoint_streams_the_same_weights(folder: Path, tmp_path: Path) -> None:
    to_megatron(folder / "model", tmp_path / "megatron", quiet=True)
    expected = load_file(folder / "model" / "model.safetensors")
    for path in (folder / "model", tmp_path / "megatron"):
        source = open_model(path, None)
        buckets = list(stream_weights(source, "float32", torch.device("cpu"), 100_000))
        tensors = dict(pair for bucket in buckets for pair in bucket)
        assert len(buckets) > 3 and tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert engine_dtype(source, None) == "float32" and engine_dtype(source, "bfloat16") == "bfloat16"
    half = dict(next(iter(stream_weights(source, "bfloat16", torch.device("cpu"), 1))))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, "float32"), (-math.inf, "bfloat16")])
def test_weights_that_are_not_finite_are_refused(value: float, dtype: str) -> None:
    """Large but finite values pass: their sum would overflow."""
    whole = torch.full((64, 64), torch.finfo(getattr(torch, dtype)).max, dtype=getattr(torch, dtype))
    source: Any = SimpleNamespace(
        shapes=lambda: {"w": (64, 64)},
        read=lambda name: whole,
        result_dtypes=lambda wanted: {"w": wanted},
    )
    assert len(list(stream_weights(source, dtype, torch.device("cpu"), 1))) == 1
    whole[63, 63] = value
    with pytest.raises(ConvertError, match="w has non-finite values"):
        list(stream_weights(source, dtype, torch.device("cpu"), 1))


# -- the command, over ledgers that are complete -----------------------------------------------------------------------


@pytest.fixture
def command(folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def build(*more: str, output: str = "out", tasks: str = "gsm8k,math") -> list[str]:
        where = ["--model", str(folder / "model"), "--data", str(folder / "data"), "--output", str(tmp_path / output)]
        return ["evaluate", *where, "--tasks", tasks, "--samples", "2", "--max-tokens", "12", "--workers", "1", *more]

    return build


def fill_ledger(folder: Path, output: Path, share: float, **changes: Any) -> None:
    """A complete ledger in which about `share` of the answers are right."""
    settings = prepare(
        EvaluateOptions(
            model=folder / "model", data=folder / "data", output=output, tasks=["gsm8k", "math"], samples=2, max_tokens=12,
            **changes,
        )
    )  # fmt: skip
    run_folder = settings.options.folder
    run_folder.mkdir()
    write_identity(run_folder, settings.identity())
    for run in settings.runs:
        mark = "#### %s" if run.name == "gsm8k" else "Then $\\boxed{%s}$."
        rows = []
        answers = {prompt.uid: prompt.answer for prompt in run.prompts.prompts}
        for uid, index in run.keys():  # noqa: SIM118 - not a mapping
            right = random.Random(f"{uid}/{index}").random() < share
            text = f"So it is </script> {mark % (answers[uid] if right else 'none at all')}"
            rows.append(LedgerEntry(uid, index, text, 9, "stop" if right else "length"))
        Ledger(run_folder, run.name).append(0, rows)


@pytest.mark.soak
def test_grading_that_was_killed_goes_on(
    folder: Path, tmp_path: Path, command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 4, the third of which is killed: 8 of 18 answers of gsm8k are not graded again. The results are the same."""
    fill_ledger(folder, tmp_path / "out", 0.6)
    fill_ledger(folder, tmp_path / "killed", 0.6)
    assert main(command()) == 0
    calls: list[int] = []
    whole = RewardPool.grade

    def counted(self: RewardPool, items: Any, **options: Any) -> Any:
        if len(calls) == 2:
            calls.append(0)
            raise Killed
        calls.append(len(items))
        return whole(self, items, **options)

    monkeypatch.setattr(grading, "CHUNK", 4)
    monkeypatch.setattr(RewardPool, "grade", counted)
    assert main(command(output="killed")) == 1  # an error that is not the user's
    kept = tmp_path / "killed/grades/gsm8k.jsonl"
    with kept.open("a") as file:
        file.write('{"key": "torn')
    assert main(command(output="killed")) == 0
    assert calls[:5] == [4, 4, 0, 4, 4] and sum(calls[:6]) == 18
    assert _without_paths(tmp_path / "killed") == _without_paths(tmp_path / "out") and not kept.parent.exists()


def _without_paths(output: Path) -> Any:
    return json.loads((output / "results.json").read_text())["tasks"]


def test_a_base_with_other_settings_is_refused_before_anything_is_done(
    folder: Path, tmp_path: Path, command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    fill_ledger(folder, tmp_path / "few", 0.5, limit=4)
    assert main(command("--limit", "4", output="few")) == 0
    capsys.readouterr()
    assert main(command("--against", str(tmp_path / "few"), output="new")) == 2
    shown = capsys.readouterr()
    assert "num_problems 4 against 6" in shown.err and "A is the base" in shown.err
    assert not (tmp_path / "new").exists() and "sampl" not in shown.out
    fill_ledger(folder, tmp_path / "out", 0.5)
    assert main(command()) == 0
    mixed = {**_without_paths(tmp_path / "out"), "gsm8k": _without_paths(tmp_path / "few")["gsm8k"]}
    write_rows(
        tmp_path / "few/results.json", [{**json.loads((tmp_path / "out/results.json").read_text()), "tasks": mixed}]
    )
    capsys.readouterr()  # the folder's other task is in the comparison at the end
    assert main(command("--against", str(tmp_path / "few"), tasks="math")) == 2
    shown = capsys.readouterr()
    assert "task 'gsm8k'" in shown.err and "num_problems 4 against 6" in shown.err and not shown.out


def test_programs_without_a_sandbox_need_the_users_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(unsafe: bool = False) -> str:
        if unsafe:
            return "none"
        raise ValueError("cannot isolate")

    monkeypatch.setattr(programs, "find_isolation", none)
    row = {"prompt": "def f():", "canonical_solution": " return 1", "test": "", "entry_point": "f"}
    with pytest.raises(ConfigError, match="cannot grade task 'humaneval_plus': .*cannot isolate"):
        grading.grader_of("humaneval_plus", row)
    assert grading.grader_of("humaneval_plus", row, unsafe=True) == "programs"
    assert grading.kwargs_of("programs", True) == {"unsafe": True} and grading.kwargs_of("gsm8k", True) == {}
    file = write_rows(tmp_path / "rows.jsonl", [{"answer": "18", "completion": "#### 18"}])
    argv = [
        "evaluate",
        "grade",
        "--task",
        "gsm8k",
        str(file),
        "--output",
        str(tmp_path / "out.jsonl"),
        "--workers",
        "1",
    ]
    assert main([*argv, "--unsafe"]) == 0


def test_the_command_grades_and_reports(
    folder: Path, tmp_path: Path, command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    fill_ledger(folder, tmp_path / "out", 0.6)
    assert main(command()) == 0
    printed = capsys.readouterr().out
    assert (
        "no engine is started" in printed and "math by level" in printed and "gsm8k version 2: 0-shot chat" in printed
    )
    first = (tmp_path / "out" / "results.json").read_bytes()
    result = json.loads(first)
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples" / "gsm8k.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and rows[0]["prompt"].endswith("<assistant>") and rows[0]["answer"] == "0"
    right = [[s["grades"]["accuracy"]["correct"] for s in row["samples"]] for row in rows]
    task = result["tasks"]["gsm8k"]
    scores = task["scores"]["accuracy"]
    assert list(scores) == ["pass@1 (greedy)", "avg@2", "pass@2", "maj@2"]
    assert scores["pass@1 (greedy)"]["value"] == pytest.approx(sum(r[0] for r in right) / 6, abs=1e-6)
    assert scores["avg@2"]["value"] == pytest.approx(sum(sum(r[1:]) for r in right) / 12, abs=1e-6)
    assert scores["pass@2"]["value"] == pytest.approx(sum(any(r[1:]) for r in right) / 6, abs=1e-6)
    assert 0 < scores["avg@2"]["value"] < 1 and task["tokens"]["mean"] == 9
    wrong = sum(not r for row in right for r in row) / 18
    assert task["rates"]["truncated"] == task["rates"]["format_error"] == pytest.approx(wrong, abs=1e-6)
    assert main(command()) == 0 and (tmp_path / "out" / "results.json").read_bytes() == first
    where: dict[str, Any] = {"model": folder / "model", "data": folder / "data", "output": tmp_path / "out"}
    assert evaluate(tasks="gsm8k,math", samples=2, max_tokens=12, workers=1, **where) == result  # from Python
    with pytest.raises(
        ConfigError, match=r"unknown option 'sample'; did you mean 'samples'\? \(known: model, .*samples"
    ):
        evaluate(tasks=["gsm8k"], sample=2, **where)

    fill_ledger(folder, tmp_path / "better", 1.0)
    assert main(command(output="better")) == 0
    capsys.readouterr()
    paths = [str(tmp_path / "out" / "results.json"), str(tmp_path / "better")]  # a file, and a folder
    assert main(["evaluate", "compare", *paths]) == 0
    shown = capsys.readouterr().out
    assert "gsm8k pass@1 (greedy)" in shown and "math avg@2" in shown and "McNemar p" in shown
    assert "--limit" not in printed + shown
    card = (tmp_path / "out/card.md").read_text()
    (model,) = ModelCard(card).data.to_dict()["model-index"]
    assert json.loads((tmp_path / "out/card.json").read_text())["model-index"] == [model]
    first_row = model["results"][0]
    assert first_row["dataset"]["type"] == "gsm8k" and first_row["dataset"]["args"]["num_problems"] == 6
    assert first_row["metrics"][0] == {
        "type": "pass@1 (greedy)",
        "name": "gsm8k pass@1 (greedy)",
        "value": round(100 * scores["pass@1 (greedy)"]["value"], 4),
    }
    assert "| gsm8k | 6 | pass@1 (greedy) |" in card and "Contamination: not examined" in card
    known = ["--against", str(tmp_path / "out"), "--contamination", "no 13-gram in common"]
    assert main(command(*known, output="better")) == 0
    against = capsys.readouterr().out
    assert "Contamination: no 13-gram in common." in (tmp_path / "better/card.md").read_text()
    gained = [row for row in rows if not all(s["grades"]["accuracy"]["correct"] for s in row["samples"])]
    assert f"gsm8k: {len(gained)} gained" in against and "gsm8k: 0 lost" in against and shown.strip() in against
    assert main(["evaluate", "compare", *paths, "--changed", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["changed"]["gsm8k"]
    assert {row["uid"] for row in listed} == {row["uid"] for row in gained} and all(row["b"] == 1 for row in listed)
    assert main(command("--against", str(tmp_path / "none"), output="better")) == 2
    assert "cannot read" in capsys.readouterr().err
    fill_ledger(folder, tmp_path / "few", 0.5, limit=4)
    assert main(command("--limit", "4", output="few")) == 0
    printed = capsys.readouterr().out
    assert "first 4 of 6" in printed
    assert "--limit: not the scores of the whole benchmark: gsm8k (first 4 of 6)" in printed
    cut_short = tmp_path / "few" / "results.json"
    assert json.loads(cut_short.read_text())["tasks"]["gsm8k"]["num_in_file"] == 6
    assert "first 4 of 6 problems: --limit" in (tmp_path / "few" / "report.html").read_text()
    assert main(["evaluate", "compare", str(cut_short), str(cut_short)]) == 0
    assert "--limit: not the whole benchmark: gsm8k (first 4 of 6), math (first 4 of 5)" in capsys.readouterr().out
    assert main(["evaluate", "compare", paths[0], str(tmp_path / "out" / "run.json")]) == 2
    assert "is not a results.json" in capsys.readouterr().err


def test_own_rows_have_the_mean_of_their_own_reward(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards of A: 0.5 (three rows) and -1; of B, 1 and -1. A second file in the folder leaves the first one's results."""
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(4)]
    for name in ("my val", "other"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    reward = "tests.evaluation.doubling:nearness"

    def run(output: str, texts: list[str], file: str = "my val", *more: str) -> str:
        given = ["--model", str(folder / "model"), "--file", f"{tmp_path}/{file}.jsonl", "--reward", reward]
        given += ["--output", str(tmp_path / output), "--max-tokens", "9", "--workers", "1", *more]
        made = prepare(parse(EvaluateOptions, given))
        (tmp_path / output).mkdir(exist_ok=True)
        write_identity(tmp_path / output, made.identity())
        [one] = made.runs
        entries = [LedgerEntry(uid, i, text, 3, "stop") for (uid, i), text in zip(one.keys(), texts, strict=True)]
        Ledger(tmp_path / output, one.name).append(0, entries)
        assert main(["evaluate", *given]) == 0
        return capsys.readouterr().out

    printed = run("a", ["0", "1", "3", "9"])  # rewards 1, 1, 0, -1
    values = "0.250 [-0.500, 1.000]"
    assert "mean reward (greedy)" in printed and values in printed and "pass@1" not in printed
    assert [line for line in printed.splitlines() if line.startswith("my_val")][2].split()[1:4] == ["-", "0.00", "%"]
    page = (tmp_path / "a" / "report.html").read_text()
    assert "<b>0.250</b>" in page and '"isMean":true' in page.replace(" ", "")
    result = json.loads((tmp_path / "a" / "results.json").read_text())["tasks"]["my_val"]
    assert result["problems"] == {"greedy": [1, 1, 0, -1], "samples": 0, "right": "", "is_reward": True}
    assert result["graders"] == {"reward": reward} and result["by"] == {}

    run("b", ["0", "1", "2", "3"])  # all right: shares again, and yet compared as rewards
    paths = [str(tmp_path / name / "results.json") for name in "ab"]
    assert main(["evaluate", "compare", *paths]) == 0
    table = capsys.readouterr().out
    assert "my_val mean reward (greedy)" in table and "+0.750" in table and "McNemar p" in table

    printed = run("a", ["x", "1", "2", "3"], "other")  # the first one's reward fails
    assert "WARNING: the grader failed 1 time, at other/0: " in printed and "'x'" in printed
    merged = json.loads((tmp_path / "a" / "results.json").read_text())["tasks"]
    assert list(merged) == ["my_val", "other"] and merged["my_val"] == result and "my_val" in printed
    again = (tmp_path / "a" / "report.html").read_text()
    assert "other/" not in again.partition('id="data"')[0] and '"my_val"' in again and '"other"' in again
    assert evaluate(model=folder / "model", file=str(tmp_path / "my val.jsonl"), reward=reward, output=tmp_path / "a",
                    max_tokens=9, workers=1)["tasks"].keys() == merged.keys()  # fmt: skip

    text = run("n", ["0", "1", "0", "0", "0", "5", "0", "2", "0", "0", "0", "0"], "my val", "--samples", "2")
    assert "mean reward@2" in text and "maj@2" not in text
    other = json.loads((tmp_path / "b" / "results.json").read_text())
    other["tasks"]["my_val"]["reward_sha256"] = {reward: "0" * 64}
    (tmp_path / "b" / "results.json").write_text(json.dumps(other))
    assert main(["evaluate", "compare", *paths]) == 2 and "reward_sha256" in capsys.readouterr().err


def test_a_run_with_other_settings_is_refused(
    folder: Path, tmp_path: Path, command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    fill_ledger(folder, tmp_path / "out", 0.5)
    assert main(command("--temperature", "0.9", "--limit", "3")) == 2
    error = capsys.readouterr().err
    assert "tasks.gsm8k.temperature: 0.6 there, 0.9 here" in error and "num_problems: 6 there, 3 here" in error
    assert "choose another --output" in error
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    assert main(command(output="full")) == 2 and "holds something else" in capsys.readouterr().err
    in_use = pytest.raises(ConfigError, match="in use by process")
    with claim_output(tmp_path / "out"), claim_output(tmp_path / "full"), in_use, claim_output(tmp_path / "out"):
        pass


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--temperature", "0"], "--samples 2 with --temperature 0"),
        (["--num-fewshot", "2", "--tasks", "gsm8k,math"], "task 'math': no few-shot file"),
        (["--max-tokens", "4000"], "exceed the model's max_position_embeddings 2048; set --max-tokens 1"),
        (["--model", "nowhere"], "--model: 'nowhere' is not a folder"),
        (["--file", "aime="], "--file 'aime=' is not of the form TASK=PATH"),
        (["--file", "aime"], "--file aime names no task; with several, write TASK=PATH"),
        (["--tasks", ""], "nothing to evaluate; set --tasks A,B, or --file val.jsonl with --reward module:function"),
        (["--samples", "1", "--no-greedy"], "--no-greedy leaves nothing to sample"),
        (["--tasks", "jsonl", "--file", "jsonl=x.jsonl"], "task 'jsonl' has no grader; set --reward module:function"),
        (["--tasks", "boxed"], "task 'boxed' names no data file; set --file boxed=PATH"),
        (["--format", "text", "--system-prompt", "x"], "--system-prompt needs a chat, and task 'gsm8k' is plain text"),
        (["--against", "{out}/results.json"], "is the folder that this evaluation writes to; name that of another one"),
        (["--tp", "3"], "320 rows of the vocabulary over 3 leave 2; set one of 1, 2\n"),
    ],
)
def test_mistakes(
    more: list[str], words: str, tmp_path: Path, command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*(one.replace("{out}", str(tmp_path / "out")) for one in more))) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_model_without_weights_and_ranks_that_do_not_fit_are_refused(
    folder: Path,
    tmp_path: Path,
    command: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(folder / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(command("--model", str(tmp_path / "bare"))) == 2
    error = capsys.readouterr().err
    assert "no *.safetensors" in error and "a training step" in error
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "6")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("grpo_megatron.cli.main._exit_at_once", lambda code: None)
    assert main(command("--tp", "4")) == 2
    assert "--tp 4 does not fit the 6 ranks that torchrun has started" in capsys.readouterr().err


def test_identity_says_what_decides(folder: Path, tmp_path: Path) -> None:
    settings = prepare(options(folder / "model", folder / "data", tmp_path / "x"))
    other = settings.options.model_copy(update={"seed": 1, "output": tmp_path / "y"})
    assert prepare(other).identity() == {**settings.identity(), "seed": 1}
    assert settings.model.eos_token_ids == [settings.model.tokenizer.eos_token_id]
    short = prepare(settings.options.model_copy(update={"system_prompt": "Be brief."}))
    first, changed = (s.identity()["tasks"]["gsm8k"] for s in (settings, short))
    assert {key for key in first if first[key] != changed[key]} == {"asked_sha256", "prompts_sha256"}
    assert short.runs[0].prompts.prompts[0].text.startswith("<system>Be brief.\n<user>What is 0 plus 0?")
