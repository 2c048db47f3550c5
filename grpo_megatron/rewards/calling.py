"""The program of a reward worker: it calls reward functions and answers one result per sample (processes/host.py runs it).

{"name": "gsm8k", "samples": [{"completion": "...", "answer": "72"}], "timeout_s": 10.0} -> the fields of a
RewardResult for each sample. A call without samples imports the reward. Several samples
are one call of a batched reward, async calls that wait at the same time, or several calls of a quick one. A reward of this
package may map MEMORY_LIMIT bytes more than were mapped before it; a user's own has no such limit.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from grpo_megatron.processes.process import describe_raised, limit_memory
from grpo_megatron.rewards.reward import (
    FORM_NAMES,
    OF_TRL_ROW,
    OURS,
    TRL_PASSES,
    ItemFields,
    Kwargs,
    RewardFunction,
    RewardResult,
    parse_reward,
    read_signature,
    rewards,
)

MEMORY_LIMIT = 2 << 30
NamedValues = dict[str, Any]


def open_graders(settings: dict[str, Any]) -> Callable[[], Callable[[dict[str, Any]], list[dict[str, Any]]]]:
    """Opens the program of the hosts: one process per worker of a RewardPool."""
    return lambda: _Grader(settings).serve


class _Grader:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._kwargs, self._components = settings["kwargs"], settings["components"]
        self._problems: dict[str, str] = {}  # name -> why it cannot be loaded; "": it can
        self._is_limited = False

    def serve(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Grades the samples of one call."""
        name, samples = request["name"], request["samples"]
        kwargs = {"components": self._components} if name == COMPOSITE else self._kwargs
        if name not in self._problems:
            self._problems[name] = _load(name, kwargs)
        if not samples:
            return []
        is_limited = not any(":" in part for part in functions_of(name, kwargs))
        if is_limited != self._is_limited:
            self._is_limited = is_limited
            limit_memory(MEMORY_LIMIT if is_limited else None)
        start = time.perf_counter()
        results: Iterator[RewardResult] = iter([_failed(self._problems[name])] * len(samples))
        if not self._problems[name]:
            results = _graded(BoundReward(name, kwargs), samples, request["timeout_s"])
        replies = []
        for result in results:
            end = time.perf_counter()
            replies.append({**vars(result), "seconds": end - start})
            start = end
        return replies


def _load(name: str, kwargs: Kwargs) -> str:
    try:
        for part in {name, *functions_of(name, kwargs)}:
            if preload := rewards.facts_of(rewards.get(part)).preload:
                preload()
        BoundReward(name, kwargs)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        return describe_raised(error)
    return ""


def _graded(call: BoundReward, samples: Sequence[ItemFields], timeout_s: float) -> Iterator[RewardResult]:
    """Yields one result per sample. A batch that raises is called again for one sample at a time."""
    if len(samples) > 1 and not call.signature.takes_lists:
        if inspect.iscoroutinefunction(call.function):
            yield from _event_loop().run_until_complete(_graded_together(call, samples, timeout_s))
        else:
            for sample in samples:
                yield from _graded(call, [sample], timeout_s)
        return
    try:
        returned = call.start(samples)
        if inspect.isawaitable(returned):
            returned = _event_loop().run_until_complete(returned)
        entries = call.entries(returned, samples)
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward costs its sample, not the worker
        if len(samples) == 1 or call.facts.compares or isinstance(error, WrongNumber):
            yield from [_failure(error)] * len(samples)
            return
        for sample in samples:
            yield from _graded(call, [sample], timeout_s)
        return
    for entry, sample in zip(entries, samples, strict=True):
        try:
            yield call.parse(entry, sample)
        except BaseException as error:  # noqa: BLE001 - whatever an object of the user raises when it is read
            yield _failure(error)


async def _graded_together(call: BoundReward, samples: Sequence[ItemFields], timeout_s: float) -> list[RewardResult]:
    """Grades samples whose async calls wait at the same time."""

    async def grade(sample: ItemFields) -> RewardResult:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await call.grade(sample)
        except BaseException as error:  # noqa: BLE001 - as in `_graded`
            if isinstance(error, TimeoutError) and limit.expired():
                return _failed(f"no result after {timeout_s:g} s (reward.timeout_s)", is_timeout=True)
            return _failure(error)

    return await asyncio.gather(*map(grade, samples))


def _failure(error: BaseException) -> RewardResult:
    """Describes an exception. TimeoutError: the reward limits its own time."""
    return _failed(describe_raised(error), is_timeout=isinstance(error, TimeoutError))


def _failed(message: str, *, is_timeout: bool = False) -> RewardResult:
    return RewardResult(math.nan, status="timeout" if is_timeout else "error", message=message)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns one loop for all items: a client of an async reward belongs to the loop that it was opened in."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


class WrongNumber(ValueError):
    """A batch with another number of rewards than completions. Its samples are not tried one by one."""


class BoundReward:
    """One reward function with its arguments. A sample is a dict with some of the fields of a RewardItem."""

    def __init__(self, name: str, kwargs: Kwargs) -> None:
        """Raises what the import of the function raises, and ValueError: it reads no completion."""
        self.function: RewardFunction = rewards.get(name)
        self.kwargs = kwargs
        self.facts = rewards.facts_of(self.function)
        self.signature = read_signature(self.function, batch=self.facts.batch)
        self._logged: list[tuple[str, Sequence[Any]]] = []  # by TRL's log_extra and log_metric: name, value per sample

    def start(self, samples: Sequence[ItemFields]) -> Any:
        """Calls the function: for one sample, or for any number if it `takes_lists`. Returns what it returns."""
        signature = self.signature
        if signature.form == "TRL":
            known, others = self._trl_values(samples)
        elif signature.takes_lists:
            rows = [self._values(sample) for sample in samples]
            known, others = _lists([row[0] for row in rows]), _lists([row[1] for row in rows])
            for name in [one for one in signature.required & known.keys() if not all(one in row[0] for row in rows)]:
                del known[name]
        else:
            (sample,) = samples
            known, others = self._values(sample)
        known |= self.kwargs
        arguments = {name: known[name] for name in signature.names if name in known}
        if absent := sorted(signature.required - set(arguments)):
            raise KeyError(f"this sample's row has no {absent[0]!r}")
        if signature.takes_others:
            arguments = {**others, **self.kwargs, **arguments}
        if signature.form != "position":
            return self.function(**arguments)
        return self.function(arguments.pop("completion"), arguments.pop("answer"), **arguments)

    def entries(self, returned: Any, samples: Sequence[ItemFields]) -> list[Any]:
        """Splits what the function returned into one entry per sample. Raises WrongNumber."""
        if not self.signature.takes_lists:
            return [returned]
        problem = f"{type(returned).__name__}, not a list"
        if hasattr(returned, "__len__") and not isinstance(returned, str | bytes | Mapping):
            if len(returned) == len(samples):
                return self._with_logged(list(returned))
            problem = f"{len(returned)} rewards"
        raise WrongNumber(
            f"the reward was called with a batch of {len(samples)} completions and returned {problem}; it must return a list"
            " with one reward per completion, in their order"
        )

    def parse(self, entry: object, sample: ItemFields) -> RewardResult:
        """Checks an entry. None, of TRL's or of a sum: the reward does not apply to the sample. Raises ValueError."""
        if entry is None and (self.signature.form == "TRL" or self.facts.reads_item):
            return RewardResult(float("nan"), status="none")
        return parse_reward(entry, len(sample["completion"]))

    async def grade(self, sample: ItemFields) -> RewardResult:
        """Grades one sample with any kind of function. Raises what the function raises."""
        returned = self.start([sample])
        if inspect.isawaitable(returned):
            returned = await returned
        (entry,) = self.entries(returned, [sample])
        return self.parse(entry, sample)

    def _values(self, sample: ItemFields) -> tuple[NamedValues, NamedValues]:
        """Returns (values that can be named, values that **kwargs gets beside `reward.kwargs`)."""
        columns, answer = sample.get("columns", {}), sample["answer"]
        extra = {} if columns.get("extra_info") is None else columns["extra_info"]
        values = {name: sample[name] for name in OURS if name in sample}
        values |= {"prompt_text": sample.get("prompt", ""), "extra_info": extra}
        if self.signature.form.startswith("verl"):
            scored = columns.get("reward_model")
            truth = scored.get("ground_truth", answer) if isinstance(scored, Mapping) else answer
            of_verl = (sample.get("data_source", ""), sample["completion"], truth, extra)
            return {**columns, **values, **dict(zip(FORM_NAMES[self.signature.form], of_verl, strict=True))}, {}
        others = {name: value for name, value in columns.items() if self.facts.takes_columns and name not in OURS}
        if self.facts.reads_item:
            values["item"] = sample
        return {**columns, **values}, others

    def _trl_values(self, samples: Sequence[ItemFields]) -> tuple[NamedValues, NamedValues]:
        """Returns the same as `_values`, for a call as TRL's trainer makes it."""
        self._logged = []
        ids = [sample.get("completion_ids", []) for sample in samples]
        passed = {
            "prompts": [_trl_prompt(sample) for sample in samples],
            "completions": [_trl_completion(sample) for sample in samples],
            "completion_ids": ids,
            "completions_ids": ids,
            "trainer_state": SimpleNamespace(global_step=max(sample.get("step", 0) for sample in samples)),
            "log_extra": lambda name, values: self._logged.append((name, list(values))),
            "log_metric": lambda name, value: self._logged.append((name, [value] * len(samples))),
        }
        rows = [sample.get("columns", {}) for sample in samples]
        names = dict.fromkeys(name for row in rows for name in row if name not in OF_TRL_ROW)
        columns = {name: [row.get(name) for row in rows] for name in names}
        ours = _lists([self._values(sample)[0] for sample in samples])
        return {**ours, **columns, **passed}, {**columns, **{name: passed[name] for name in TRL_PASSES}}

    def _with_logged(self, entries: list[Any]) -> list[Any]:
        """Adds what a function of TRL has logged, as further entries of a dict. None stays None."""
        if not (logged := [(name, values) for name, values in self._logged if len(values) == len(entries)]):
            return entries
        more = [{name: values[place] for name, values in logged} for place in range(len(entries))]
        return [None if entry is None else {**new, "score": entry} for entry, new in zip(entries, more, strict=True)]


def _lists(rows: Sequence[NamedValues]) -> NamedValues:
    """Makes one list per name that a row has; None stands for a row without it."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _trl_prompt(sample: ItemFields) -> Any:
    if not sample.get("is_chat", False):
        return sample.get("prompt", "")
    prompt = sample.get("columns", {}).get("prompt")
    return prompt if isinstance(prompt, list) else sample.get("messages")


def _trl_completion(sample: ItemFields) -> Any:
    text = sample["completion"]
    return [{"role": "assistant", "content": text}] if sample.get("is_chat", False) else text


# -- the reward `composite`: a sum of several components (`reward.components`) -----------------------------------------

COMPOSITE = "composite"

Component = Mapping[str, Any]
Components = Sequence[Component]
Values = dict[str, float | None]  # name of a component -> its value; None: its gate was closed


def functions_of(name: str, kwargs: Kwargs) -> list[str]:
    """Names the functions that a reward calls: those of its components, or itself."""
    return [component["function"] for component in kwargs["components"]] if name == COMPOSITE else [name]


@rewards.register(COMPOSITE, reads_item=True, batch_size=1)
async def composite_reward(
    completion: str, answer: str, *, components: Components, item: ItemFields
) -> dict[str, Any] | None:
    """Sums weight x value over the components with an open gate. Raises what a component raises.

    A component is {"name", "function", "weight", "kwargs", "gate"}; a gate {"component", "min", "max"} is open where
    the value of the named component is within the bounds. It stands above. A component behind a closed gate is not
    called, adds 0 and closes the gates that depend on it; so does one that does not apply (TRL's None). Where none
    applies, the sum does not either.

    Metrics: each component's value under its name, what it reports under "name/key", and "name/open" for its gate. The first
    "acc" is also the sum's, so that validation shows accuracy. Components that wait, such as judges, wait together.
    """
    values: Values = {}
    results: dict[str, RewardResult] = {}
    applies = True
    waiting = list(components)
    while waiting:
        ready = [part for part in waiting if not part["gate"] or part["gate"]["component"] in values]
        opened = [part for part in ready if _is_open(part["gate"], values)]
        calls = [_value(part, item) for part in opened]
        returned = await asyncio.gather(*calls, return_exceptions=True)  # no call is left behind when another one fails
        values.update({part["name"]: None for part in ready})
        for part, result in zip(opened, returned, strict=True):
            if isinstance(result, BaseException):
                raise result
            applies = applies and result.status != "none"
            if result.status == "ok":
                results[part["name"]] = result
                values[part["name"]] = result.reward
        waiting = [part for part in waiting if part["name"] not in values]
    if not applies and not results:
        return None
    score = math.fsum(part["weight"] * (values[part["name"]] or 0.0) for part in components)
    return {**_entries(components, results), "score": score}


def _is_open(gate: Mapping[str, Any] | None, values: Values) -> bool:
    if not gate:
        return True
    value = values[gate["component"]]
    low = -math.inf if gate["min"] is None else gate["min"]
    high = math.inf if gate["max"] is None else gate["max"]
    return value is not None and low <= value <= high


async def _value(component: Component, item: ItemFields) -> RewardResult:
    try:
        return await BoundReward(component["function"], component["kwargs"]).grade(item)
    except TimeoutError as error:
        raise TimeoutError(f"component {component['name']!r}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"component {component['name']!r}: {type(error).__name__}: {error}") from error


def _entries(components: Components, results: Mapping[str, RewardResult]) -> dict[str, Any]:
    """Collects the metrics and texts of all components, in their order."""
    entries: dict[str, Any] = {}
    for part in components:
        name, result = part["name"], results.get(part["name"])
        if result is not None:
            entries |= {f"{name}/{key}": value for key, value in {**result.texts, **result.metrics}.items()}
            entries[name] = result.reward
        if part["gate"]:
            entries[f"{name}/open"] = float(result is not None)
    reported = next((r.metrics["acc"] for r in results.values() if "acc" in r.metrics), None)
    return entries if reported is None else {**entries, "acc": reported}
