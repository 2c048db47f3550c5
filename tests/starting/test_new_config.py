"""`init`: what it writes passes the dry run's checks, and its layouts fit by the plan's arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.memory import parameters_from_table
from grpo_megatron.checks.phases import GIB, memory_phases
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of
from grpo_megatron.reading.json_text import read_json
from grpo_megatron.reading.yaml_text import parse_yaml
from grpo_megatron.starting.config_text import NewRun, config_text
from grpo_megatron.starting.new_config import main
from grpo_megatron.starting.suggestion import Choice, Machine, Suggestion, suggest
from tests.runs import make_run

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "models"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def arguments(run: Path, output: Path, *more: str) -> list[str]:
    return [
        str(run / "model"),
        "--task",
        "arithmetic",
        "--train",
        str(run / "train.jsonl"),
        "--output",
        str(output),
        *more,
    ]


@pytest.mark.parametrize("machine", [["--cpu"], ["--gpus", "2"]])
def test_what_is_written_is_valid_and_nothing_is_replaced(run: Path, tmp_path: Path, machine: list[str]) -> None:
    """`init` runs the checks of the dry run itself: it would raise. No value is a default that is written for nothing."""
    output = tmp_path / "own.yaml"
    assert main(arguments(run, output, *machine, "--val", str(run / "val.jsonl"))) == 0
    config = load_config(output)
    assert config.trainer.n_gpus_per_node == 2 and config.trainer.output_dir == Path("outputs/own")
    assert config.trainer.device == ("cpu" if machine == ["--cpu"] else "auto")
    assert not config.data.apply_chat_template  # the tokenizer has none
    assert config.data.max_prompt_length + config.data.max_response_length <= 128  # the model's longest sequence
    before = output.read_text()
    with pytest.raises(ConfigError, match="own.yaml exists"):
        main(arguments(run, output))
    assert output.read_text() == before


def test_mistakes_write_nothing(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "own.yaml"
    for more, message in (
        (["--train", "missing.jsonl"], "missing.jsonl"),
        (["--task", "jsonl"], "does not grade answers; name your function with --reward"),
        (["--gpus", "12"], "no multiple of --gpus-per-node 8"),
        (["--gpus", "2", "--gpu-memory", "1"], "no layout fits. The nearest"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(arguments(run, output, *more))
    with pytest.raises(ConfigError, match="cannot read config.json"):
        main(["nowhere", "--train", str(run / "train.jsonl"), "--output", str(output)])
    assert not output.exists()


def suggested(folder: str, machine: Machine) -> tuple[Suggestion, Config, Architecture]:
    arch = architecture_of(read_json(MODELS / folder / "config.json"))
    about = NewRun(MODELS / folder, arch, True, "math", ["t.jsonl"], [], None, 1024, 2048, Path("outputs/x"))

    def config_of(choice: Choice) -> Config:
        raw: Any = parse_yaml(config_text(about, machine, Suggestion(choice)))
        return Config.model_validate(raw)

    suggestion = suggest(config_of, arch, machine)
    raw: Any = parse_yaml(config_text(about, machine, suggestion))
    assert config_of(suggestion.choice) == Config.model_validate(raw)  # comments change no value
    return suggestion, config_of(suggestion.choice), arch


def test_a_70b_model_gets_the_smallest_layout_that_fits() -> None:
    """On 64 GPUs of 79 GiB. Over 4 GPUs, weights of 2 and gradients of 4 bytes alone are 70.55e9 x 6 / 4 = 98.6 GiB."""
    machine = Machine(8, 8, 79.0)
    suggestion, config, arch = suggested("llama3_70b", machine)

    def fits(tp: int, pp: int) -> bool:
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        megatron = config.actor.megatron.model_copy(update=sizes)
        changed = config.model_copy(update={"actor": config.actor.model_copy(update={"megatron": megatron})})
        phases = memory_phases(changed, arch, 64, parameters_from_table(arch, megatron), [], None)
        return all(phase.fits(79 * GIB) for phase in phases)

    choice = suggestion.choice
    assert fits(choice.tp, choice.pp) and choice.tp <= 8 and choice.tp * choice.pp == 8
    assert not any(fits(tp, 4 // tp) for tp in (1, 2, 4))
    # bfloat16 weights of the engine, 70.55e9 x 2 bytes / 8 = 16.4 GiB, of 0.6 x 79 = 47.4; over 4 it would be 32.9
    assert choice.rollout_tp == 8 and 0.6 * 79 < suggestion.gib <= 79


def test_a_model_that_fits_nowhere_is_refused_with_the_nearest_layout() -> None:
    with pytest.raises(
        ConfigError, match=r"70\.55e9 parameters on 8 GPUs of 79 GiB: no layout fits\. The nearest, tp \d"
    ):
        suggested("llama3_70b", Machine(1, 8, 79.0))
