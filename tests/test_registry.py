"""Names and facts: of registered entries, of the user's own functions, and of names that stand for nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import LossFacts, policy_losses
from grpo_megatron.algo.plan import token_weightings
from grpo_megatron.registry import FactRegistry, Registry, did_you_mean, import_function


@dataclass(frozen=True)
class Facts:
    heavy: bool = False
    modes: tuple[str, ...] = ()


things: FactRegistry[object, Facts] = FactRegistry("thing", Facts())


@things.register("box", "crate", heavy=True)
def box() -> None: ...


@things.register("feather")
def feather() -> None: ...


@things.declare(modes=("a",))
def own() -> None: ...


@dataclass
class Unhashable:
    """A callable with a state, as a user's loss with parameters may be."""

    size: int

    def __call__(self) -> None: ...


unhashable = things.declare(heavy=True)(Unhashable(1))
equal = Unhashable(1)


def test_facts_follow_the_entry_under_every_name() -> None:
    assert things.facts("box") == things.facts("crate") == things.facts(f"{__name__}:box") == Facts(heavy=True)
    assert things.facts("feather") == things.defaults == Facts()
    assert things.names_with(heavy=True) == ["box", "crate"]
    assert things.names_with(heavy=False, modes=()) == ["feather"]


def test_a_name_of_other_programs_leads_to_the_one_of_the_same_meaning() -> None:
    for registry, given, ours in (
        (advantage_estimators, "ppo", "gae"),
        (advantage_estimators, "REINFORCE++", "reinforce_plus_plus"),
        (advantage_estimators, "reinforce", "reinforce_plus_plus"),
        (advantage_estimators, "rloo_norm", "rloo"),
        (policy_losses, "ppo", "vanilla"),
        (policy_losses, "GSPO-token", "gspo_token"),
        (token_weightings, "dr_grpo", "seq-mean-token-sum-norm"),
        (token_weightings, "token_mean", "token-mean"),
    ):
        assert did_you_mean(given, registry.names()) == f"; did you mean {ours!r}?"
    assert did_you_mean("ppo", ["opo"]) == "; did you mean 'opo'?"


def test_facts_of_a_users_own_function() -> None:
    assert things.facts(f"{__name__}:own") == Facts(modes=("a",))
    assert things.facts(f"{__name__}:test_facts_of_a_users_own_function") == Facts()
    assert things.facts(f"{__name__}:unhashable") == Facts(heavy=True)
    assert things.facts(f"{__name__}:equal") == Facts()  # the same value, another object


@pytest.mark.parametrize("name", ["bx", "no.such.module:f", f"{__name__}:absent", "tests.not_a_module:f"])
def test_a_name_that_stands_for_nothing_has_the_defaults(name: str) -> None:
    assert things.facts(name) == Facts()
    with pytest.raises(ValueError):
        things.get(name)


def test_an_unknown_fact_is_a_type_error_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"unknown fact of a thing: havy \(known: heavy, modes\)"):
        things.register("anvil", havy=True)
    with pytest.raises(TypeError, match="unknown fact of a policy loss: pared"):
        policy_losses.declare(pared=True)
    assert "anvil" not in things.names()


def test_an_aggregation_is_a_tuple() -> None:
    with pytest.raises(TypeError, match="aggregation='token-mean' is not a tuple; write \\('token-mean',\\)"):
        LossFacts(aggregation="token-mean")  # type: ignore[arg-type]


def test_twice_is_refused() -> None:
    names: Registry[object] = Registry("thing")
    names.register("a", "b")(1)
    assert names.get("b") == 1 and names.names() == ["a", "b"]
    with pytest.raises(AssertionError, match="thing 'b' is registered twice"):
        names.register("c", "b")(2)
    with pytest.raises(AssertionError, match="declared twice"):
        things.declare(heavy=True)(own)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_package", "an import in module 'inner_fault' fails (No module named 'no_such_package')"),
        ("from math import no_such_name", "an import in module 'inner_fault' fails (cannot import name 'no_such_name'"),
        (None, "cannot import module 'inner_fault'"),
    ],
)
def test_an_import_that_fails_inside_a_module_is_named(
    text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "inner_fault.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(expected)):
        import_function("inner_fault:reward")


def test_an_object_with_a_dot_before_its_name_is_recognised() -> None:
    registry: Registry[Any] = Registry("reward")
    for name, form in (("mine.score", "mine:score"), ("a/mine.py", "a/mine:NAME"), ("a.b.score", "a.b:score")):
        with pytest.raises(ValueError, match=f"unknown reward '{name}'; write {form} "):
            registry.get(name)
