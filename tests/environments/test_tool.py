"""Tool calls in texts, schemas of functions, and what the model is told about a wrong call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_megatron.environments.tool import function_schema, get_tool
from grpo_megatron.environments.tool_environment import Call, parse_calls
from grpo_megatron.environments.tools.calculator import calculator
from tests.environments import hostile_tools

ADD = Call("add", {"a": 1, "b": [2, "x"]})
ONE = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
TWO = '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}'
NONE = Call("now", {})


@pytest.mark.parametrize(
    ("call_format", "text", "expected"),
    [
        ("hermes", f"I add.\n<tool_call>\n{ONE}\n</tool_call><|im_end|>\n", [ADD]),
        ("hermes", f"<tool_call>{ONE}</tool_call> and <tool_call>{{\"name\": \"now\"}}</tool_call>", [ADD, NONE]),
        ("hermes", f"<think>or <tool_call>{TWO}</tool_call>?</think><tool_call>{{\"name\": \"now\"}}</tool_call>", [NONE]),
        ("hermes", f"<tool_call>{json.dumps({'name': 'add', 'arguments': json.dumps(ADD.arguments)})}</tool_call>", [ADD]),
        ("hermes", f"<tool_call>{ONE}<|im_end|>", ["no </tool_call>"]),
        ("hermes", f"<tool_call>{{'name'</tool_call><tool_call>{ONE}</tool_call>", ["Expecting property name", ADD]),
        ("hermes", "<tool_call>[1]</tool_call>", ["it is list, not an object"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ['"arguments" is list']),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', ["NaN is not JSON"]),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", ["recursion"]),
        ("llama3_json", "The answer is 3.<|eot_id|>", []),
        ("llama3_json", f"{TWO}<|eot_id|>", [ADD]),
        ("llama3_json", f"<|python_tag|>{TWO}<|eom_id|>", [ADD]),
        ("llama3_json", f'<|python_tag|>{TWO}; {{"name": "now"}}', [ADD, NONE]),
        ("llama3_json", '{"name": "add", "parameters": {', ["not a call in JSON"]),
        ("python_tag", "<|python_tag|>add.call(a=1, b=[2, 'x'])<|eom_id|>", [ADD]),
        ("python_tag", "<|python_tag|>now()", [NONE]),
        ("python_tag", "<|python_tag|>x = 1\nprint(x)", [Call("python", {"code": "x = 1\nprint(x)"})]),
        ("python_tag", "<|python_tag|>" + "(" * 10_000, [Call("python", {"code": "(" * 10_000})]),
    ],
)  # fmt: skip
def test_calls(call_format: str, text: str, expected: list[Call | str]) -> None:
    """A text in `expected` is part of the error that the model is shown."""
    calls = parse_calls(call_format, text)
    assert len(calls) == len(expected), calls
    for call, wanted in zip(calls, expected, strict=True):
        assert wanted in call if isinstance(wanted, str) and isinstance(call, str) else call == wanted


@pytest.mark.parametrize("function", [calculator, hostile_tools.later, hostile_tools.act])
def test_schemas_are_those_of_transformers(function: Any) -> None:
    from transformers.utils import get_json_schema

    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert function_schema(function, function.__name__) == expected


def test_options_are_no_arguments() -> None:
    tool = get_tool("tests.environments.hostile_tools:double", {"factor": 3})
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["number"]
    assert tool.problem({"number": 2}) == ""
    assert tool.problem({"number": 2, "factor": 4}) == "unknown argument factor (known: number)"


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("unhinted", {}, "parameter 'number' has no type hint"),
        ("undocumented", {}, "has no docstring"),
        ("any_number", {}, "have no schema"),
        ("nothing", {}, "has no attribute 'nothing'"),
        ("double", {"factors": 3}, r"has no option factors \(it has: factor\)"),
    ],
)
def test_functions_that_are_no_tools(name: str, options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        get_tool(f"tests.environments.hostile_tools:{name}", options)


def test_a_missing_option_and_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown format of tool calls 'hermess'; did you mean 'hermes'"):
        parse_calls("hermess", "")
    with pytest.raises(ValueError, match=r"tool 'search' needs the option corpus: kwargs: \{search: \{corpus: ...\}\}"):
        get_tool("search", {})
    with pytest.raises(ValueError, match=r"unknown tool 'serch'; did you mean 'search'"):
        get_tool("serch", {})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"numbers": [1]}, ""),
        ({}, "'numbers' is a required property"),
        ({"numbers": [1, "2"]}, "numbers.1: '2' is not of type 'integer'"),
        ({"numbers": [], "unit": "mile"}, "unit: 'mile' is not one of ['m', 'km']"),
        ({"numbers": [], "x": 1, "y": 1}, "unknown argument x, y (known: numbers, unit, note)"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], problem: str) -> None:
    message = get_tool("tests.environments.hostile_tools:later", {}).problem(arguments)
    assert problem in message
    assert bool(problem) == bool(message)
