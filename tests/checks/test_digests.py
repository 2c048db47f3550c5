"""A resumed run notices other rows, weights and code than those that its checkpoint was written with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.checks.resume import InputDigests, input_problems, recorded_inputs, resume_problems
from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.data.responses import WrittenResponse
from grpo_megatron.storage.files import sha256_of
from tests.fakes import run_trainer as run
from tests.rewards.waiting import QuietHandler, serving
from tests.runs import make_run, texts

REWARD = "def score(completion, answer):\n    return float(completion == answer)\n"


def config_of(folder: Path, **trainer: Any) -> Config:
    raw = yaml.safe_load((folder / "run.yaml").read_text())
    raw["trainer"] |= trainer
    return Config.model_validate(raw)


def write_checkpoint(folder: Path, step: int, name: str = "", **run: Any) -> Path:
    checkpoint = folder / "out/checkpoints" / (name or f"step_{step:06d}")
    checkpoint.mkdir(parents=True)
    saved = {"step": step, "config": config_of(folder).model_dump(mode="json"), "run": run}
    (checkpoint / "trainer.json").write_text(json.dumps(saved))
    return checkpoint


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of make_run with a reward of the user's own, and a checkpoint with the digests of all that."""
    folder = make_run(tmp_path)
    (folder / "own_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(folder))
    raw = yaml.safe_load((folder / "run.yaml").read_text())
    raw["reward"] = {"function": "own_reward:score"}
    raw["trainer"]["output_dir"] = str(folder / "out")
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    write_checkpoint(folder, 2, inputs=InputDigests(config_of(folder)).state())
    return folder


def reverse(path: Path) -> None:
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def shorten(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def add_a_comment(path: Path) -> None:
    path.write_text(path.read_text() + "# changed\n")


def copy_beside(path: Path) -> None:
    (path.parent / "model-2.safetensors").write_bytes(path.read_bytes())


CHANGES: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("train.jsonl", reverse, "data.train_files", "has changed (sha256 "),
    ("train.jsonl", shorten, "data.train_files", "bytes -> "),
    ("sft.jsonl", reverse, "sft.train_files", "has changed (sha256 "),
    ("model/model.safetensors", flip_a_bit, "model.path", "has changed (sha256 "),
    ("model/config.json", add_a_comment, "model.path", "bytes -> "),
    ("model/tokenizer.json", flip_a_bit, "model.path", "has changed (sha256 "),
    ("model/tokenizer.json", Path.unlink, "model.path", "is gone since "),
    ("model/model.safetensors", copy_beside, "model.path", "model-2.safetensors is new since "),
]


@pytest.mark.parametrize(("name", "change", "key", "text"), CHANGES)
def test_changed_inputs_are_refused_by_name_or_accepted(
    begun: Path, name: str, change: Callable[[Path], None], key: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list(input_problems(config_of(begun), prints=True)) and not capsys.readouterr().out
    change(begun / name)
    [problem] = texts(input_problems(config_of(begun), prints=True))
    assert problem.startswith(f"{key}: {begun / name}" if change is not copy_beside else f"{key}: {begun}/model/")
    assert (
        text in problem
        and f"since {begun}/out/checkpoints/step_000002; put the old one back, or start a new run" in problem
        and problem.endswith("trainer.accept_changed_inputs=true")
        is (change is not copy_beside)  # weights of another size
    )
    assert not capsys.readouterr().out
    assert not list(input_problems(config_of(begun, accept_changed_inputs=True), prints=True))
    printed = capsys.readouterr().out
    assert printed.startswith("changed since ") and key in printed and printed.endswith(" (accepted)\n")
    assert not list(input_problems(config_of(begun, resume_mode="disable"), prints=True))


def test_changed_code_and_rows_of_validation_are_printed(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_a_comment(begun / "own_reward.py")
    reverse(begun / "val.jsonl")
    assert not list(input_problems(config_of(begun), prints=True))
    rows, code = capsys.readouterr().out.splitlines()
    assert f": data.val_files: {begun}/val.jsonl has changed (sha256 " in rows
    assert f"since {begun}/out/checkpoints/step_000002: reward.function: own_reward:score has changed (" in code


def test_with_sizes_only_the_weights_are_not_read(begun: Path) -> None:
    flip_a_bit(begun / "model/model.safetensors")
    reverse(begun / "train.jsonl")
    [problem] = texts(input_problems(config_of(begun, verify_checkpoints="sizes"), prints=False))
    assert problem.startswith("data.train_files: ")


def test_a_checkpoint_without_digests_says_so_once(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that cannot be read is passed over, for one of the same run before it."""
    write_checkpoint(begun, 3)
    (begun / "out/checkpoints/step_000003/trainer.json").write_text("{")
    reverse(begun / "train.jsonl")
    assert list(input_problems(config_of(begun), prints=True))
    (begun / "out/checkpoints/step_000002/trainer.json").write_text('{"step": 2}')
    assert not list(input_problems(config_of(begun), prints=True))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{begun}/out/checkpoints/step_000003 has no digests of data, weights and code: ")


def test_a_checkpoint_under_another_steps_name_is_refused(begun: Path) -> None:
    write_checkpoint(begun, 3, "step_000009")
    [problem] = texts(resume_problems(config_of(begun, total_training_steps=20)))
    assert problem.startswith(
        f"{begun}/out/checkpoints/step_000009 is the checkpoint after step 3, by its trainer.json"
    )


def test_one_process_of_a_run_compares_before_ranks_start(begun: Path) -> None:
    reverse(begun / "train.jsonl")
    with pytest.raises(ConfigError, match=r"data\.train_files: .*train\.jsonl has changed \(sha256 "):
        validate(config_of(begun), 2, rehearsed=True)
    validate(config_of(begun), 2)
    (begun / "train.jsonl").write_text("{}\n")  # accepting it would not make it rows
    with pytest.raises(ConfigError, match=r"(?s)train\.jsonl.*has changed") as raised:
        validate(config_of(begun), 2, rehearsed=True)
    assert "accept_changed_inputs" not in str(raised.value)


class Teacher(QuietHandler):
    """The replies of vLLM of a version and of weights whose log-probabilities are `logprob` less token / 8."""

    version, logprob = "0.32.0", -2.0

    def do_GET(self) -> None:
        self.reply({"version": self.version} if self.path == "/version" else {})

    def do_POST(self) -> None:
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        entries = [None, *({str(t): {"logprob": self.logprob - t / 8}} for t in ids[1:])]
        self.reply({"choices": [{"prompt_logprobs": entries}]})

    def reply(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


def test_other_weights_behind_a_teachers_server_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding, up to 0.1 nats on the mean, is not, and neither is a server that does not answer yet."""
    folder, printed = make_run(tmp_path), {}
    with serving(Teacher) as address:
        raw = yaml.safe_load((folder / "run.yaml").read_text())
        raw["trainer"]["output_dir"] = str(folder / "out")
        raw["teachers"] = {"math": {"url": f"{address}/v1", "model": "large"}}
        (folder / "run.yaml").write_text(yaml.safe_dump(raw))
        write_checkpoint(folder, 2, inputs=InputDigests(config_of(folder)).state())
        for name, value in (("logprob", -2.09), ("logprob", -2.5), ("version", "0.33.0")):
            with monkeypatch.context() as patch:
                patch.setattr(Teacher, name, value)
                assert not list(input_problems(config_of(folder), prints=True))
            printed[value] = capsys.readouterr().out
    assert not list(input_problems(config_of(folder), prints=True)) and not capsys.readouterr().out
    assert printed[-2.09] == ""
    assert (
        ": teachers.math: large has other weights: the log-probabilities of 32 fixed tokens are 0.50" in printed[-2.5]
    )
    assert ": teachers.math: large is a server of version 0.33.0, and was one of 0.32.0" in printed["0.33.0"]


# -- what a run records ------------------------------------------------------------------------------------------------


def test_every_checkpoint_has_the_digests(tmp_path: Path) -> None:
    """Also those of the warm-up. A resumed run takes the digests of weights of an unchanged size from its checkpoint."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    for path in (model / "model.safetensors", model / "config.json", rows):
        path.write_text(path.name)
    sections: dict[str, Any] = {"model": {"path": str(model)}, "data": {"train_files": [str(rows)]}}
    out = tmp_path / "out"
    run(out, trainer={"save_freq": 2, "total_training_steps": 2}, **sections)
    recorded = recorded_inputs(out / "checkpoints/step_000002")
    assert {key: set(files) for key, files in recorded.items()} == {
        "model.path": {str(model / "config.json"), str(model / "model.safetensors")},
        "data.train_files": {str(rows)},
    }
    for path in (*model.iterdir(), rows):
        (entry,) = (files[str(path)] for files in recorded.values() if str(path) in files)
        assert entry == {"size": path.stat().st_size, "sha256": sha256_of(path)}
    before = recorded["model.path"][str(model / "model.safetensors")]
    flip_a_bit(model / "model.safetensors")
    for total, accept in ((4, False), (6, True)):
        more = {"save_freq": 2, "total_training_steps": total, "accept_changed_inputs": accept}
        run(out, trainer=more, **sections)
        now = recorded_inputs(out / f"checkpoints/step_{total:06d}")["model.path"][str(model / "model.safetensors")]
        assert (now == before) is not accept


def test_the_warm_up_has_them_too(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    sft = {"steps": 2, "train_batch_size": 2, "save_freq": 1, "train_files": [str(rows)]}
    written = [([number], WrittenResponse([7])) for number in range(4)]
    run(tmp_path / "out", rows=written, stop_warm_up_after=1, sft=sft)
    assert recorded_inputs(tmp_path / "out/sft/checkpoints/step_000001")["sft.train_files"].keys() == {str(rows)}
    reverse(rows)
    config = Config.model_validate({"model": {"path": "m"}, "sft": sft, "trainer": {"output_dir": tmp_path / "out"}})
    assert not list(input_problems(config, prints=False))
    shorten(rows)
    [problem] = texts(input_problems(config, prints=False))
    assert problem.startswith(f"sft.train_files: {rows} has changed (2 bytes -> 0 bytes) since {tmp_path}/out/sft/")
