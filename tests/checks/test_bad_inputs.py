"""Bad inputs: each is refused with exit code 2 and one message of key and remedy, before anything starts.

The model has 4 layers, 8 heads in 4 groups, an MLP of 96 and 128 positions (tests/runs.py). The world has 2 ranks,
unless a case sets another number. Most cases call `main` in this process; it must make no process group and no file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.checks.methods import suspicions
from grpo_megatron.cli import main, ranks
from grpo_megatron.config import Config, LoraConfig
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.lora.peft_folder import factor_shapes, write_peft
from grpo_megatron.models.lora.table import matches
from tests.checks.test_models import changed
from tests.printed import run_printed
from tests.runs import cases

TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"
OVERRIDE = "actor.megatron.override_transformer_config"


@pytest.fixture
def refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Call `main` with overrides and check that it refuses; returns the message."""

    def nothing_may_start(*args: object) -> int:
        raise AssertionError("validation let it through")

    monkeypatch.setattr(ranks, "start_ranks", nothing_may_start)
    monkeypatch.setattr(ranks, "start_fork_server", lambda engine: None)
    monkeypatch.setattr("grpo_megatron.cli.run._run", nothing_may_start)
    monkeypatch.chdir(tmp_path)
    output_dir = tmp_path / "not" / "there"

    def call(*arguments: str) -> str:
        if not any(argument.startswith("reward.") for argument in arguments):  # a process takes a second
            monkeypatch.setattr("grpo_megatron.checks.reward_call.call_rewards", lambda *unused: [])
        capsys.readouterr()
        code = main.main(["train", str(run / "run.yaml"), f"trainer.output_dir={output_dir}", *arguments])
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out.startswith("checking, then starting ") and out.count("\n") == 1
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert not torch.distributed.is_initialized()
        assert not output_dir.parent.exists()
        return err

    return call


CASES = r"""
trainer.n_gpus_per_node=12 TP=4 PP=2 => TP=4 x PP=2 = 8 | world size 12 | set PP=1
PP=4 => PP=4 = 4 does not divide the world size 2 | set PP=2 | multiple of 4 ranks
rollout.tensor_model_parallel_size=4 => rollout.tensor_model_parallel_size=4 | world size 2 | =2
trainer.nnodes=2 => trainer.nnodes=2 | torchrun --nnodes 2 --nproc-per-node 2 | set trainer.nnodes=1
trainer.n_gpus_per_node=3 TP=3
    => TP=3 cannot cut | 8 attention heads over 3 leave 2 | 1, 2, 4 | 4 key-value heads and 3 ranks
trainer.n_gpus_per_node=3 PP=3 => PP=3 does not divide the model's 4 layers | one of 1, 2, 4
PP=2 OVERRIDE.num_layers_in_first_pipeline_stage=4 => stage=4 | cannot cut 4 layers | change
actor.megatron.sequence_parallel=true => sequence_parallel=true needs TP > 1 | leave
data.max_response_length=128 => =16 + data.max_response_length=128 = 144 | embeddings 128; lower
actor.ppo_max_token_len_per_gpu=31 => actor.ppo_max_token_len_per_gpu=31 | = 32 | set it to 32 or more
rollout.max_num_batched_tokens=100 rollout.max_num_seqs=256
    => max_num_batched_tokens=100 | max_num_seqs=256 | =256 or more
rollout.max_num_batched_tokens=20 rollout.max_num_seqs=8 rollout.engine_kwargs.enable_chunked_prefill=false
    => rollout.max_num_batched_tokens=20 | = 32 | set it to 32 or more
actor.ppo_mini_batch_size=16 => actor.ppo_mini_batch_size=16 | data.train_batch_size=8 | set it to 8
actor.ppo_mini_batch_size=3 => =3 does not divide data.train_batch_size=8 | leaves 2 | set it to 2
rollout.stop_token_ids=[100,101,-1]
    => rollout.stop_token_ids=[100, 101, -1]: 101, -1 is outside | vocabulary of 0 to 100 | rollout.stop
actor.loss_mode=no_such_module:loss => cannot import module 'no_such_module' | PYTHONPATH
actor.loss_mode=sys:maxsize => actor.loss_mode='sys:maxsize' is not a function | set the name of one
reward.function=tests.e2e.rewards:broken_reward => called on a real row | it fails on a completion with the answer
reward.kwargs.strict=true => reward.function | cannot be called | reward.kwargs | strict
actor.optim.min_lr=1 => actor.optim.min_lr=1 | actor.optim.lr=1e-06 | or less
actor.optim.lr_warmup_steps=16 actor.ppo_mini_batch_size=4 actor.ppo_epochs=2
    => 4 x 2 mini-batches x 2 epochs = 16 updates | set it to 15 or less
actor.optim.lr_decay_style=WSD => actor.optim.lr_decay_style=WSD needs actor.optim.lr_wsd_decay_steps
sft.steps=5 sft.optim.lr_decay_style=WSD sft.optim.lr_wsd_decay_steps=6
    => sft.optim.lr_wsd_decay_steps=6 is more than sft.steps=5 | set it to 5 or less
actor.lora.rank=4 actor.lora.target_modules=[q_proj,qkv_proj]
    => actor.lora.target_modules: 'qkv_proj' matches no linear layer | has down_proj, gate_proj, k_proj, o_proj
actor.lora.rank=4 actor.lora.target_modules=[lm_head]
    => 'lm_head' matches no linear layer that has adapters (head and embedding have none) | has down_proj
actor.lora.rank=4 'actor.lora.target_modules='"'"'(q'"'"'' => '(q' is no regular expression | set a list
actor.lora.rank=4 'actor.lora.exclude_modules=.*'
    => actor.lora.exclude_modules='.*' leaves no layer with an adapter | exclude less
'actor.lora={rank: 4, mode: split, dropout: 0.1}' TP=2 actor.megatron.sequence_parallel=false
    => actor.lora.dropout=0.1: without sequence parallelism | dropout=0
actor.lora.rank=4 actor.lora.mode=split actor.megatron.transformer_impl=transformer_engine
    => actor.lora.mode=split needs Megatron-Core's layers | set mode=merged
actor.lora.rank=4 rollout.sync=delta rollout.free_cache_engine=false
    => rollout.sync=delta with actor.lora.rank=4: a sync sends the adapters alone | set rollout.sync=full
OVERRIDE.recompute_granularty=full => OVERRIDE.recompute_granularty | mean 'recompute_granularity'?
OVERRIDE.calculate_per_token_loss=false => calculate_per_token_loss=False cannot be set | leave it out
OVERRIDE.tensor_model_parallel_size=2 => OVERRIDE.tensor_model_parallel_size=2 | set TP
rollout.engine_kwargs.tensor_parallel_size=2 => set rollout.tensor_model_parallel_size
data.train_files=[] => trainer.total_training_steps=4 needs prompts | set data.train_files
data.val_files=[] => val_before_train=true | needs data.val_files | val_before_train=false
data.val_files=[] trainer.val_before_train=false => trainer.test_freq=5 | test_freq=-1
sft.steps=3 sft.train_files=[] => sft.steps=3 | set sft.train_files
data.train_files=[nowhere.jsonl] => data.train_files: cannot read data file 'nowhere.jsonl' | No such file
model.path=Qwen/Qwen2.5-0.5B => 'Qwen/Qwen2.5-0.5B': it is not a folder, and as an id of the Hub | HF_HUB_OFFLINE
model.tokenizer_path=nowhere => 'nowhere' does not exist | model.tokenizer_path
sft.steps=3 data.max_response_length=1 => sft.train_files | 1 response tokens | nothing is left
algorithm.source=file actor.loss_mode=sft algorithm.adv_estimator=constant
    => data.train_files:  | 'response' is missing | reads rows {"prompt", "response"} or {"messages"})
trainer.logger=[wandb] => trainer.logger=['wandb'] | pip install wandb
ref.path=nowhere => ref.path='nowhere': it is not a folder
"""


@pytest.mark.parametrize(("overrides", "expected"), cases(CASES, TP=TP, PP=PP, OVERRIDE=OVERRIDE))
def test_a_wrong_value_is_refused(refused: Callable[..., str], overrides: list[str], expected: list[str]) -> None:
    if "trainer.logger=[wandb]" in overrides and "wandb" in sys.modules:
        pytest.skip("wandb is installed")
    message = refused(*overrides)
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": None}, "num_layers=None, not a positive integer"),
        ({"num_key_value_heads": 3}, "8 attention heads in 3 key-value groups"),
        ({"num_hidden_layers": 5}, "missing model.layers.4.input_layernorm.weight"),
        ({"vocab_size": 10}, "has 18 tokens and the model's embedding 10 rows"),
        (None, "cannot read config.json"),
        ("{", "config.json is not JSON"),
    ],
)
def test_a_wrong_model_folder_is_refused(
    run: Path, tmp_path: Path, refused: Callable[..., str], config: dict[str, object] | str | None, expected: str
) -> None:
    folder = shutil.copytree(run / "model", tmp_path / "model")
    file = folder / "config.json"
    if config is None:
        file.unlink()
    else:
        file.write_text(config if isinstance(config, str) else json.dumps({**json.loads(file.read_text()), **config}))
    assert expected in refused(f"model.path={folder}")


@pytest.mark.parametrize("damage", ["absent", "cut short"])
def test_wrong_weights_are_refused(run: Path, tmp_path: Path, refused: Callable[..., str], damage: str) -> None:
    folder = shutil.copytree(run / "model", tmp_path / "model")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2])
    message = refused(f"model.path={folder}")
    assert "model.path: " in message
    assert ("no *.safetensors file" if damage == "absent" else "not a readable safetensors file") in message


def test_a_reference_of_another_architecture_is_refused(run: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused(f"ref.path={changed(run, tmp_path / 'model', rms_norm_eps=1e-5)}")
    assert "norm_eps 1e-05 against 1e-06" in message
    assert "set actor.use_kl_loss=false" in message


@pytest.fixture(scope="module")
def adapters(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder of rank 4 for the run's model."""
    folder, arch = tmp_path_factory.mktemp("adapters"), read_architecture(run / "model")
    lora = LoraConfig.model_validate({"rank": 4, "alpha": 8})
    tensors = {name: torch.ones(shape) for name, shape in factor_shapes(arch, lora).items()}
    write_peft(folder, tensors, lora, arch, run / "model", "float32")
    return folder


def setting(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return rewrite


OF_K = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
BAD_ADAPTERS: list[tuple[Callable[[Path], object], str]] = [
    (setting(use_dora=True), "use_dora=True: only W0 + s B A of linear layers is supported"),
    (setting(bias="lora_only", modules_to_save=["lm_head"]), "modules_to_save=['lm_head'], bias='lora_only': only W0"),
    (setting(rank_pattern={"q_proj": 8}), "rank_pattern={'q_proj': 8}: only one rank and one alpha of all"),
    (
        setting(use_tomorrow={"a": 1}),
        "use_tomorrow={'a': 1}: only W0 + s B A of linear layers is supported, without more",
    ),
    (setting(velora_config={"rank": 1}), "without more; let PEFT merge them (merge_and_unload) and set model.path"),
    (setting(peft_type="IA3"), "peft_type='IA3': only"),
    (setting(init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4': only"),
    (setting(r=8), "has adapters of rank 8 and scale 1; set rank=8"),
    (setting(r=-1), "r=-1, lora_alpha=8 are no rank and scale of adapters"),
    (setting(lora_alpha=16), "has adapters of rank 4 and scale 4; set alpha=16.0"),
    (setting(use_rslora=True), "has adapters of rank 4 and scale 4; set use_rslora=True"),
    (tensors(lambda found: found.pop(OF_K)), f"missing {OF_K}"),
    (tensors(lambda found: found.update({OF_K: torch.ones(4, 7)})), f"{OF_K} has shape (4, 7), expected (4, 64)"),
    (
        tensors(lambda found: found.update({OF_K: found[OF_K].to(torch.float8_e4m3fn)})),
        f"{OF_K} is in float8_e4m3fn; save the adapters in bfloat16",
    ),
    (
        tensors(lambda found: found[OF_K].fill_(3e38)),
        "layers.1.self_attn.k_proj may overflow: its factors are too large",
    ),
    (tensors(lambda found: found[OF_K].fill_(torch.nan)), f"{OF_K} has values that are no finite numbers"),
    (tensors(lambda found: found.update({OF_K.replace("1", "9"): torch.ones(1)})), "unexpected base_model.model"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"{}"), "not a readable safetensors file"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors; save"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "not a readable PEFT config"),
    (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "not a readable PEFT config"),
]


@pytest.mark.parametrize(("damage", "expected"), BAD_ADAPTERS)
def test_adapters_to_start_from_are_checked(
    adapters: Path, tmp_path: Path, refused: Callable[..., str], damage: Callable[[Path], object], expected: str
) -> None:
    folder = shutil.copytree(adapters, tmp_path / "adapters")
    damage(folder)
    message = refused("actor.lora={rank: 4, alpha: 8}", f"actor.lora.path={folder}")
    assert message.startswith("error: actor.lora.path") and expected in message, message


@pytest.mark.parametrize(
    ("written", "given", "expected"),
    [
        ({"lora_alpha": None}, {}, (4, 8.0, ["q_proj", "k_proj"], False)),
        ({"layers_to_transform": [0, 11]}, {}, (4, 8.0, ["0.q_proj", "0.k_proj", "11.q_proj", "11.k_proj"], True)),
        (
            {"target_modules": r".*\.1\..*q_proj", "exclude_modules": ["k_proj"]},
            {"alpha": 2.0},
            (4, 2.0, ["1.q_proj"], True),
        ),
    ],
)
def test_the_folder_gives_what_the_config_leaves_out(
    tmp_path: Path, written: dict[str, object], given: dict[str, object], expected: tuple[object, ...]
) -> None:
    """An absent lora_alpha is PEFT's 8. Layers are compared by the names of a model of 12 layers that the rule matches."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"], **written}
    settings = {key: value for key, value in settings.items() if value is not None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    lora = LoraConfig.model_validate({"path": tmp_path, **given})
    names = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(12) for x in "qkv"]
    found = [n for n in names if matches(n, lora.target_modules) and not matches(n, lora.exclude_modules)]
    rank, alpha, ends, numbered = expected
    wanted = [f"model.layers.{one.replace('.', '.self_attn.')}" for one in ends] if numbered else None  # type: ignore[attr-defined]
    assert (lora.rank, lora.alpha) == (rank, alpha)
    assert found == (wanted or [name for name in names if name.endswith(("q_proj", "k_proj"))])


@pytest.mark.parametrize(
    ("base", "is_noted"), [("model", False), ("x/model", False), ("other", True), ("x/other", True)]
)
def test_adapters_of_another_base_are_noted(adapters: Path, tmp_path: Path, base: str, is_noted: bool) -> None:
    """A folder is compared by its path, a model of the Hub by its name."""
    folder, model = shutil.copytree(adapters, tmp_path / "adapters"), tmp_path / "model"
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    setting(base_model_name_or_path=base if "/" in base else str(tmp_path / base))(folder)
    config = Config.model_validate({"model": {"path": model}, "actor": {"lora": {"path": folder}}})
    found = [text for text in suspicions(config) if "on another base they have no meaning" in text]
    assert len(found) == is_noted


def test_a_rank_of_the_folder_is_an_integer(adapters: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(adapters, tmp_path / "adapters")
    setting(r="four")(folder)
    with pytest.raises(ValueError, match=r"adapter_config.json' has r='four', which is no integer"):
        LoraConfig.model_validate({"path": folder})


def test_a_peft_folder_is_no_model(adapters: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused(f"model.path={adapters}")
    assert f"model.path='{adapters}' has adapters only; set model.path to their base" in message
    assert run_printed(message, tmp_path, OUT="merged") == ["convert"] and (tmp_path / "merged/config.json").exists()


def test_other_layers_than_those_of_the_adapters_are_refused(adapters: Path, refused: Callable[..., str]) -> None:
    message = refused("actor.lora={rank: 4, alpha: 8, target_modules: [q_proj]}", f"actor.lora.path={adapters}")
    assert f"unexpected {OF_K}" in message and "target_modules must name its layers" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "1 + 2 ="}\n', "line 2: field 'answer' is missing"),
        ('{"prompt": "1 + 1 =", "answer": "two"}\n', "line 1: field 'answer' is 'two', not an integer"),
        ("\n", "has no rows"),
    ],
)
def test_wrong_rows_are_reported_by_file_line_and_field(
    tmp_path: Path, refused: Callable[..., str], content: str, expected: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    message = refused(f"data.train_files=[{file}]", f"data.val_files=[{file}]", "rollout.n=1")
    for key in ("data.train_files", "data.val_files"):
        assert f"{key}: data file {str(file)!r}" in message
    assert message.count(expected) == 2
    assert "rollout.n=1" in message


def test_an_option_of_plans_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", str(run / "run.yaml"), "--world-size=4"]) == 2
    assert "--world-size" in capsys.readouterr().err


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    assert f"{str(file)!r} is a file, not a folder; choose another" in refused(f"trainer.output_dir={file}/run")
    (link := tmp_path / "link").symlink_to("gone")
    assert f"{str(link)!r} is a link that leads nowhere; choose another" in refused(f"trainer.output_dir={link}")


def test_a_missing_package_is_refused_before_a_run_only(
    run: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run makes its plan without Megatron-Core."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "megatron" else find_spec(name, *rest)
    )
    assert "the package 'megatron' is not installed; pip install megatron-core" in refused()
    assert main.main(["train", str(run / "run.yaml"), "--dry-run"]) == 0
    assert "Memory of one rank" in capsys.readouterr().out


ROOT = Path(__file__).resolve().parents[2]
NO_TOKENIZER = "model.tokenizer_path=nowhere"  # the process then does not import transformers, which takes seconds


@pytest.mark.slow
def test_two_ranks_report_each_problem_once(run: Path, tmp_path: Path) -> None:
    """Started by torchrun: the program prints one line, and torchrun's table repeats it as the root cause."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "grpo_megatron", "train", str(run / "run.yaml"), f"{TP}=4", NO_TOKENIZER]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("error: actor.megatron") == 1, done.stderr
    before, _, table = done.stderr.partition("Root Cause")
    assert f"{TP}=4" in before and f"{TP}=4" in table
    assert done.stderr.count("Traceback") == 1, "there must be torchrun's traceback only"
    assert list(tmp_path.iterdir()) == []
