"""The reward `calls`, against recorded verdicts of BFCL's own checker.

`VERDICTS` are those of `default_decode_ast_prompting` and `ast_checker` of bfcl-eval 2026.3.23; the soak test asks again
where it is installed (`pip install --no-deps bfcl-eval`). By hand, both agreed on 9,404 answers: four for each row of its
single-turn Python files, 3 of 4 with changed values, types, order or number. So did its system prompts of 1,806 rows.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.data.task import get_task
from grpo_megatron.environments.call_matching import calls_reward, read_calls
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardItem

TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "float"},
    "dry": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "box": {"type": "tuple", "items": {"type": "float"}},
    "about": {"type": "dict"},
    "stops": {"type": "array", "items": {"type": "dict"}},
}
SCHEMA = {"name": "trip.plan", "parameters": {"type": "dict", "properties": TYPES, "required": ["city"]}}
OTHER = {"name": "now", "parameters": {"type": "dict", "properties": {}, "required": []}}
TABLE = {"color": ["red", ""], "size": [1]}
ALLOWED = {
    "city": ["New York, NY", "NYC"],
    "days": [3, "n", ""],
    "share": [0.5, ""],
    "dry": [True, ""],
    "tags": [["a b", "c"], ""],
    "box": [[1.0, 2.0], ""],
    "about": [TABLE, ""],
    "stops": [[TABLE, TABLE], ""],
}
ONE, TWO = [{"trip.plan": ALLOWED}], [{"trip.plan": ALLOWED}, {"now": {}}]
VERDICTS: list[tuple[str, list[Any], bool]] = [
    ("[trip.plan(city='new york ny')]", ONE, True),
    ("`trip.plan(city='NYC', days=3)`", ONE, True),
    ("[trip.plan(city='NYC', days=3.0)]", ONE, False),
    ("[trip.plan(city='NYC', days=n)]", ONE, False),
    ("[trip.plan(city='NYC', share=1)]", ONE, False),
    ("[trip.plan(city='NYC', dry=1)]", ONE, False),
    ("[trip.plan(city='NYC', dry=True, share=0.5)]", ONE, True),
    ("[trip.plan(city='NYC', tags=['A-B', 'c'])]", ONE, True),
    ("[trip.plan(city='NYC', tags=['c', 'ab'])]", ONE, False),
    ("[trip.plan(city='NYC', tags=[1])]", ONE, False),
    ("[trip.plan(city='NYC', box=(1.0, 2.0))]", ONE, True),
    ("[trip.plan(city='NYC', box=(1, 2))]", ONE, True),
    ("[trip.plan(city='NYC', about={'size': 1})]", ONE, True),
    ("[trip.plan(city='NYC', about={'color': 'RED'})]", ONE, False),
    ("[trip.plan(city='NYC', stops=[{'size': 1}, {'size': 1, 'color': 'red'}])]", ONE, True),
    ("[trip.plan(city='NYC', stops=[{'size': 1}])]", ONE, False),
    ("[trip.plan(city='NYC', mode='car')]", ONE, False),
    ("[trip.plan(days=3)]", ONE, False),
    ("[trip.plan(city='NYC', about={[1]: 2})]", ONE, False),
    ("[trip_plan(city='NYC')]", ONE, False),
    ("[now(), trip.plan(city='NYC')]", TWO, True),
    ("[trip.plan(city='NYC'), trip.plan(city='NYC')]", TWO, False),
    ("[trip.plan(city='NYC')]", TWO, False),
    ("[trip.plan(city='NYC'), now()]", ONE + ONE, False),
    ("[trip.plan(city=-1)]", ONE, False),
    ("I cannot do that.", ONE, False),
]


def right(completion: str, allowed: Any, id: str = "") -> bool:
    return calls_reward(completion, json.dumps(allowed), function=[SCHEMA, OTHER], id=id)["score"] == 1


@pytest.mark.parametrize(("completion", "allowed", "verdict"), VERDICTS)
def test_calls_are_matched_as_by_bfcl(completion: str, allowed: list[Any], verdict: bool) -> None:
    assert right(f"<think>[now()]</think>\n{completion}", allowed) is verdict


@pytest.mark.soak
def test_the_recorded_verdicts_are_bfcls(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bfcl_eval")
    absent = {
        "constants.model_config": {"MODEL_CONFIG_MAPPING": {"x": SimpleNamespace(underscore_to_dot=False)}},
        "eval_checker.ast_eval.type_convertor.java_type_converter": {"java_type_converter": None},
        "eval_checker.ast_eval.type_convertor.js_type_converter": {"js_type_converter": None},
    }  # they import the clients of all models, and tree-sitter
    for name, entries in absent.items():
        module = ModuleType(name)
        vars(module).update(entries)
        monkeypatch.setitem(sys.modules, f"bfcl_eval.{name}", module)
    check = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    for completion, allowed, verdict in VERDICTS:
        try:  # its decoder is ours on these texts: it stands in a module that imports all of its packages
            calls = [dict([call]) for call in read_calls(completion)]
        except (SyntaxError, ValueError):
            assert not verdict
            continue
        found = check([SCHEMA, OTHER], calls, allowed, python, "parallel", "x")
        assert found["valid"] is verdict, completion


def test_other_forms_of_calls_and_of_rows() -> None:
    hermes = '<tool_call>\n{"name": "trip.plan", "arguments": {"city": "NYC", "days": 3}}\n</tool_call>'
    assert right(hermes, ONE) and not right(hermes.replace("}}", "}"), ONE)
    assert right("No function fits.", []) and not right("[now()]", [])
    assert calls_reward("No.", "", id="irrelevance_1")["score"] == 1
    with pytest.raises(ValueError, match="row 'simple_1' has no ground_truth; join"):
        calls_reward("[now()]", "", function=[OTHER], id="simple_1")
    assert right("[now()]", [], id="live_relevance_0") and not right("Sorry.", (), id="live_relevance_0")
    assert read_calls("[f(x=g(y=1), z=[{'a': (1, -2)}], v=k(2), u=m[3])]") == [
        ("f", {"x": {"g": {"y": 1}}, "z": [{"a": (1, -2)}], "v": "k(2)", "u": "m[3]"})
    ]
    assert not right("[trip.plan(city=where.to)]", ONE)  # unreadable, as to BFCL
    with pytest.raises(ValueError, match="no schema in `function` is called 'later'"):
        right("[now()]", [{"later": {}}])
    loose = {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}  # "required" may be absent
    assert calls_reward("[f()]", '[{"f": {"x": [1, ""]}}]', function=[loose])["score"] == 1
    schema = {"name": "f", "parameters": {"properties": {"x": {"type": "String"}}, "required": []}}
    with pytest.raises(ValueError, match="the type 'String' is none of string"):
        calls_reward("[f(x='')]", '[{"f": {"x": ["a"]}}]', function=[schema])


def test_the_prompt_of_bfcl() -> None:
    row = {
        "question": [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Now?"}]],
        "function": [OTHER],
    }
    task = get_task("bfcl")
    (system, user), answer = task.read_row(row)
    assert answer == "" and user == {"role": "user", "content": "Now?"}
    assert system["content"].startswith("You are an expert in composing functions.You are given a question")
    assert system["content"].endswith('"required": []\n        }\n    }\n]\n\n\nBe kind.')
    with pytest.raises(ValueError, match="'function' is missing"):
        get_task("bfcl").read_row({"question": row["question"]})


def test_a_worker_gets_what_the_row_has() -> None:
    row = {"question": [[{"role": "user", "content": "Go."}]], "function": [SCHEMA], "ground_truth": ONE}
    _, answer = get_task("bfcl").read_row(row)
    texts = ["[trip.plan(city='NYC')]", "[trip.plan(city='Rome')]", "Sorry."]
    with RewardPool() as pool:
        results = pool.grade([RewardItem("calls", text, answer, columns=row) for text in texts])
    assert [one.reward for one in results] == [1, 0, 0]
