"""How a reward function is called, read from its signature: it gets what it names.

    form       recognised by            called as
    ours       (anything else)          f(completion=..., answer=..., COLUMN=..., step=...), each only if it is named
    position   neither of ours' names   f(completion, answer, ...): the first two parameters, whatever they are called
    verl       solution_str             f(data_source=, solution_str=, ground_truth=, extra_info=)
    verl list  solution_strs            f(data_sources=, solution_strs=, ground_truths=, extra_infos=), lists
    TRL        completions              f(prompts=, completions=, completion_ids=, COLUMN=, trainer_state=), lists

`reward.kwargs` come before everything else. Then come the names of the form; of a name that both have, the form's wins
over a column's, except in TRL's form, where columns win over our own names. A name that nothing gives keeps its default.
`**kwargs` gets all other columns; with verl's form nothing, and with TRL's all that TRL's trainer passes.

verl: verl/workers/reward_manager/naive.py, batch.py. TRL: GRPOTrainer._calculate_rewards.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.rewards.item import ITEM_FIELDS

Form = Literal["ours", "position", "verl", "verl list", "TRL"]

OURS = (
    *("completion", "answer", "prompt", "messages", "extra_info", "data_source", "completion_ids", "step"),
    "prompt_text",  # the same as `prompt`, for a function whose own argument has that name
)
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_LIST_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL_NAMES = ("prompts", "completions", "completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")
TRL_PASSES = ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")  # to **kwargs, too
FORM_NAMES: dict[Form, tuple[str, ...]] = {
    "ours": OURS,
    "position": OURS,
    "verl": VERL_NAMES,
    "verl list": VERL_LIST_NAMES,
    "TRL": TRL_NAMES,
}
OF_TRL_ROW = ("prompt", "completion", "completion_ids")  # columns that TRL's trainer does not pass
SOURCES = {  # name -> the fields of a RewardItem that it is made of
    **{name: (name,) for name in OURS if name in ITEM_FIELDS},
    "prompt_text": ("prompt",),
    "data_sources": ("data_source",),
    "prompts": ("prompt", "messages", "is_chat"),
    "completions": ("is_chat",),
    **dict.fromkeys(["solution_str", "solution_strs", "log_extra", "log_metric"], ()),
    "completions_ids": ("completion_ids",),
    "trainer_state": ("step",),
}
COLUMNS_OF = {  # name -> the columns that it is made of
    "extra_info": "extra_info",
    "extra_infos": "extra_info",
    "ground_truth": "reward_model",
    "ground_truths": "reward_model",
    "prompts": "prompt",
}
ADAPTED = {
    "verl": "called as verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
    "verl list": "called as verl's batched compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
    "TRL": "called as TRL's reward(prompts, completions, **columns), with lists",
}


@dataclass(frozen=True)
class Reads:
    """What a function reads of a RewardItem besides completion and answer. `columns` None: all of them."""

    fields: frozenset[str] = frozenset()
    columns: frozenset[str] | None = frozenset()

    def joined(self, other: Reads) -> Reads:
        """What both read."""
        both = None if self.columns is None or other.columns is None else self.columns | other.columns
        return Reads(self.fields | other.fields, both)


@dataclass(frozen=True)
class RewardSignature:
    """The parameters of a reward function. `names`: those that can be given by name, or by position in form `position`."""

    form: Form
    names: tuple[str, ...]
    required: frozenset[str]  # of `names`, those without a default
    takes_others: bool  # has **kwargs
    takes_lists: bool  # one call for several samples

    @property
    def adaptation(self) -> str:
        """How another trainer's function is called; "" for one of ours."""
        return ADAPTED.get(self.form, "")

    def reads(self, kwargs: Iterable[str]) -> Reads:
        """What must be sent to the function's worker, beside `reward.kwargs`."""
        names = [*self.names, *(TRL_PASSES if self.form == "TRL" and self.takes_others else ())]
        read = [name for name in names if name not in kwargs]
        fields = {field for name in read for field in SOURCES.get(name, ())}
        columns = {COLUMNS_OF.get(name, name) for name in read if name in COLUMNS_OF or name not in SOURCES}
        if not self.form.startswith("verl"):
            columns |= {name for name in read if name not in FORM_NAMES[self.form]}
        takes_columns = self.takes_others and not self.form.startswith("verl")
        return Reads(frozenset(fields), None if takes_columns else frozenset(columns))

    def problem(self, kwargs: Iterable[str], columns: Iterable[str] | None = None) -> str | None:
        """Why it cannot be called with `reward.kwargs` and rows of these `columns`. `columns` None: not known yet."""
        given = [*FORM_NAMES[self.form], *(OURS if self.form in ("TRL", "verl", "verl list") else ())]
        kwargs = list(kwargs)
        own = self.names[2:] if self.form == "position" else self.names
        if taken := [name for name in kwargs if name in ("completion", "completions", "solution_str", "solution_strs")]:
            return f"the kwargs hold {taken[0]!r}, which is the response; take it out"
        if not self.takes_others and (unknown := [name for name in kwargs if name not in own]):
            return f"it has no parameter {unknown[0]!r}, which the kwargs hold{_close(unknown[0], own)}"
        if columns is None:
            return None
        columns = sorted(set(columns) - set(given))
        available = [*given, *columns, *kwargs]
        if missing := [name for name in self.names if name in self.required and name not in available]:
            of_row = f", the row's columns {', '.join(columns)}" if columns else ""
            return (
                f"nothing gives its parameter {missing[0]!r}, which has no default; there are {', '.join(given)}{of_row}"
                f"{', and the kwargs ' + ', '.join(kwargs) if kwargs else ''}{_close(missing[0], available)}"
            )
        return None


def read_signature(function: Callable[..., Any], *, batch: bool = False) -> RewardSignature:
    """The signature of a reward function; `batch`: one that was declared so. Raises ValueError: it reads no completion."""
    try:
        return _read(function, batch)
    except TypeError:  # an object that cannot be hashed
        return _read.__wrapped__(function, batch)


@functools.lru_cache(maxsize=256)
def _read(function: Callable[..., Any], batch: bool) -> RewardSignature:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature: only the first call can tell
        return RewardSignature("position", ("completion", "answer"), frozenset(), False, batch)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(p.name for p in by_name)
    others = any(p.kind == p.VAR_KEYWORD for p in parameters)
    required = frozenset(p.name for p in by_name if p.default is p.empty)
    recognised: dict[str, Form] = {"solution_str": "verl", "solution_strs": "verl list", "completions": "TRL"}
    for name, form in recognised.items():
        if name in names:
            return RewardSignature(form, names, required, others, batch or form != "verl")
    only_by_position = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    if not only_by_position and {"completion", "completion_ids"} & set(names):
        return RewardSignature("ours", names, required, others, batch)
    rest = _after_two(parameters)
    named = [p.name for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return RewardSignature("position", ("completion", "answer", *named), required & {*named}, others, batch)


def _after_two(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters after the two that get completion and answer by position. Raises ValueError."""
    listed = ", ".join(map(str, parameters)) or "none"
    remedy = "name one `completion` (and `answer`, or what else it reads)"
    places: list[str] = []
    for number, parameter in enumerate(parameters):
        if parameter.kind == parameter.VAR_POSITIONAL:
            return parameters[number:]
        if len(places) == 2:
            return parameters[number:]
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        places.append(parameter.name)
        if parameter.name in OURS and parameter.name != ("completion", "answer")[number]:
            break
    else:
        if len(places) == 2:
            return []
    raise ValueError(f"it reads no completion (its parameters: {listed}); {remedy}")


def _close(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
