"""`generate` up to its engine: options, prompts as the run renders them, lengths and output.

tests/evaluation/test_run.py draws with the real engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.cli.main import main
from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.config.options import parse
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.evaluation import generate as cli
from grpo_megatron.evaluation.generate_settings import GenerationSettings, prepare_generation
from grpo_megatron.evaluation.options import GenerateOptions
from tests.evaluation.models import FakeAsker, TextEngine, byte_tokenizer, gsm8k_rows, make_folder
from tests.runs import write_rows

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}[assistant] "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/hf, a model, with run/config.yaml beside it; and run/rows.jsonl."""
    folder = tmp_path_factory.mktemp("run")
    make_folder(folder / "hf", max_position_embeddings=512)
    (folder / "template.jinja").write_text(TEMPLATE)
    data = {"task": "gsm8k", "system_prompt": "Be brief.", "max_response_length": 40}
    config = {"data": data, "trainer": {}, "rollout": {"stop": ["###"], "stop_token_ids": [7]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_rows(folder / "rows.jsonl", gsm8k_rows(3))
    return folder


def prepared(*options: Any) -> GenerationSettings:
    return prepare_generation(parse(GenerateOptions, [*map(str, options)]))


def test_the_prompts_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    """Also where the folder has another name, by options; and as they are, with another task."""
    settings = prepared("--model", run / "hf", "--file", run / "rows.jsonl")
    data = DataConfig(task="gsm8k", system_prompt="Be brief.")
    trained = load_prompts(data, [run / "rows.jsonl"], byte_tokenizer(), "gsm8k")
    assert [prompt.prompt_ids for prompt in settings.prompts] == [prompt.prompt_ids for prompt in trained]
    assert (settings.answers.max_tokens, settings.answers.stop, settings.answers.stop_token_ids) == (40, ["###"], [7])
    assert settings.max_model_len == max(len(prompt.prompt_ids) for prompt in trained) + 40
    (tmp_path / "copy").symlink_to(tmp_path)  # no hf/ beside a config
    (tmp_path / "model").mkdir()
    for file in (run / "hf").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    options = ("--task", "gsm8k", "--system-prompt", "Be brief.", "--stop", "###")
    other = prepared("--model", tmp_path / "model", "--file", run / "rows.jsonl", *options)
    assert other.style.run is None and other.prompts == settings.prompts
    plain = prepared("--model", tmp_path / "model", "--prompt", "What is 0 plus 0?")
    assert [prompt.text for prompt in plain.prompts] == ["<user>What is 0 plus 0?\n<assistant>"]
    assert plain.answers.max_tokens == 512 - len(plain.prompts[0].prompt_ids)  # of the default, what there is room for
    text = prepared("--model", tmp_path / "model", "--prompt", "2 +", "--format", "text", "--max-tokens", 3)
    assert text.prompts[0].text == "2 +" and text.max_model_len == 6


def test_a_step_has_the_template_of_its_run(run: Path, tmp_path: Path) -> None:
    from grpo_megatron.convert import to_megatron

    step = tmp_path / "step_000001"
    to_megatron(run / "hf", step / "out", quiet=True)
    (step / "out" / "release").rename(step / "state")
    data = {"task": "jsonl", "chat_template": str(run / "template.jinja")}
    config = {"model": {"path": str(run / "hf")}, "data": data}
    (step / "trainer.json").write_text(json.dumps({"config": config}))
    write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Ho"}])
    settings = prepared("--model", step, "--file", tmp_path / "chats.jsonl")
    assert [prompt.text for prompt in settings.prompts] == ["[user] Hi [assistant] ", "[user] Ho [assistant] "]
    data["chat_template"] = "gone.jinja"
    (step / "trainer.json").write_text(json.dumps({"config": config}))
    with pytest.raises(ConfigError, match="chat_template='gone.jinja', which is not there; set --chat-template FILE"):
        prepared("--model", step, "--prompt", "Hi")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "x", "--samples", "2"], "--samples 2 with --temperature 0: greedy answers are all the same"),
        (["--prompt", "x", "--temperature", "9"], "--temperature 9 is outside 0.01 to 2; set one inside, or 0"),
        (["--prompt", " "], "--prompt ' ': the prompt is empty"),
        (["--prompt", "x", "--max-tokens", "900"], "of 37 tokens + --max-tokens 900 = 937 exceeds the model's max_po"),
        (["--prompt", "x" * 600], "exceeds the model's max_position_embeddings 512; shorten the prompt"),
        (["--prompt", "x", "--tp", "2"], "--tp 2 starts 2 ranks, which share the terminal; set --output OUT.jsonl"),
        (["--prompt", "-", "--tp", "2"], "--prompt - with --tp 2: only one process has standard input"),
        (["--chat", "--tp", "2"], "serve the model instead (vllm serve HF_DIR --tensor-parallel-size 2"),
        (["--chat", "--samples", "2", "--temperature", "1"], "each turn has one answer; leave --samples out"),
        (["--prompt", "x", "--tp", "5", "--output", "o"], "--tp 5 cannot split the model"),
        (["--prompt", "x", "--task", "gsm9k"], "unknown task 'gsm9k'; did you mean 'gsm8k'?"),
        (["--prompt", "x", "--format", "text"], "--system-prompt needs a chat template, and prompts are plain"),
        (["--file", "none.txt"], "cannot read --file 'none.txt'"),
        (["--prompt", "x", "--output", "."], "--output '.' is a folder; name a file"),
    ],
)
def test_mistakes_are_named(options: list[str], words: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(run / "hf"), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_chat_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_folder(tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["generate", "--model", str(model), "--chat"]) == 2
    assert "--chat needs a chat template" in capsys.readouterr().err


def test_answers_go_to_standard_output_or_a_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TextEngine(byte_tokenizer(), lambda request: f"{len(request.prompt_ids)} \u00e9", shortest=40)
    monkeypatch.setattr(cli, "Asker", lambda model, max_model_len: FakeAsker(model, engine))
    monkeypatch.setattr("grpo_megatron.evaluation.ask.destroy_mesh", lambda: None)

    def generate(*options: str) -> tuple[str, str]:
        assert cli.generate(parse(GenerateOptions, ["--model", str(run / "hf"), *options]), lambda *_: 1) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    out, err = generate("--prompt", "Why?", "--max-tokens", "9")
    assert out == "40 \u00e9\n" and "(cut after 5 tokens: --max-tokens)" in err
    assert f"prompts as in {run / 'config.yaml'}: task gsm8k (--task jsonl: as they are)" in err
    several = ["--file", str(run / "rows.jsonl"), "--samples", "2", "--temperature", "1", "--max-num-seqs", "3"]
    out, err = generate(*several)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["row"], row["sample"]) for row in rows] == [(n, s) for n in range(3) for s in range(2)]
    assert rows[0]["question"] == "What is 0 plus 0?" and rows[0]["prompt"].startswith("<system>Be brief.\n<user>")
    assert "6 answers, 30 tokens in " in err
    assert generate(*several, "--output", str(tmp_path / "new" / "out.jsonl"))[0] == ""
    assert (tmp_path / "new" / "out.jsonl").read_text() == out
    monkeypatch.setattr("sys.stdin.read", lambda size: "From a pipe\n", raising=False)
    assert json.loads(generate("--prompt", "-", "--json")[0])["question"] == "From a pipe"
