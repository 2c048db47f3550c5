"""The configuration file: values, overrides and defaults. A wrong key or value is refused with its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grpo_megatron.cli.config_file import for_command_line, load_config
from grpo_megatron.config import ActorConfig, Config, ConfigError, MegatronConfig
from grpo_megatron.config.problems import Problem, marked
from grpo_megatron.config.section import config_keys
from tests.printed import run_printed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: some/folder}\nrollout: {n: 4, engine_kwargs: {quantization: fp8}}\n")
    return file


def test_values_come_from_file_then_overrides_then_defaults(path: Path) -> None:
    overrides = ["actor.optim.lr=1e-5", "data.train_files=[a.jsonl, b.jsonl]", "actor.clip_ratio_c=null"]
    overrides += ["~sft", "~actor.optim.betas", "data.val_files=*.jsonl"]  # of keys that are not in the file, too
    overrides += ["actor.megatron.override_transformer_config.fp8=hybrid", "rollout.seed=2", "rollout.seed=16"]
    config = load_config(path, overrides)
    assert config.rollout.n == 4 and config.rollout.engine_kwargs == {"quantization": "fp8"}
    assert config.actor.optim.lr == 1e-5  # YAML 1.1 reads 1e-5 as text
    assert config.data.train_files == [Path("a.jsonl"), Path("b.jsonl")]
    assert config.actor.clip_ratio_c is None
    assert config.actor.megatron.override_transformer_config == {"fp8": "hybrid"}  # a section that was not there
    assert config.rollout.seed == 16  # the later override wins
    assert config.algorithm.adv_estimator == "grpo"
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.n = 1  # type: ignore[misc]


def test_the_resolved_config_can_be_read_back(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["sft.steps=3"])
    dump = tmp_path / "resolved.yaml"
    dump.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(dump) == config


def test_files_are_one_path_a_list_or_a_pattern(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern is replaced by the files, so that the recorded config has them; a file may have a pattern's characters."""
    for name in ("b.jsonl", "a.jsonl", "c[1].jsonl", "deep/er/d.jsonl", "other.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)

    def files(value: str) -> list[str]:
        return [str(file) for file in load_config(path, [f"data.train_files={value}"]).data.train_files]

    assert files("a.jsonl") == ["a.jsonl"]
    assert files("./*.jsonl") == ["a.jsonl", "b.jsonl", "c[1].jsonl"]
    assert files("[b.jsonl, 'c[1].jsonl', 'a*']") == ["b.jsonl", "c[1].jsonl", "a.jsonl"]
    assert files("deep/**/d.jsonl") == ["deep/er/d.jsonl"]
    assert files("none*.jsonl") == ["none*.jsonl"]  # reported where it is read


def test_a_path_begins_in_the_home_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    config = load_config(path, ["model.path=~/m", "trainer.output_dir=~/out", "data.train_files=[~/*.yaml,~/b]"])
    assert (config.model.path, config.trainer.output_dir) == (path.parent / "m", path.parent / "out")
    assert config.data.train_files == [path, path.parent / "b"]


@pytest.mark.parametrize(("tp", "given", "used"), [(1, None, False), (2, None, True), (2, False, False)])
def test_sequence_parallelism_follows_tensor_parallelism(tp: int, given: bool | None, used: bool) -> None:
    assert MegatronConfig(tensor_model_parallel_size=tp, sequence_parallel=given).use_sequence_parallel is used


@pytest.mark.parametrize(
    ("mini", "epochs", "size", "num_mini_batches", "num_updates"),
    [
        (None, 1, 8, 1, 5),  # null: the whole batch
        (8, 3, 8, 1, 15),
        (4, 2, 8, 2, 20),
        (3, 1, 8, 3, 15),  # 3 + 3 + 2 prompts: validation refuses it, the count is still right
    ],
)
def test_optimizer_steps_of_five_training_steps(
    mini: int | None, epochs: int, size: int, num_mini_batches: int, num_updates: int
) -> None:
    actor = ActorConfig(ppo_mini_batch_size=mini, ppo_epochs=epochs)
    assert actor.mini_batch_size(size) == (mini or size)
    assert actor.num_mini_batches(size) == num_mini_batches
    assert actor.num_updates(5, size) == num_updates


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.nn=3", "unknown key 'rollout.nn'"),
        ("~actor.optim.lrr", "there is no key 'actor.optim.lrr'; did you mean 'actor.optim.lr'?"),
        ("rolout.n=3", "did you mean 'rollout'?"),
        ("optim.lr=1e-3", "unknown key 'optim'; did you mean 'actor.optim' or"),
        ("epochs=3", "unknown key 'epochs'; did you mean 'actor.ppo_epochs' or"),
        ("trainer.total_steps=5", "did you mean 'trainer.total_training_steps'?"),
        ("actor.clip_ratio_low=2", "set 1 or less"),
        ("max_prompt_length=64", "unknown key 'max_prompt_length'; did you mean 'data.max_prompt_length'?"),
        ("teachers={t: {temprature: 1}}", "unknown key 'teachers.t.temprature' (known here: path,"),
        ("rollout.multi_turn.command=x", "itself is 'rollout.multi_turn.kwargs.command'"),
        ("actor.foo=3", "unknown key 'actor.foo'; `grpo-megatron keys actor` lists those of this section"),
        ("actor.optim.lr=CHANGE_ME", "actor.optim.lr=CHANGE_ME: write the value of your run there"),
        (
            "trainer.save_hf_at_end=maybe",
            "trainer.save_hf_at_end='maybe': set true or false, or 'merged'",
        ),
        ("rollout.val_kwargs=3", "rollout.val_kwargs=3: it is a section; write {KEY: VALUE}"),
        (
            "actor.kl_coef=0.1",
            "did you mean 'actor.kl_loss_coef'? (elsewhere there is 'algorithm.kl_ctrl.kl_coef')",
        ),
        ("actor.lr=1e-4", "unknown key 'actor.lr'; there is 'actor.optim.lr' and"),
        ("actor.megatron.tensor_parallel_size=2", "actor.megatron.tensor_model_parallel_size"),
        ("rollout.n=0", "rollout.n=0"),
        ("data.train_files=5", "data.train_files=5"),
        ("actor.optim.betas=[0.9, 1.0]", "actor.optim.betas.1=1.0"),
        ("actor.optim.lr=.nan", "actor.optim.lr=nan"),
        ("actor.lora.rank=0", "actor.lora.rank=0: set 1 or more"),
        ("actor.lora={rank: 4, alpha: .nan}", "actor.lora.alpha=nan: set a finite number"),
        ("model.dtype=fp16", "set 'float32' or 'bfloat16'; float16 needs a scaled loss, which is not here"),
        ("model.dtype=fp32", "did you mean 'float32'?"),
        ("model.dtype=bf16", "did you mean 'bfloat16'?"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas lacks entry 2"),
        ("trainer.save_freq=0", "trainer.save_freq=0: every 0 steps has no meaning; set -1 for never"),
        ("trainer.test_freq=-2", "trainer.test_freq=-2"),
        ("trainer.logger=[console, aim]", "trainer.logger.1='aim'"),
        ("trainer.logger=[wanddb]", "did you mean 'wandb'?"),
        ("trainer.logger=wandb", "trainer.logger='wandb': it is a list; write [wandb]"),
        ("data.val_files=null", "data.val_files=None: it is empty; leave it out, or write [VALUE]"),
        ("trainer.device=gpu", "trainer.device='gpu': set 'auto', 'cpu' or 'cuda'"),
        ("trainer.output_dir=", "trainer.output_dir=None: it is a path; write a text"),
        ("rollout.lag=-1", "rollout.lag=-1: set 0 or more"),
        ("rollout.n", "not of the form section.key=value"),
        ("rollout.n=[", "not valid YAML"),
        ("rollout.n.m=3", "'n' is a value, not a section"),
        # keys in a list of sections have their place in the name
        ("reward.components=[{nam: a}]", "'reward.components.0.nam'; did you mean 'reward.components.0.name'?"),
        ("reward.components=[{name:a}]", "YAML needs a space behind the ':' of KEY: VALUE"),
        ("~actor.optim.lrr", "there is no key 'actor.optim.lrr'; did you mean 'actor.optim.lr'?"),
        ("~actor.nothing", "there is no key 'actor.nothing'; `grpo-megatron keys actor` lists them"),
        ("reward.components=[{name: a, weight: .nan}]", "weight=nan: set a finite number"),
        ("reward.components=[{name: a, weight: yes}]", "reward.components.0.weight=True: a number is needed"),
        ("reward.components=[{name: a/b}]", "reward.components.0.name='a/b': write a text of the form"),
        ("rollout.temperature=3", "rollout.temperature=3: it is outside the engine's 0.01 to 2"),
        ("rollout.val_kwargs.temperature=0.001", "temperature=0.001: it is outside the engine's 0.01"),
        ("rollout.top_k=5000", "rollout.top_k=5000: set 4096 or less"),
        ('rollout.stop=["###",""]', "rollout.stop.1='': it is too short"),
        ("reward.components=[" + ", ".join(17 * ["{name: a}"]) + "]", "it has 17 entries; give at most 16"),
    ],
)
def test_a_wrong_key_or_value_is_reported(path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert expected in str(error.value)
    assert ("grpo-megatron" in expected) <= bool(run_printed(str(error.value), path.parent))


WRONG_VALUES = [
    "[x]",
    "{a: 1}",
    "no such",
    "1.5",
    "-1.0e+300",
    "1.0e+300",
    ".nan",
    "true",
    "-7",
    f"{10**23}",
    "[1, 2, 3]",
    "null",
    '""',
]
PYDANTIC = re.compile("should |valid (string|integer|number|list)|Field required|[Uu]nable to")


@pytest.mark.parametrize("value", WRONG_VALUES)
def test_no_key_reports_a_wrong_value_in_the_words_of_pydantic(path: Path, value: str) -> None:
    """Every key of the config with a value of a wrong type or beyond its bounds: what is printed names the key."""
    for key in config_keys(Config):
        try:
            load_config(path, [f"{key.name}={value}"])
        except ConfigError as error:
            lines = str(error).splitlines()
            assert lines and not PYDANTIC.search(str(error)), error
            assert all(key.name.rpartition(".")[0] in line for line in lines), error


def test_a_key_is_taken_out_on_a_command_line(path: Path) -> None:
    """As the remedies `leave KEY out` say: of a file, and of what stands before it on the command line."""
    config = load_config(path, ["~rollout.n", "actor.optim.lr=1e-3", "~actor.optim", "~actor.optim.lr", "~data"])
    assert config == load_config(path, ["rollout.n=16"]).model_copy(update={"rollout": config.rollout})
    assert config.rollout.n == load_config(path, ["~rollout"]).rollout.n and config.rollout.engine_kwargs
    for text, expected in (
        ("rollout.top_p=0.9: why; leave it out", "leave it out (on a command line: ~rollout.top_p)"),
        ("a.b=1 with c.d=2: leave c.d out, or set it", "leave c.d out (on a command line: ~c.d), or set it"),
        ("a.b=1: leave it out (why)", "leave it out (on a command line: ~a.b; why)"),
        ("a.b=1: leave one of them out", "leave one of them out"),
        ("a.b=1: leave c.d out (on a command line: c.d=null)", "leave c.d out (on a command line: c.d=null)"),
        (f"{marked('a.b')}=1 is wrong; leave it out", "leave it out (on a command line: ~a.b)"),
        ("--dp 2: leave --dp out", "leave --dp out"),
    ):
        assert for_command_line(Problem(text)).text.endswith(expected)


def test_all_wrong_keys_are_reported_at_once(path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(path, ["rollout.n=0", "trainer.save_freq=0", "data.sead=1"])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("- a\n", "must be a mapping, not list"),
        ("model: {path: [", "not valid YAML"),
        ("model:\n\tpath: x", "next token\n  found character"),  # an unindented line would be a problem of its own
        (
            "model: {path: x}\nactor: {lora: {path: nowhere}}",
            "actor.lora.path='nowhere': without rank, 'nowhere/adapter_config.json' is read: No such file",
        ),
        ("trainer: {device: cpu}\n", "missing key 'model'"),
        ("model: {dtype: float32}\n", "missing key 'model.path'"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert expected in str(error.value)
    with pytest.raises(ConfigError, match="cannot read config .*nowhere.yaml.*No such file"):
        load_config(tmp_path / "nowhere.yaml")
