"""`init`: what it writes passes the dry run's checks, and its layouts fit by the plan's arithmetic."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.models import read_models
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.main import main
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.options import parse
from grpo_megatron.environments.sandboxes.local import walls_problem
from grpo_megatron.models.families import architecture_of
from grpo_megatron.planning.gpus import find_gpu
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.phases import GIB, memory_phases
from grpo_megatron.planning.search import PlannedLayout
from grpo_megatron.starting.new_config import InitOptions, Machine, config_text, suggest, write_config
from grpo_megatron.starting.prepare import ShellOptions, prepare_inputs
from grpo_megatron.untrusted import parse_yaml, read_json
from tests import vision
from tests.data.test_conversation import CHATML, tokenizer_with
from tests.runs import SIZES, make_run, write_rows
from tests.test_docs import FENCE, check_command
from tests.tiny import make_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "llama3_70b"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def init(argv: list[str]) -> int:
    return write_config(parse(InitOptions, argv))


def arguments(run: Path, output: Path, *more: str) -> list[str]:
    data = ["--task", "arithmetic", "--train", str(run / "train.jsonl"), "--output", str(output)]
    return [str(run / "model"), *data, *more]


@pytest.mark.parametrize("machine", [["--cpu"], ["--gpus", "2"]])
def test_what_is_written_is_valid_and_nothing_is_replaced(
    run: Path,
    tmp_path: Path,
    machine: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`init` runs the checks of the dry run itself: it would raise. The commands that it prints are run, or read."""
    output = tmp_path / "own.yaml"
    assert init(arguments(run, output, *machine, "--val", str(run / "val.jsonl"))) == 0
    monkeypatch.chdir(tmp_path)
    dry, train = re.findall(r"^  grpo-megatron (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert main(shlex.split(dry)) == 0 and "Verdict" in capsys.readouterr().out
    check_command(shlex.split(train))
    config = load_config(output)
    assert config.trainer.n_gpus_per_node == 2 and config.trainer.output_dir == Path("outputs/own")
    assert config.trainer.device == ("cpu" if machine == ["--cpu"] else "auto")
    assert not config.data.apply_chat_template  # the tokenizer has none
    assert config.data.max_prompt_length + config.data.max_response_length <= 128  # the model's longest sequence
    before = output.read_text()
    with pytest.raises(ConfigError, match="own.yaml exists"):
        init(arguments(run, output))
    assert output.read_text() == before


@pytest.mark.parametrize("machine", [pytest.param(["--cpu"], marks=pytest.mark.soak), ["--gpus", "2", "--lora"]])
def test_a_model_that_reads_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: list[str]) -> None:
    """An image takes half of a prompt at most."""
    monkeypatch.chdir(tmp_path)
    model, drawing = vision.make_model(Path("model")), vision.draw(0, 560, 560)  # 400 tokens
    drawing.save("0.png")
    write_rows(
        Path("train.jsonl"),
        [{"images": ["0.png"], "problem": f"<image>Find {n}.", "answer": str(n)} for n in range(64)],
    )
    words = ["--task", "geometry3k", "--train", "train.jsonl", "--output", "own.yaml", *machine]
    assert init([str(model), *words]) == 0
    config = load_config(Path("own.yaml"))
    assert config.actor.vision.is_frozen
    assert config.data.image_max_pixels == config.data.max_prompt_length // 2 * vision.CELL**2


@pytest.mark.parametrize("folder", ["", "configs"])
def test_a_reward_in_the_current_folder_or_beside_the_config_is_found(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    module = f"reward_of_init_{folder}"
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / f"{module}.py").write_text("def reward(completion, answer):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    words = ["--task", "jsonl", "--reward", f"{module}:reward", "--cpu", "--train", str(run / "train.jsonl")]
    output = Path(folder) / "grpo.yaml"
    assert init([str(run / "model"), *words, "--output", str(output)]) == 0
    config = load_config(output)
    assert config.reward.function == f"{module}:reward"
    assert not config.trainer.val_before_train  # there are no held-out rows


AGENTS = ROOT / "docs" / "agents.md"
LACKING = {  # what another machine has, in the one problem that is left
    "openenv_client:OpenEnv": "Connection refused",
    "verifiers_agent.py": "there is no program 'VERIFIERS/bin/python'",
    "nemo_gym_agent.py": "Connection refused",
}


def environment_examples() -> list[dict[str, Any]]:
    """Reads `rollout.multi_turn` of each block of the page that has one, or a part of one."""
    blocks = [block for language, block in FENCE.findall(AGENTS.read_text()) if language in ("", "yaml")]
    found = [block for block in blocks if re.search(r"^ *(environment|tools): ", block, re.MULTILINE)]
    read = [parse_yaml(textwrap.dedent(block)) for block in found]
    return [one["rollout"]["multi_turn"] if "rollout" in one else {"environment": "tools", **one} for one in read]


@pytest.mark.slow
def test_each_environment_of_the_page_can_be_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` with the values of each block, beside the files that the page shows or names, writes what its dry run accepts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("mcp_tools", "openenv_client", "openai_agent"):
        shutil.copy(ROOT / "examples" / "agents" / f"{name}.py", tmp_path)
    blocks = [block for _, block in FENCE.findall(AGENTS.read_text())]
    (tmp_path / "guess.py").write_text(next(block for block in blocks if "class Guess" in block))
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "module.py").write_text("REPORTS = {}\n" + next(b for b in blocks if "def weather" in b))
    gym = json.dumps({"responses_create_params": {"input": "hello"}})
    write_rows(Path("train.jsonl"), [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "gym": gym} for n in range(9)])
    model = make_model(Path("model"), "qwen2", **{**SIZES, "vocab_size": 320, "max_position_embeddings": 4096})
    tokenizer_with(CHATML, "<|im_end|>").save_pretrained("model")  # of bytes, so that schemas are long
    examples = environment_examples()
    assert len(examples) == 9
    if walls_problem():  # the dry run of a task folder starts a local sandbox
        examples = [values for values in examples if values["environment"] != "folders"]
    prepare_inputs(ShellOptions(out=Path("tasks")))
    for number, values in enumerate(examples):
        words = [
            f"rollout.multi_turn.{key}={json.dumps(value)}" for key, value in values.items() if key != "environment"
        ]
        words += [
            "data.max_prompt_length=2048",
            "--environment",
            values["environment"],
            "--cpu",
        ]
        task = {"tools": "arithmetic", "mcp_tools:McpTools": "arithmetic", "folders": "folders"}
        words += ["--task", task.get(values["environment"], "jsonl")]
        words += ["--train", "tasks/train" if values["environment"] == "folders" else "train.jsonl"]
        output = Path(f"{number}.yaml")
        lacking = next((text for name, text in LACKING.items() if name in str(values)), None)
        if lacking is None:
            assert init([str(model), *words, "--output", str(output)]) == 0
            config = load_config(output)
            assert config.rollout.multi_turn.environment == values["environment"]
        else:
            with pytest.raises(ConfigError) as error:
                init([str(model), *words, "--output", str(output)])
            assert lacking in str(error.value) and len(error.value.problems) == 1, error.value


@pytest.mark.parametrize(
    ("words", "rank"),
    [pytest.param(["--lora"], 32, marks=pytest.mark.soak), (["--lora", "8", "--cpu"], 8), (["--cpu"], None)],
)
def test_adapters_learn_ten_times_as_fast(run: Path, tmp_path: Path, words: list[str], rank: int | None) -> None:
    output = tmp_path / "own.yaml"
    assert init([*arguments(run, output), *words]) == 0
    config = load_config(output)
    assert config.actor.lora.rank == rank
    assert config.actor.optim.lr == pytest.approx((1e-5 if "--cpu" in words else 1e-6) * (10 if rank else 1))


def test_mistakes_write_nothing(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "own.yaml"
    for more, message in (
        (["--train", "missing.jsonl"], "missing.jsonl"),
        (["--task", "jsonl"], "does not grade answers; name your function with --reward"),
        (["--environment", "tools"], "--environment tools: the tokenizer has no chat template"),
        (["--environment", "nosuch"], "unknown environment 'nosuch' .*; or my_module:Class"),
        (["--output", "/proc/own.yaml"], "cannot write --output /proc/own.yaml: No such file or directory; name"),
        (["--lora", "0"], "--lora '0': set 1 or more"),
        (["--gpus", "12"], "no multiple of --gpus-per-node 8"),
        (["--gpus", "2", "--gpu", "1"], "no layout fits"),
        (["--gpu", "h101"], "'h101': it is neither one of h100-80"),
        (["--cpu", "rollout.m=3"], "unknown key 'rollout.m'; `grpo-megatron keys rollout` lists those"),
        (["--cpu", "rollout.n=x"], "rollout.n='x': set a whole number"),
        (["--cpu", "rollout.n.m=3"], "'rollout.n.m=3': 'n' is a value, not a section"),
        (["--cpu", "rollout.n=["], "'rollout.n=\\[': the value is not valid YAML"),
        (["--cpu", "rollout"], "'rollout' is not of the form section.key=value"),
        (["--cpu", "--chat-template", "nowhere.jinja"], "for init, name another file with --chat-template"),
        (["--cpu", "data.max_response_lenght=9"], "did you mean 'data.max_response_length'?"),
    ):
        with pytest.raises(ConfigError, match=message):
            init(arguments(run, output, *more))
    with pytest.raises(ConfigError, match="cannot read config.json"):
        init(["nowhere", "--train", str(run / "train.jsonl"), "--output", str(output)])
    assert not output.exists()


def test_values_of_the_command_line_are_written(run: Path, tmp_path: Path) -> None:
    """Over a value, in a mapping on one line, at the end of a section, and in a section that is not there."""
    output, template = tmp_path / "own.yaml", tmp_path / "turns.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    own = [
        "rollout.n=2",
        "actor.optim.lr=3.0e-5",
        "actor.optim.eps=1.0e-6",
        "actor.megatron.sequence_parallel=false",
        "sft.steps=2",
    ]
    files = [f"sft.train_files=[{run / 'sft.jsonl'}]", "data.seed=7"]
    assert init(arguments(run, output, "--cpu", "--chat-template", str(template), *own, *files)) == 0
    config = load_config(output)
    assert (config.rollout.n, config.actor.optim.lr, config.sft.steps, config.data.seed) == (2, 3e-5, 2, 7)
    assert config.actor.optim.eps == 1e-6
    assert config.actor.megatron.sequence_parallel is False
    assert config.data.apply_chat_template and config.data.chat_template == template
    written = output.read_text().splitlines()
    assert "  n: 2" in written and not any(
        "samples" in line and "4" in line for line in written
    )  # no comment of another value


def suggested(machine: Machine) -> tuple[PlannedLayout, Config]:
    """For Llama-70B: the layout, and the config that is written with it."""
    arch = architecture_of(read_json(MODEL / "config.json"))
    options = InitOptions(model=MODEL, task="math", train=("t.jsonl",))

    def config_of(planned: PlannedLayout | None) -> Config:
        raw: Any = parse_yaml(config_text(options, arch, machine, True, planned))
        return Config.model_validate(raw)

    planned = suggest(config_of(None), arch, machine)
    return planned, config_of(planned)


def test_a_70b_model_gets_a_layout_that_fits() -> None:
    """The text says what was planned. Over 4 GPUs, weights of 2 and gradients of 4 bytes alone are 70.55e9 x 6 / 4 = 98.6 GiB."""
    planned, config = suggested(Machine(8, 8, find_gpu("h100-80")))
    assert Layout.of(config) == planned.layout and planned.fit.fits
    assert planned.layout.tp <= 8 <= planned.layout.tp * planned.layout.pp
    phases = memory_phases(config, read_models(config).arch, 64, *read_models(config).stages(config))
    assert all(phase.fits(79.11 * GIB) for phase in phases)


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"70\.55e9 parameters on 8 GPUs of 39\.38 GiB: no layout fits; give more --gpus"
    ):
        suggested(Machine(1, 8, find_gpu("a100-40")))
