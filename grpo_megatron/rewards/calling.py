"""BoundReward: one reward function with its arguments, called for one sample or for several at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from grpo_megatron.rewards.reward import (
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

NamedValues = dict[str, Any]


class WrongNumber(ValueError):
    """A batched reward has not returned one reward per completion. Its samples are not tried one by one."""


class BoundReward:
    """`reward.py` says what the function gets. A sample is a dict with some of the fields of a RewardItem."""

    def __init__(self, name: str, kwargs: Kwargs) -> None:
        """Raises what the import of the function raises, and ValueError: it reads no completion."""
        self.function: RewardFunction = rewards.get(name)
        self.kwargs = kwargs
        self.facts = rewards.facts_of(self.function)
        self.signature = read_signature(self.function, batch=self.facts.batch)
        self._logged: list[tuple[str, Sequence[Any]]] = []  # by TRL's log_extra and log_metric: name, value per sample

    def start(self, samples: Sequence[ItemFields]) -> Any:
        """Call the function: for one sample, or for any number if it `takes_lists`. Returns what it returns."""
        signature = self.signature
        if signature.form == "TRL":
            known, others = self._trl_values(samples)
        elif signature.takes_lists:
            rows = [self._values(sample) for sample in samples]
            known, others = _lists([row[0] for row in rows]), _lists([row[1] for row in rows])
        else:
            (sample,) = samples
            known, others = self._values(sample)
        known |= self.kwargs
        arguments = {name: known[name] for name in signature.names if name in known}
        if absent := sorted(signature.required - set(arguments)):
            raise KeyError(f"this sample has no {absent[0]!r}; its row's columns: {', '.join(others) or 'none'}")
        if signature.takes_others:
            arguments = {**others, **self.kwargs, **arguments}
        if signature.form != "position":
            return self.function(**arguments)
        return self.function(arguments.pop("completion"), arguments.pop("answer"), **arguments)

    def entries(self, returned: Any, samples: Sequence[ItemFields]) -> list[Any]:
        """What the function returned for each sample. Raises WrongNumber."""
        if not self.signature.takes_lists:
            return [returned]
        found = f"{type(returned).__name__}, not a list"
        if hasattr(returned, "__len__") and not isinstance(returned, str | bytes | Mapping):
            if len(returned) == len(samples):
                return self._with_logged(list(returned))
            found = f"{len(returned)} rewards"
        raise WrongNumber(
            f"the reward was called with a batch of {len(samples)} completions and returned {found}; it must return a list"
            " with one reward per completion, in their order"
        )

    def parse(self, entry: object, sample: ItemFields) -> RewardResult:
        """The result of an entry. None, of TRL's or of a sum: the reward does not apply to the sample. Raises ValueError."""
        if entry is None and (self.signature.form == "TRL" or self.facts.reads_item):
            return RewardResult(float("nan"), status="none")
        return parse_reward(entry, len(sample["completion"]))

    async def grade(self, sample: ItemFields) -> RewardResult:
        """The result of one sample, of any kind of function. Raises what the function raises."""
        returned = self.start([sample])
        if inspect.isawaitable(returned):
            returned = await returned
        (entry,) = self.entries(returned, [sample])
        return self.parse(entry, sample)

    def _values(self, sample: ItemFields) -> tuple[NamedValues, NamedValues]:
        """(what can be named, what **kwargs gets beside `reward.kwargs`)."""
        columns = sample.get("columns", {})
        values = {name: sample[name] for name in OURS if name in sample}
        extra = columns.get("extra_info")
        values |= {"prompt_text": sample.get("prompt", ""), "extra_info": {} if extra is None else extra}
        if self.signature.form.startswith("verl"):
            values |= _verl_values(sample, values["extra_info"], plural=self.signature.takes_lists)
            return {**columns, **values}, {}
        others = {name: value for name, value in columns.items() if name not in OURS}
        if not self.facts.takes_columns:
            others = {}
        if self.facts.reads_prompt:
            others["prompt_text"] = values["prompt_text"]
        if self.facts.reads_item:
            values["item"] = sample
        return {**columns, **values}, others

    def _trl_values(self, samples: Sequence[ItemFields]) -> tuple[NamedValues, NamedValues]:
        """As `_values`, for a call as TRL's trainer makes it."""
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
        """With what a function of TRL has logged, as further entries of a dict. None stays None."""
        logged = [(name, values) for name, values in self._logged if len(values) == len(entries)]
        if not logged:
            return entries
        return [
            None if entry is None else {**{name: values[place] for name, values in logged}, "score": entry}
            for place, entry in enumerate(entries)
        ]


def _lists(rows: Sequence[NamedValues]) -> NamedValues:
    """One list per name that all rows have."""
    return {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}


def _verl_values(sample: ItemFields, extra_info: Any, *, plural: bool) -> NamedValues:
    scored = sample.get("columns", {}).get("reward_model")
    answer = sample["answer"]
    values = {
        "data_source": sample.get("data_source", ""),
        "solution_str": sample["completion"],
        "ground_truth": scored.get("ground_truth", answer) if isinstance(scored, Mapping) else answer,
        "extra_info": extra_info,
    }
    if not plural:
        return values
    return {"extra_infos" if name == "extra_info" else f"{name}s": value for name, value in values.items()}


def _trl_prompt(sample: ItemFields) -> Any:
    if not sample.get("is_chat", False):
        return sample.get("prompt", "")
    prompt = sample.get("columns", {}).get("prompt")
    return prompt if isinstance(prompt, list) else sample.get("messages")


def _trl_completion(sample: ItemFields) -> Any:
    text = sample["completion"]
    return [{"role": "assistant", "content": text}] if sample.get("is_chat", False) else text
