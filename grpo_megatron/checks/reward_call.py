"""Calls each reward function and the environment on a real row before anything starts: what always fails would train on nothing.

The row's reference answer is written in the form that the task asks for, and so is a wrong answer: that of another row. The
dry run shows the rewards of both. A reward that does not prefer the right one is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.checks.components import resolved_components
from grpo_megatron.config import Config, ConfigError, Gate
from grpo_megatron.data.prompts import reward_item
from grpo_megatron.data.sampler import one_of_each
from grpo_megatron.data.task import get_task
from grpo_megatron.environments.pool import try_episode
from grpo_megatron.rewards.answers import AnswerForm, answer_form
from grpo_megatron.rewards.calling import COMPOSITE
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardResult, check_reward, read_signature, rewards
from grpo_megatron.rewards.teacher_server import ServerError, teacher_server
from grpo_megatron.types import BY_MODEL, Prompt
from grpo_megatron.untrusted import cut, shown

logger = logging.getLogger(__name__)
WRONG = "I do not know"
SHOWN_METRICS = 8
FIRST_ROWS = 32  # prompts among which a wrong answer is looked for


@dataclass(frozen=True)
class TriedResponse:
    """A response that was made for the trial. `alone`: its result in a batch of one, of a batched reward."""

    text: str
    result: RewardResult
    alone: RewardResult | None = None


@dataclass(frozen=True)
class RewardTrial:
    """A reward's values for a response with the right answer, and for one with a wrong answer.

    `stop`: the text of rollout.stop that ends the response before its answer, if one does.
    """

    prompt: Prompt
    form: AnswerForm
    right: TriedResponse
    wrong: TriedResponse
    stop: str | None = None

    @property
    def is_told_apart(self) -> bool:
        """Says if the right answer has the larger reward. A reward that fails on one of them is not compared."""
        right, wrong = self.right.result, self.wrong.result
        return right.status != "ok" or wrong.status != "ok" or right.reward > wrong.reward


def examples_of(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Chooses prompts: one of each reward, and the first ones, whose answers serve as wrong ones."""
    return [*one_of_each(prompts), *prompts[:FIRST_ROWS]]


def call_rewards(config: Config, prompts: Sequence[Prompt]) -> list[RewardTrial]:
    """Calls each reward on the first prompt that has it, answered right and wrong.

    Raises ConfigError where a reward fails on both, unless reward.max_failed_ratio=1 allows that: then nothing is called.
    Takes at most 4 x reward.timeout_s per reward, and the time of importing it.
    """
    by_reward: dict[str, list[Prompt]] = {}
    reward = config.reward
    for prompt in prompts:
        if prompt.reward not in ("", BY_MODEL):  # "": an environment gives the rewards, or nothing does
            by_reward.setdefault(prompt.reward, []).append(prompt)
    if not by_reward or reward.max_failed_ratio == 1:
        return []
    asked = [(same[0], _form(config, same[0]), _wrong_answer(same)) for same in by_reward.values()]
    for prompt, _, _ in asked:
        _check_columns(config, prompt)
    texts = [[form.response(answer, p.text) for answer in (p.answer, wrong)] for p, form, wrong in asked]
    items = [reward_item(p, text) for (p, _, _), both in zip(asked, texts, strict=True) for text in both]
    try:
        with RewardPool(1, reward.timeout_s, reward.kwargs, resolved_components(config)) as pool:
            results = pool.grade(items, quiet=True)
            alone = [pool.grade([item], quiet=True)[0] if _is_batched(item.name) else None for item in items]
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the reward cannot be called: {error}") from error
    tried = [
        TriedResponse(item.completion, *both)
        for item, both in zip(items, zip(results, alone, strict=True), strict=True)
    ]
    pairs = zip(tried[::2], tried[1::2], strict=True)
    trials = [
        RewardTrial(p, form, right, wrong, _early_stop(config, p, right.text))
        for (p, form, _), (right, wrong) in zip(asked, pairs, strict=True)
    ]
    if failing := [trial for trial in trials if _failed(trial.right) and _failed(trial.wrong)]:
        raise ConfigError("\n".join(map(_problem, failing)))
    return trials


def ask_teachers(config: Config, tokenizer: Any, num_ids: int) -> None:
    """Asks the servers of teachers for the scores of a few tokens. Raises ConfigError with a problem of each."""
    top_k = config.distillation.top_k if config.distillation.kl != "sampled" else 0
    problems = []
    for name, teacher in config.teachers.items():
        if teacher.url is not None:
            try:
                teacher_server(name, teacher, num_ids).check(top_k, lambda token: str(tokenizer.decode([token])))
            except ServerError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _check_columns(config: Config, prompt: Prompt) -> None:
    """Raises ConfigError where nothing gives a parameter of a function: no column of this row, and no kwargs."""
    parts = [(part["function"], part["kwargs"]) for part in resolved_components(config)]
    for function, kwargs in parts if prompt.reward == COMPOSITE else [(prompt.reward, config.reward.kwargs)]:
        try:
            check_reward(function, kwargs, prompt.columns)
        except ValueError as error:
            raise ConfigError(f"reward.function: {error} (row {prompt.uid})") from error


def play_episode(config: Config, prompts: Sequence[Prompt]) -> list[tuple[str, str]]:
    """Plays the first prompt's episode: (who, text). The model writes the row's answer. [] without prompts."""
    multi_turn = config.rollout.multi_turn
    if multi_turn.environment is None or not prompts:
        return []
    written = _form(config, prompts[0]).response(prompts[0].answer or WRONG, prompts[0].text)
    return list(try_episode(multi_turn, prompts[0].extra["row"], written))  # type: ignore[arg-type]


def report_trials(config: Config, trials: Sequence[RewardTrial]) -> None:
    """Prints before a run how functions of other trainers are called, and warnings of rewards that look wrong."""
    for trial in trials:
        for name, adaptation in _adaptations(config, trial.prompt.reward).items():
            print(f"reward {name} is {adaptation}", flush=True)
        for warning in _warnings(trial):
            logger.warning("%s", warning)


def reward_lines(config: Config, trials: Sequence[RewardTrial]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for the printed plan: each reward and each of its components, and what they gave in `trials`."""
    for trial in trials:
        right, wrong = trial.right.result, trial.wrong.result
        name = trial.prompt.reward
        of_right, of_wrong = (
            ("the right answer", "the wrong one") if trial.prompt.answer else ("an empty text", "another")
        )
        yield "reward", f"{name}: {_value(right)} for {of_right}, {_value(wrong)} for {of_wrong} (see below)"
        parts = resolved_components(config) if name == COMPOSITE else []
        for part in parts:
            when = "" if part["gate"] is None else f" where {_condition(Gate(**part['gate']))}"
            values = f"{_value(right, part['name'])}, {_value(wrong, part['name'])}"
            yield f"  {part['name']}"[:17], f"{part['weight']:g} x {part['function']}{when}: {values}"
        components = {part["name"] for part in parts}
        names = [key for key in dict.fromkeys([*right.metrics, *wrong.metrics]) if key not in components]
        if names:
            reported = [f"{key} {_value(right, key)}, {_value(wrong, key)}" for key in names[:SHOWN_METRICS]]
            yield "  reported", "; ".join(reported) + (" ..." if len(names) > SHOWN_METRICS else "")
        for function, adaptation in _adaptations(config, name).items():
            yield "  adapted", f"{function} is {adaptation}"


def trial_lines(trials: Sequence[RewardTrial]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for the printed plan: the two responses of each trial."""
    for trial in trials:
        uid = trial.prompt.uid
        right, wrong = ("right answer", "wrong answer") if trial.prompt.answer else ("empty text", "other text")
        yield right, f"{shown(trial.right.text, 400)} has the reward {_value(trial.right.result)}"
        of_right = f"the reference answer of {uid}; form: {trial.form.description}"
        yield "", f"({of_right if trial.prompt.answer else f'{uid} has no reference answer'})"
        yield wrong, f"{shown(trial.wrong.text, 400)} has the reward {_value(trial.wrong.result)}"
        for tried, result in (("right", trial.right.result), ("wrong", trial.wrong.result)):
            if result.message:
                yield f"  {tried} one", cut(result.message, 400)
        yield from (("WARNING", warning) for warning in _warnings(trial))


def _form(config: Config, prompt: Prompt) -> AnswerForm:
    return answer_form(prompt.text, [prompt.reward, get_task(config.data.task).reward or ""])


def _wrong_answer(prompts: Sequence[Prompt]) -> str:
    """Finds the answer of another row, if one differs."""
    right = prompts[0].answer.strip()
    return next((other.answer for other in prompts[1:] if other.answer.strip() not in ("", right)), WRONG)


def _early_stop(config: Config, prompt: Prompt, text: str) -> str | None:
    """Finds a stop text that begins before the end of the answer in the right response."""
    end = text.rfind(prompt.answer.strip()) + len(prompt.answer.strip())
    return next((stop for stop in config.rollout.stop if 0 <= text.find(stop) < end), None)


def _is_batched(name: str) -> bool:
    """Says if it gets batches of whatever is ready."""
    facts = rewards.facts(name)
    return read_signature(rewards.get(name), batch=facts.batch).takes_lists and not facts.compares


def _failed(tried: TriedResponse) -> bool:
    return tried.result.status in ("error", "timeout")


def _adaptations(config: Config, name: str) -> Mapping[str, str]:
    """Maps the name of a function of another trainer -> how it is called, among those of a reward."""
    names = [part["function"] for part in resolved_components(config)] if name == COMPOSITE else [name]
    adaptations = {name: read_signature(rewards.get(name)).adaptation for name in names}
    return {name: adaptation for name, adaptation in adaptations.items() if adaptation}


def _value(result: RewardResult, name: str | None = None) -> str:
    """Returns the reward, or the value of one metric."""
    if result.status == "none":
        return "none (it does not apply)"
    if result.status != "ok":
        return result.status
    if name is None:
        return f"{result.reward:g}"
    return f"{result.metrics[name]:g}" if name in result.metrics else "closed"


def _condition(gate: Gate) -> str:
    low = "" if gate.min is None else f"{gate.min:g} <= "
    high = "" if gate.max is None else f" <= {gate.max:g}"
    return f"{low}{gate.component}{high}"


def _warnings(trial: RewardTrial) -> Iterator[str]:
    if trial.stop is not None:
        yield (
            f"rollout.stop={shown([trial.stop])} ends {shown(trial.right.text, 120)} before its answer (form:"
            f" {trial.form.description}); leave it out, unless responses have another form"
        )
    for tried in (trial.right, trial.wrong):
        without = tried.alone is not None and tried.alone.status == tried.result.status != "ok"  # NaN is not NaN
        if tried.alone is not None and not without and tried.alone != tried.result:
            yield (
                f"the reward {trial.prompt.reward} gives {_value(tried.alone)} to {shown(tried.text, 120)} alone, and"
                f" {_value(tried.result)} in a batch of two: batches hold what is ready, so the rewards of a run would depend on"
                " time; make it grade each sample for itself, or declare compares=True"
            )
            break
    if trial.is_told_apart or not trial.prompt.answer:
        return
    yield (
        f"the reward {trial.prompt.reward} does not prefer the right answer of {trial.prompt.uid}:"
        f" {_value(trial.right.result)} for {shown(trial.right.text, 120)}, {_value(trial.wrong.result)} for"
        f" {shown(trial.wrong.text, 120)}; check how it reads the answer, unless it rewards something else"
    )


def _problem(trial: RewardTrial) -> str:
    right, wrong = trial.right.result, trial.wrong.result
    failures = [right.message]
    if wrong.message != right.message:
        failures.append(f"on a wrong one: {wrong.message}")
    return (
        f"reward.function: called on a real row ({trial.prompt.uid}, answer {shown(trial.prompt.answer, 80)}), it fails on a"
        f" completion with the answer and on one without: {cut('; '.join(failures), 1000)}; correct it"
        " (reward.max_failed_ratio=1 starts all the same)"
    )
