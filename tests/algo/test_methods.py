"""`method: NAME`: the block of defaults that it stands for, and that every example resolves to what it always was.

resolved.json has the keys of each example that differ from the defaults, as they were when the examples wrote every key.
After a wanted change of an example: UPDATE_RESOLVED=1 python -m pytest tests/algo/test_methods.py
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.resume import differences
from grpo_megatron.cli.config_file import WrongKeys, load_config, reward_defaults
from grpo_megatron.cli.main import KeysOptions, main, print_keys
from grpo_megatron.config import ActorConfig, Config, ConfigError, ModelConfig, OptimConfig
from grpo_megatron.config.methods import dated_defaults, methods
from grpo_megatron.config.problems import written
from grpo_megatron.config.section import config_keys

ROOT = Path(__file__).parents[2]
RESOLVED = Path(__file__).with_name("resolved.json")
DEFAULTS = {key.name: key.default for key in config_keys(Config)}
EXAMPLES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("examples/methods/*.yaml"), *ROOT.glob("examples/recipes/*/*.yaml"))
    if path.parent.name != "tasks"
)
MODEL = {"path": "x"}


def resolved(path: str) -> dict[str, Any]:
    """The keys of an example that differ from the defaults, but for `method`."""
    config = load_config(ROOT / path)
    plain = config.model_dump(mode="json", exclude_defaults=True)
    values = {key: config.at(key) for key in DEFAULTS if config.at(key) != DEFAULTS[key] and key != "method"}
    for key in values:
        node: Any = plain
        for part in key.split("."):
            node = node[part]
        values[key] = node
    return values


def test_examples_resolve_to_what_they_were() -> None:
    now = {path: resolved(path) for path in EXAMPLES}
    if os.environ.get("UPDATE_RESOLVED"):
        RESOLVED.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in now.items()) + "\n}\n")
    recorded = json.loads(RESOLVED.read_text())
    assert now.keys() == recorded.keys() and len(now) == 58
    for path in now:
        assert now[path] == recorded[path], path


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.startswith("examples/methods/")])
def test_an_example_of_a_method_has_its_name(path: str) -> None:
    assert load_config(ROOT / path).method == Path(path).stem


@pytest.mark.parametrize("name", methods())
def test_a_method_alone_is_consistent(name: str) -> None:
    """Its keys exist, have valid values, have an effect, and fit together."""
    config = Config.model_validate({"method": name, "model": MODEL})
    assert config.method_keys.keys() <= DEFAULTS.keys()
    assert {key: config.at(key) for key in config.method_keys} == config.method_keys
    problems = [str(problem) for problem in method_problems(config)]
    assert all("one for the whole response" in problem for problem in problems)  # of the task
    assert config == Config.model_validate(config.model_dump(mode="json"))  # the resolved file


@pytest.mark.parametrize("name", methods())
def test_the_example_of_a_method_runs_it(name: str) -> None:
    """Some share one, whose header says `method=NAME`. A key that then has no effect would be refused."""
    assert list(method_problems(load_config(ROOT / "examples" / methods()[name].example, [f"method={name}"]))) == []


def test_keys_of_the_file_override_the_block(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: dapo\nmodel: {path: x}\nactor: {clip_ratio_high: 0.3}\ndata: {max_response_length: 100}\n")
    config = load_config(path, ["algorithm.filter_groups.max_num_gen_batches=3", "actor.clip_ratio_c=2.5"])
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high, config.actor.clip_ratio_c) == (0.2, 0.3, 2.5)
    assert config.algorithm.filter_groups.enable and config.algorithm.filter_groups.max_num_gen_batches == 3
    assert config.reward.overlong_buffer.len == 20 and not config.actor.use_kl_loss
    assert load_config(path, ["reward.overlong_buffer.len=null"]).reward.overlong_buffer.len is None
    assert load_config(path, ["method=null"]).actor.clip_ratio_low == 0.2
    assert load_config(path, ["method=gspo"]).actor.loss_mode == "gspo"


def test_sections_of_python_override_the_block_by_the_keys_that_they_set() -> None:
    actor = ActorConfig(clip_ratio_high=0.3, optim=OptimConfig(lr=1e-5))
    config = Config(method="dapo", model=ModelConfig(path=Path("x")), actor=actor)
    assert (config.actor.clip_ratio_high, config.actor.clip_ratio_c, config.actor.optim.lr) == (0.3, None, 1e-5)
    assert config.actor.optim.weight_decay == OptimConfig().weight_decay


def test_defaults_of_a_block_may_lose_their_effect() -> None:
    """A key of the block that another one of the file switches off is no mistake; a key of the file is one."""
    without_kl = {"method": "grpo", "model": MODEL, "actor": {"use_kl_loss": False}}
    assert list(method_problems(Config.model_validate(without_kl))) == []
    without_kl["actor"] = {"use_kl_loss": False, "kl_loss_coef": 0.05}
    [problem] = method_problems(Config.model_validate(without_kl))
    assert "kl_loss_coef" in problem and "has no effect" in problem


def test_an_unknown_method_is_the_only_mistake(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: dappo\nmodel: {path: x}\nalgorithm: {filter_groups: {max_num_gen_batches: 3}}\n")
    with pytest.raises(
        WrongKeys, match=r"method='dappo': there is no such method; did you mean 'dapo'\? \(known: grpo,"
    ) as caught:
        load_config(path)
    assert "algorithm.filter_groups.enable" in caught.value.keys  # what depends on it is not reported, too


def test_another_method_on_resume_is_the_keys_it_changes() -> None:
    old, new = (
        Config.model_validate({"method": name, "model": MODEL}).model_dump(mode="json") for name in ("grpo", "dapo")
    )
    changed = {one.key: one.resume_class for one in differences(old, new)}
    assert changed["method"] == "applies" and changed["actor.clip_ratio_high"] == "applies"
    assert changed["algorithm.filter_groups.enable"] == "fixed"
    del old["method"]  # a checkpoint of an older program
    assert "method" not in {one.key for one in differences(old, new)}


def test_a_reward_model_is_a_method(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: x}\nactor: {loss_agg_mode: token-mean}\n")
    config = load_config(path, defaults=reward_defaults)
    assert config.method == "reward_model" and config.actor.loss_mode == "bradley_terry"
    assert config.actor.loss_agg_mode == "token-mean" and config.trainer.test_freq == -1
    assert load_config(path, ["reward_model.kind=process"], reward_defaults).method == "process_reward_model"


def test_keys_shows_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "dapo"]) == 0
    shown = capsys.readouterr().out
    assert "2503.14476" in shown and "actor.clip_ratio_high: 0.28   (default 0.2)" in shown
    assert "reward.overlong_buffer.len: data.max_response_length / 5   (default null)" in shown
    with pytest.raises(ConfigError, match="did you mean 'dapo'"):
        print_keys(KeysOptions(section="dappo"))


def test_a_changed_default_is_dated(capsys: pytest.CaptureFixture[str]) -> None:
    """A key's line under a new date, `KEY: DEFAULT`, is what a change of its default needs; old lines stay."""
    dated = {key: value for key, (_, value) in dated_defaults().items()}
    now = {
        key.name: "required" if key.is_required else json.loads(json.dumps(key.default, default=str))
        for key in config_keys(Config)
    }
    changed = {key: (dated.get(key, "no entry"), now.get(key, "no key")) for key in dated.keys() | now.keys()}
    assert [f"{key}: {old} -> {new}" for key, (old, new) in changed.items() if old != new] == [], "config/defaults.yaml"
    assert main(["keys", "actor.vespo_k_pos"]) == 0
    assert capsys.readouterr().out.startswith("actor.vespo_k_pos: 2.0   (float; since 2026-11-28; needs ")


def test_the_plan_and_the_resolved_config_name_the_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["method=dapo", "actor.clip_ratio_high=0.3", "actor.kl_loss_coef=0.001"]
    machine = ["--world-size", "64", "--gpu", "h100", "--resolved-config", str(tmp_path / "resolved.yaml")]
    assert main(["plan", str(ROOT / "examples/llama3_70b.yaml"), *settings, *machine]) == 0
    assert "method            dapo, with actor.clip_ratio_high=0.3\n" in capsys.readouterr().out
    assert load_config(tmp_path / "resolved.yaml").method == "dapo"


def test_an_imported_config_names_the_nearest_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = "clip_ratio_high: 0.28, clip_ratio_c: 10.0, use_kl_loss: false"
    sections = (
        "algorithm: {adv_estimator: grpo, filter_groups: {enable: true}}",
        f"actor_rollout_ref: {{actor: {{{clip}}}}}",
        "data: {max_response_length: 20480}",
        "reward_model: {overlong_buffer: {enable: true, len: 4096, penalty_factor: 0.5}}",
    )
    (tmp_path / "verl.yaml").write_text("\n".join(sections))
    assert main(["import", "verl", str(tmp_path / "verl.yaml")]) == 0
    assert "# Nearest method: `method: dapo`, with actor.clip_ratio_c=10.0\n" in capsys.readouterr().out
    text = "actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.001}}\nalgorithm: {adv_estimator: grpo}\n"
    (tmp_path / "plain.yaml").write_text(text)
    assert main(["import", "verl", str(tmp_path / "plain.yaml")]) == 0
    assert "chord" not in capsys.readouterr().out  # whose batch of expert rows is 0 here


def test_the_table_of_the_docs_is_made_of_the_blocks() -> None:
    """The last column leaves out keys with the program's default."""
    table, kind = "| `method:` | paper | what it changes | when to use it | keys |\n| --- | --- | --- | --- | --- |", ""
    for name, method in methods().items():
        if method.kind != kind:
            kind = method.kind
            table += f"\n| **{kind}** | | | | |"
        keys = ", ".join(f"`{key}: {written(v)}`" for key, v in method.keys.items() if v != DEFAULTS[key])
        link = f"[{method.title}](../examples/{method.example}): `{name}`"
        table += f"\n| {' | '.join([link, method.papers, method.changes, method.use, keys])} |"
    assert table in (ROOT / "docs/algorithms.md").read_text(), f"put this table there:\n\n{table}"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("<think>8+3=11,1+7+1=9</think><answer>91</answer>", [(13, 1.0), (21, 1.0), (48, 1.0)]),
        ("<think>8+3=12,1+7+1=9</think><answer>92</answer> ", [(13, 0.0), (21, 1.0), (48, 0.0)]),
        ("8+3=11,1+7+1=9", [(6, 1.0), (14, 0.0)]),  # a sum that ends with the response: the answer's reward alone
        (" ", []),
    ],
)
def test_the_rule_for_single_steps_of_grpo_process(text: str, steps: list[tuple[int, float]]) -> None:
    rule = runpy.run_path(str(ROOT / "examples/methods/sum_steps.py"))["reward"]
    assert rule(text, "91")["steps"] == steps
