"""Healing: which ranks start again after a failure, in which layout, and that the run is then the undisturbed one."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.checks.layout import healing_problems
from grpo_megatron.checks.models import read_models
from grpo_megatron.cli.failures import LAUNCHER_PID, Cause
from grpo_megatron.cli.healing import MAX_FAILURES, MAX_LOSSES, RESUME, Fallbacks, Healing
from grpo_megatron.cli.keeper import keep_rank
from grpo_megatron.cli.main import main
from grpo_megatron.cli.ranks import Restart
from grpo_megatron.config import Config
from grpo_megatron.config.problems import Problem
from grpo_megatron.parallel.control import INCARNATION, JOINED_FILE
from grpo_megatron.planning.gpus import GPUS, REFERENCE
from grpo_megatron.storage.files import MEMORY_FOLDER
from grpo_megatron.storage.run_files import read_events
from grpo_megatron.training.stopping import EXIT_TO_GROW, HEARTBEAT
from tests import tiny
from tests.soak.soak import make_workspace, run_command, soak_settings
from tests.stored import TIMES, rows_without

SIZES = {
    "vocab_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}  # exact over tp 2


class Planned:
    """Layouts of a run of four ranks: for 2 of 3 or 2 that are left, none for one."""

    world_size, unit, has_nodes = 4, 1, False

    def restart(self, num_devices: int) -> Restart | None:
        return {0: None, 1: None, 2: Restart(2), 3: Restart(2)}.get(num_devices, Restart(4))


def killed(*ranks: int) -> Cause:
    return Cause(137, f"rank {ranks} was ended by SIGKILL", is_loss=True, ranks=ranks, is_final=False)


def raised(message: str) -> Cause:
    return Cause(1, f"a traceback of {message}", is_final=False, message=message)


@pytest.fixture
def heal(tmp_path: Path) -> Callable[..., Healing]:
    def build(**settings: Any) -> Healing:
        trainer = {"output_dir": str(tmp_path), "n_gpus_per_node": 4, "healing": {"layouts": "auto", **settings}}
        return Healing(Config.model_validate({"model": {"path": "m"}, "trainer": trainer}), Planned())  # type: ignore[arg-type]

    return build


def devices(restart: Restart | None) -> list[int] | None:
    return None if restart is None else restart.devices


def test_a_spare_replaces_a_lost_rank_and_then_fewer_ranks_go_on(heal: Callable[..., Healing]) -> None:
    run = heal(spares=1)
    assert devices(run.after(killed(1))) == [0, 2, 3, 4]
    assert devices(run.after(killed(3))) == [0, 1, 2, 3]  # device 4, the fourth rank; 1 is back: it was lost once
    assert run.losses == {1: 1, 4: 1}


def test_fewer_ranks_go_on_and_two_may_be_lost_at_once(heal: Callable[..., Healing]) -> None:
    run = heal()
    assert devices(run.after(killed(0, 2))) == [1, 3]
    assert run.used == [1, 3] and run.losses == {0: 1, 2: 1}


def test_a_lost_device_is_used_again_where_no_other_is_left_and_not_after_three_losses(
    heal: Callable[..., Healing],
) -> None:
    run = heal()
    run.losses.update({0: MAX_LOSSES, 1: MAX_LOSSES})
    assert devices(run.after(killed(2))) == [2, 3]  # device 3 alone has no layout
    assert devices(run.after(killed(0))) == [2, 3]
    assert run.after(killed(0)) is None  # device 2 for the third time


def test_lost_devices_are_tried_again_after_a_step_and_later_after_ten(heal: Callable[..., Healing]) -> None:
    run, grown = heal(), Cause(EXIT_TO_GROW, "")
    for steps in (1, 10):
        restart = run.after(killed(1))
        assert restart is not None and (restart.devices, restart.grow_after) == ([0, 2], steps)
        restart = run.after(grown)
        assert restart is not None and (restart.devices, restart.grow_after) == ([0, 1, 2, 3], None)
    restart = run.after(killed(1))  # for the third time
    assert restart is not None and (restart.devices, restart.grow_after) == ([0, 2], None)


def test_the_same_exception_twice_without_a_step_ends_the_run(heal: Callable[..., Healing], tmp_path: Path) -> None:
    run = heal()
    assert devices(run.after(raised("KeyError"))) == [0, 1, 2, 3]  # nobody is lost
    assert run.after(raised("ValueError")) is not None
    (tmp_path / HEARTBEAT).write_text("7")
    assert run.after(raised("KeyError")) is not None  # steps were made in between
    assert run.after(raised("KeyError")) is None


def test_many_losses_without_a_step_and_errors_with_a_remedy_end_the_run(heal: Callable[..., Healing]) -> None:
    run = heal(spares=1024)
    assert all(run.after(killed(0)) is not None for _ in range(MAX_FAILURES)) and run.after(killed(0)) is None
    assert heal().after(Cause(2, "error: trainer.output_dir is full")) is None
    assert heal().after(Cause(75, "")) is None  # it was asked to stop


def test_what_healing_cannot_do_is_refused() -> None:
    settings = {"nnodes": 2, "save_freq": -1, "healing": {"layouts": "auto"}}
    (problem,) = healing_problems(Config.model_validate({"model": {"path": "m"}, "trainer": settings}))
    assert "save_freq=-1" in Problem.of(problem).text


def test_ranks_that_another_launcher_has_started_are_not_healed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "torchrun.yaml"
    path.write_text(yaml.safe_dump(exact_run(root, root / "never", 1, healing={"layouts": "auto"})))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "ranks that torchrun or srun has started are not started again" in capsys.readouterr().err
    assert not (root / "never").exists()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a model that model.exact covers in tp 2."""
    root = make_workspace(tmp_path_factory.mktemp("healing"))
    for file in (root / "model").glob("*.safetensors"):
        file.unlink()
    tiny.make_model(root / "model", "qwen2", **SIZES)
    return root


def exact_run(root: Path, output: Path, ranks: int, tp: int = 1, **trainer: Any) -> dict[str, Any]:
    raw = soak_settings(root, output, 4, engine="transformers")
    raw["model"]["exact"] = True
    del raw["algorithm"]
    raw["trainer"] |= {"n_gpus_per_node": ranks, "save_freq": 1, "test_freq": -1, **trainer}
    raw["actor"]["megatron"] = {"tensor_model_parallel_size": tp}
    return raw


@pytest.mark.parametrize(
    ("ending", "has_joined", "incarnations", "code"),
    [
        ("killed", True, 4, -9),
        ("killed", False, 1, -9),  # the ranks that train wait in the constructor of a group, and notice nothing
        ("a loss after an exception", True, 1, 1),
    ],
)
def test_a_keeper_replaces_a_lost_rank_that_has_joined(
    tmp_path: Path, ending: str, has_joined: bool, incarnations: int, code: int
) -> None:
    """The symptom of another rank's exception is no loss: the run would go on, and would not say why."""
    files = [tmp_path / f"run/attempt_0/{rank}/error.json" for rank in (0, 1)]
    if (pid := os.fork()) == 0:
        try:
            os.environ |= {"TORCHELASTIC_ERROR_FILE": str(files[1]), LAUNCHER_PID: "1"}
            keep_rank()
            (tmp_path / f"begun_{os.environ[INCARNATION]}").touch()
            if has_joined:
                Path(os.environ[JOINED_FILE]).touch()
            if ending == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            for time_ns, file in enumerate(files):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"report": {"is_loss": time_ns > 0, "time_ns": time_ns}}))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert len([*tmp_path.glob("begun_*")]) == incarnations


def test_the_fallback_is_the_nearest_layout_that_all_checks_of_a_layout_accept(root: Path) -> None:
    """Four key heads and exact blocks of 64 of the vocabulary: tp 4 is refused, and 3 divides no head."""
    raw = exact_run(root, root / "planned", 2, tp=2, healing={"layouts": "auto"})
    config = Config.model_validate(raw)
    fallbacks = Fallbacks(config, read_models(config), GPUS[REFERENCE])
    assert fallbacks.restart(1) == Restart(
        1, [RESUME, "trainer.n_gpus_per_node=1", "actor.megatron.tensor_model_parallel_size=1"]
    )
    assert fallbacks.restart(2) == Restart(2, [RESUME]) and fallbacks.restart(0) is None
    assert any("1 train" in text and "tensor_model_parallel_size=1" in text for _, text in fallbacks.lines())
    assert not any("estimated" in text for _, text in fallbacks.lines())  # a CPU's seconds are not those of a GPU
    nodes = Fallbacks(
        config.with_values({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}), read_models(config), GPUS[REFERENCE]
    )
    assert nodes.restart(1) == Restart(1, [RESUME, "trainer.nnodes=1", "actor.megatron.tensor_model_parallel_size=1"])
    (seconds,) = (text for name, text in nodes.lines() if not name)
    whole, parts = re.findall(r"first sample (\d+) s \(estimated\): (.*)", seconds)[0]
    assert float(whole) == round(sum(map(float, re.findall(r"(?:^|, )([\d.e-]+) ", parts)))) == 32, parts
    none = config.with_values({"trainer.healing.layouts": "same"})
    assert Fallbacks(none, read_models(none), GPUS[REFERENCE]).restart(1) is None


def test_of_two_roles_ranks_that_sample_are_given_up_first(root: Path) -> None:
    """Two train in tp 2, three sample: 4 and 3 left, 2 train; 2 left, one trains, in tp 1. One left cannot have both roles."""
    raw = exact_run(root, root / "planned", 5, tp=2, healing={"layouts": "auto"})
    raw["rollout"] |= {"placement": "separate", "num_ranks": 3}
    config = Config.model_validate(raw)
    fallbacks = Fallbacks(config, read_models(config), GPUS[REFERENCE])
    for left in (4, 3):
        fewer = [RESUME, f"trainer.n_gpus_per_node={left}", f"rollout.num_ranks={left - 2}"]
        assert fallbacks.restart(left) == Restart(left, fewer)
    two = [RESUME, "trainer.n_gpus_per_node=2", "rollout.num_ranks=1", "actor.megatron.tensor_model_parallel_size=1"]
    assert fallbacks.restart(2) == Restart(2, two) and fallbacks.restart(1) is None
    lines = dict(fallbacks.lines())
    assert lines["3 left"].startswith("2 train, 1 sample: ") and lines["1 left"].startswith("no layout fits")

    on_nodes = {"trainer.nnodes": 4, "trainer.n_gpus_per_node": 2, "rollout.num_ranks": None, "rollout.num_nodes": 3}
    config = config.with_values(on_nodes)
    fallbacks = Fallbacks(config, read_models(config), GPUS[REFERENCE])
    assert fallbacks.restart(2) == Restart(4, [RESUME, "trainer.nnodes=2", "rollout.num_nodes=1"])
    assert fallbacks.restart(1) is None


@pytest.mark.parametrize(("tp", "memory"), [(1, True), pytest.param(2, False, marks=pytest.mark.soak)])
def test_a_run_that_loses_a_rank_goes_on_with_fewer_grows_again_and_has_the_bits_of_the_undisturbed_one(
    root: Path, tmp_path: Path, tp: int, memory: bool
) -> None:
    """One of two ranks dies in the update of its third step; one makes a step, from memory or a checkpoint; then two go on.

    The state after step 1 is in memory for certain: that after step 2 waits for it.
    """
    healed, undisturbed, freq = tmp_path / "healed", tmp_path / "undisturbed", -1 if memory else 1
    fault = {"point": "update_actor", "count": 3, "rank": 1, "action": "kill rank"}
    fault["once"] = str(tmp_path / "killed")
    raw = exact_run(root, healed, 2, tp, healing={"layouts": "auto", "memory": memory}, save_freq=freq)
    code, out, err, survivors = run_command(raw, tmp_path, SOAK_FAULT=json.dumps(fault))
    assert (code, survivors) == (0, []), err
    assert "rank 1 was ended by SIGKILL" in err and "healing: lost rank 1 after 2 steps" in out, out
    assert f"resumed from {MEMORY_FOLDER if memory else healed}" in out
    if memory:  # the folder has gone with the launcher
        assert not Path(out.partition("resumed from ")[2].partition("/checkpoints")[0]).exists()
    code, _, err, _ = run_command(exact_run(root, undisturbed, 1, save_freq=freq), tmp_path)
    assert code == 0, err
    names = (*TIMES, "global_seqlen/", "sync/")  # of the ranks
    assert rows_without(healed, names) == rows_without(undisturbed, names)
    assert [row["step"] for row in rows_without(healed)] == [0, 1, 2, 3]
    name = "hf/model.safetensors"
    assert (healed / name).read_bytes() == (undisturbed / name).read_bytes()
    events = [event for event in read_events(healed) if event["kind"] != "failed"]
    kinds = ["started", "lost", "resumed", "healed", "grown", "resumed", "done"]
    assert [event["kind"] for event in events] == kinds
    assert events[1]["step"] == 2 and events[3]["step"] in ((1, 2) if memory else (2,))


@pytest.mark.parametrize(
    ("lag", "faults"),
    [
        (0, [("gen", 2, "kill rank")]),
        pytest.param(0, [("wait_weights", 2, "stop rank")], marks=pytest.mark.soak),
        pytest.param(1, [("gen", 3, "kill rank"), ("wait_weights", 1, "kill rank")], marks=pytest.mark.soak),
        pytest.param(2, [("reward", 2, "kill rank"), ("gen", 1, "cut network")], marks=pytest.mark.soak),
    ],
)
def test_ranks_that_train_go_on_while_lost_ones_that_sample_are_replaced(
    root: Path, tmp_path: Path, lag: int, faults: list[tuple[str, int, str]]
) -> None:
    """Equal, bit for bit, to the undisturbed run, whose weights of earlier steps the training rank has kept."""

    def run(name: str, **options: Any) -> tuple[str, str]:
        raw = exact_run(root, tmp_path / name, 2, save_freq=-1, **options)
        raw["model"]["exact"] = lag == 0  # another lag has samples of other weights
        raw["rollout"] |= {"placement": "separate", "num_ranks": 1, "lag": lag}
        code, out, err, survivors = run_command(raw, tmp_path, SOAK_FAULT=json.dumps(losses if options else []))
        assert (code, survivors) == (0, []), err
        return out, err

    losses: list[dict[str, Any]] = []
    for point, count, action in faults:
        after = {"after": losses[-1]["once"]} if losses else {}
        once = str(tmp_path / f"loss_{len(losses)}")
        losses.append({"point": point, "count": count, "rank": 1, "action": action, "once": once, **after})
    out, err = run("healed", healing={"layouts": "auto"})
    assert out.count("healing: lost the connection to rollout rank 0 (rank 1 of the run)") == len(losses), out
    assert "resumed from" not in out and (not err or faults[-1][-1] == "cut network"), err  # of which gloo dies
    run("undisturbed")
    healed, undisturbed = tmp_path / "healed", tmp_path / "undisturbed"
    names = (*TIMES, "sync/bytes_received")
    assert rows_without(healed, names) == rows_without(undisturbed, names)
    name = "hf/model.safetensors"
    assert (healed / name).read_bytes() == (undisturbed / name).read_bytes()
    assert [event["kind"] for event in read_events(healed)] == ["started", *["lost", "healed"] * len(losses), "done"]
