"""Hostile inputs: each gives one clear error, whatever it would do to a parser, and no value is printed whole.

Nothing here is timed. What hangs is ended by pytest's own limit; what fills the memory is ended by the system.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron import untrusted
from grpo_megatron.checks.components import name_problems, reward_name_problems
from grpo_megatron.checks.models import read_model
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError, DataConfig, MegatronConfig
from grpo_megatron.config.options import parse
from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import open_source
from grpo_megatron.data.benchmarks import DataPlaces, read_datasets
from grpo_megatron.data.rows import read_question, read_rows
from grpo_megatron.data.task import read_task_file
from grpo_megatron.data.tokenizer import load_tokenizer, render_chat
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.layers.spec import transformer_config
from grpo_megatron.rollout.build import engine_problems
from tests import tiny
from tests.runs import texts, write_tokenizer

LONGEST, MOST_LINES = 1200, 60  # characters of a line of a message, and its lines
MODEL = "model: {path: m}\n"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def refusal(call: Callable[..., object], *arguments: Any) -> str:
    """The message of the ConfigError that the call raises."""
    with pytest.raises(ConfigError) as raised:
        call(*arguments)
    message = str(raised.value)
    lines = message.splitlines()
    assert len(lines) <= MOST_LINES and all(len(line) <= LONGEST for line in lines), message
    return message


YAML: dict[str, tuple[str, str]] = {  # content of the config -> part of the message
    "duplicate section": (f"{MODEL}data: {{}}\n{MODEL}", "line 3, column 1: the key 'model' is there twice"),
    "alias bomb": (BOMB, "more than 20,000 values, with aliases counted in full"),
    "deep flow": ("[" * 100_000, "more than 50 tables and lists within each other"),
    "long integer": ("data: {seed: " + "9" * 5000 + "}", "a number of 5,000 characters; at most 100 are read"),
    "lone surrogate": ('model: {path: "\\ud800"}', "column 15: a text cannot be used: it contains '\\ud800'"),
    "python tag": ("model: !!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
    "wrong tag": ("model: {path: m}\ndata: {seed: !!int x}", "line 2, column 14: 'x' is no int"),
    "table as key": ("? [a, b]\n: 1", "a key is a table or a list; write a text"),
    "50 MB": (f"{MODEL}# " + "x" * 50_000_000, "has 50,000,019 bytes; at most 262,144 are read"),
    "many unknown keys": (MODEL + "".join(f"key{n}: 1\n" for n in range(4000)), "and 3,950 more keys are wrong"),
    "long value": (f"model: {{path: m, dtype: {'x' * 9000}}}", "(8,800 more characters): set 'float32'"),
}


@pytest.mark.parametrize("name", YAML)
def test_a_hostile_config_file_is_refused(tmp_path: Path, name: str) -> None:
    content, expected = YAML[name]
    (tmp_path / "run.yaml").write_text(content)
    assert expected in refusal(load_config, tmp_path / "run.yaml")


OVERRIDES = {  # override -> part of the message
    "rollout.n=yes": "rollout.n=True: a number is needed, not true or false",
    "rollout.engine_kwargs.x=" + "9" * 60: "it needs 200 bits; an integer may have 63 and a sign",
    "model.path=" + "a" * 300: "a name in it has 300 bytes; file systems take at most 255",
    'reward.kwargs.a="\\ud800"': "half of a surrogate pair",
    "rollout.engine_kwargs." + "a." * 60 + "b=1": "the key has 62 sections within each other",
    "x" * 9000: "is not of the form section.key=value",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text[:40].encode("ascii", "replace").decode())
def test_a_hostile_override_is_refused(tmp_path: Path, override: str) -> None:
    (tmp_path / "run.yaml").write_text(MODEL)
    assert OVERRIDES[override] in refusal(load_config, tmp_path / "run.yaml", [override])


def test_aliases_are_copies(tmp_path: Path) -> None:
    """An override of one section must not change the other one that was written with an alias."""
    (tmp_path / "run.yaml").write_text(f"{MODEL}actor: {{optim: &o {{lr: 0.1}}}}\nsft: {{optim: *o}}\n")
    config = load_config(tmp_path / "run.yaml", ["actor.optim.lr=0.2"])
    assert (config.actor.optim.lr, config.sft.optim.lr) == (0.2, 0.1)


ONLY_LIBYAML_READS = ["a:\tb\t: c", "[a?b]", "|#c", "a: !  # c", "a: b\n\ufeff# c"]


def test_both_parsers_read_the_same() -> None:
    """libyaml's parser is the fast one. Its errors, and texts that only it accepts, go to PyYAML's."""
    texts = [path.read_text() for path in Path(untrusted.__file__).parent.rglob("*.yaml")]
    for text in texts:
        assert repr(untrusted._fast_loader()(text).value()) == repr(untrusted._PlainLoader(text).value())
    for text in ONLY_LIBYAML_READS:
        assert untrusted.ONLY_LIBYAML.search(text), text
    for text in ("[" * 100_000, "- " * 100_000, "{a: " * 50_000):  # nodes of libyaml's binding would end the process
        with pytest.raises(untrusted.ReadError, match="more than 50 tables"):
            untrusted.parse_yaml(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make_model(tmp_path_factory.mktemp("hostile") / "model", "qwen2", num_hidden_layers=1)
    write_tokenizer(folder)
    return folder


CONFIG_JSON: list[tuple[dict[str, Any] | str, str]] = [
    ({"num_hidden_layers": 10**9}, "num_layers=1000000000; at most 10,000 is accepted"),
    ({"num_attention_heads": 0}, "config.json has a value that cannot be used"),
    ({"rms_norm_eps": float("nan")}, "norm_eps=nan, not a number from 0 to 1"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_linear_factor=0.0, not a number from 1"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false', not true or false"),
    ({"model_type": "os:getcwd"}, "model_type='os:getcwd' is not supported"),  # only model.family may name a module
    (
        {
            "model_type": "mixtral",
            "num_local_experts": 60_000,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 99,
            "layer_types": None,
        },
        "99 layers of 60000 experts",
    ),
    ('{"model_type": "qwen2", "vocab_size": ' + "9" * 5000 + "}", "has an integer of 5,000 digits; at most 100"),
    ('{"model_type": "qwen2", "model_type": "llama"}', "has the key 'model_type' twice in one object"),
    ("[" * 100_000, "nested too deeply"),
    ('{"model_type": "\xff"}', "config.json is not UTF-8"),
    (" " * (1 << 24) + "{}", "config.json has 16,777,218 bytes; at most 16,777,216 are read"),
]


@pytest.mark.parametrize(("content", "expected"), CONFIG_JSON, ids=lambda value: str(value)[:50])
def test_a_hostile_model_config_is_refused(
    folder: Path, tmp_path: Path, content: dict[str, Any] | str, expected: str
) -> None:
    whole = (
        content
        if isinstance(content, str)
        else json.dumps({**json.loads((folder / "config.json").read_text()), **content})
    )
    (tmp_path / "config.json").write_bytes(whole.encode("latin-1"))
    message = refusal(read_model, tmp_path)
    assert expected in message
    assert message.startswith("model.path=")


ROWS: list[tuple[bytes, str]] = [
    (b'{"prompt": "' + b"x" * 50_000_000 + b'"}', "line 1: has more than 4,194,304 bytes, the most that are read"),
    (b'{"prompt": "a", "prompt": "b"}', "line 1: has the key 'prompt' twice in one object; keep one"),
    (b'{"prompt": "\\ud800"}', "line 1: field 'prompt': it contains '\\ud800', half of a surrogate pair"),
    (b"[" * 100_000, "line 1: is not JSON that can be read (nested too deeply)"),
    (b'{"prompt": "\xff"}', "line 1: is not UTF-8"),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(("content", "expected"), ROWS, ids=lambda value: str(value)[:40])
def test_hostile_rows_are_refused(tmp_path: Path, content: bytes, expected: str, suffix: str) -> None:
    """The same as a list in a .json file, where there is no line to name and the limit is that of a field."""
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(content if suffix == ".jsonl" else b"[" + content + b"]")
    message = refusal(read_rows, file, read_question)
    assert message.startswith(f"data file '{file}'")
    if suffix == ".jsonl":
        assert expected in message


TASKS: list[tuple[str, str]] = [
    ("name: a\nname: b", "the key 'name' is there twice"),
    (BOMB, "more than 20,000 values"),
    ("x" * 300_000, "has 300,000 bytes"),
]


@pytest.mark.parametrize(("content", "expected"), TASKS, ids=lambda value: value[:30])
def test_a_hostile_task_file_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "task.yaml").write_text(content)
    assert expected in refusal(read_task_file, tmp_path / "task.yaml")


TEMPLATES = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "it took more than 0.2 s of processor time",
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "it takes 2 GiB or more",
    "{{ 'a' * 20000000 }}": "makes 20,000,000 characters of row 1; at most 16,777,216",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda text: text[:40])
def test_a_hostile_chat_template_is_refused(folder: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "9999" in template:
        monkeypatch.setattr("grpo_megatron.data.tokenizer.TEMPLATE_S", 0.2)
    tokenizer = load_tokenizer(folder, DataConfig())
    tokenizer.chat_template = template
    message = refusal(render_chat, [{"role": "user", "content": "1 + 1 ="}], tokenizer, "row 1")
    assert TEMPLATES[template] in message
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert render_chat([{"role": "user", "content": "1"}], tokenizer, "row 2") == "1"  # no limit is left behind


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "extra.bin", "additional_chat_templates/a.jinja"])
def test_a_folder_with_a_fifo_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """A library that reads it would wait for ever."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    expected = f"it holds '{name}', which is a FIFO, not a regular file; remove it"
    assert expected in refusal(read_model, model)
    assert expected in refusal(load_tokenizer, model, DataConfig())


@pytest.mark.parametrize("read", [load_config, read_task_file, lambda path: read_rows(path, dict)])
def test_a_fifo_or_device_is_no_input_file(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    assert "is a FIFO, not a regular file" in refusal(read, tmp_path / "fifo.jsonl")
    assert "is a device, not a regular file" in refusal(read, tmp_path / "zero.jsonl")
    assert "is a folder, not a regular file" in refusal(read, tmp_path / "folder.jsonl")
    assert "a name in it has 306 bytes" in refusal(read, tmp_path / ("x" * 300 + ".jsonl"))


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise SystemExit"])
def test_a_module_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A run would end with exit code 0, as if it had finished."""
    (tmp_path / "ending_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for section, key in (
        ("algorithm", "adv_estimator"),
        ("actor", "loss_mode"),
        ("data", "task"),
        ("reward", "function"),
    ):
        config = Config.model_validate({"model": {"path": "m"}, section: {key: "ending_module:thing"}})
        (problem,) = texts([*name_problems(config), *reward_name_problems(config)])
        assert problem.startswith(f"{section}.{key}: ")
        assert "importing module 'ending_module' ends the process" in problem
        assert "ending_module" not in sys.modules
    config = Config.model_validate({"model": {"path": "m"}, "rollout": {"engine": "ending_module:Engine"}})
    assert "importing module 'ending_module' ends the process" in next(engine_problems(config.rollout))


def test_a_task_function_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ending_task.py").write_text("import sys\ndef task(): sys.exit('bye')")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"task": "ending_task:task"}})
    (problem,) = texts(reward_name_problems(config))
    assert problem.startswith("data.task: task 'ending_task:task': calling it ends the process (sys.exit('bye'))")


@pytest.mark.parametrize("value", ["abc", "x" * 9000, [1]], ids=lambda value: str(value)[:9])
def test_a_value_that_megatron_refuses_is_named(value: object) -> None:
    megatron = MegatronConfig(override_transformer_config={"recompute_granularity": value})
    message = refusal(
        transformer_config, architecture_of({"model_type": "qwen2", **tiny.COMMON}), megatron, "float32", False
    )
    assert message.startswith("actor.megatron.override_transformer_config={'recompute_granularity': ")
    assert "Megatron-Core refuses it (" in message


def test_the_converter_refuses_special_files(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    with pytest.raises(
        ConvertError, match=r"holds 'model.safetensors', which is a FIFO, not a regular file; remove it"
    ):
        open_source(model)
    with pytest.raises(ConvertError, match=r"cannot be opened: a name in it has 300 bytes"):
        open_source(Path("x" * 300))


def test_the_engines_cache_has_a_bound() -> None:
    config = Config.model_validate({"model": {"path": "m"}, "rollout": {"engine_options": {"kv_cache_gib": 1e9}}})
    assert list(engine_problems(config.rollout)) == [
        "rollout.engine_options.kv_cache_gib=1000000000.0: set 4096 or less"
    ]


@pytest.mark.parametrize("kind", ["fifo", "long lines", "many lines", "far too many ranks"])
def test_the_command_line_exits_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No line that is printed is longer than 2,100 characters, and there are at most 201."""
    file, arguments = tmp_path / "run.yaml", []
    file.write_text(MODEL)
    if kind == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif kind == "far too many ranks":
        arguments = ["trainer.n_gpus_per_node=1000000"]
    else:
        problem = "x" * 10**6 if kind == "long lines" else "\n".join(f"wrong {n}" for n in range(1000))
        monkeypatch.setattr("grpo_megatron.cli.run.load_config", lambda *_: (_ for _ in ()).throw(ConfigError(problem)))
    assert main.main(["train", str(file), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") and len(line) < 2100 for line in lines)
    assert len(lines) == {"many lines": 201, "far too many ranks": 4}.get(kind, 1)  # 3: what else the config lacks


# -- hostile task files and options of the scripted evaluation ---------------------------------------------------------

TASK = """
name: t
title: T
version: 1
reward: math
question: ['{question}']
answer: [{field: answer}]
files: [FILE]
fewshot: {files: [rows.jsonl], solution: solution, remove: 'REMOVE', default: 1}
"""


def task_refusal(folder: Path, remove: str, file: str = "rows.jsonl", solution: str = "x") -> str:
    (folder / "task.yaml").write_text(TASK.replace("REMOVE", remove).replace("FILE", file))
    (folder / "rows.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": "2", "solution": solution}))
    with pytest.raises(ConfigError) as raised:
        read_datasets([read_task_file(folder / "task.yaml")], DataPlaces(folder), lambda task: 1, None)
    assert len(str(raised.value)) < 1500
    return str(raised.value)


def test_expressions_and_files_of_a_task(tmp_path: Path) -> None:
    assert "fewshot.remove: not a regular expression (missing )" in task_refusal(tmp_path, "(")
    slow = task_refusal(tmp_path, "(a+)+$", solution="a" * 60 + "b")  # 2^60 ways to divide the a
    assert "line 1: fewshot.remove='(a+)+$' of task 't' took more than 2 s of processor time" in slow
    assert f"no data file in '{tmp_path}'" in task_refusal(tmp_path, "x", file="x" * 300)
    assert f"no data file in '{tmp_path}'" in task_refusal(tmp_path, "x", file="/dev/zero")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--samples", "99999999999", "--samples '99999999999': set 65536 or less"),
        ("--temperature", "nan", "--temperature 'nan': set a finite number"),
        ("--seed", "9" * 5000, "set a whole number of fewer digits"),
        ("--engine-kwargs", "[" * 9999, "is not JSON that can be read (nested too deeply)"),
    ],
    ids=lambda value: value[:20].encode("ascii", "replace").decode(),
)
def test_options_of_evaluate(option: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(EvaluateOptions, ["--model", "m", "--tasks", "math", option, value])
    assert message in str(error.value) and len(str(error.value)) < 400
