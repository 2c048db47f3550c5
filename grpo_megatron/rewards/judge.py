"""The reward `judge`: the verdict of another model, asked by an OpenAI-compatible endpoint (POST base_url/chat/completions).

A worker has one request per judge at a time, so an engine has at most reward.num_workers of them. Each worker keeps its
latest `cache_size` verdicts, and `folder` keeps all (services.py). The key comes from the environment variable that
`api_key_env` names; no message shows it.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.processes.endpoint import check_url, key_of
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.rewards.services import add_spending, ask, cached_result, keep_result, result_key

PATTERN = r"(?im)^[ \t*#>`_-]*(?:score|verdict|rating)[ \t*:=`_]*(-?[0-9]+(?:\.[0-9]+)?)"
CRITERION = r"(?im)^[ \t*#>`_-]*{}[ \t*:=`_]*(-?[0-9]+(?:\.[0-9]+)?)"  # with a criterion's name
OPTIONS = {"temperature": 0, "max_tokens": 512}
MAX_PROMPT_FILE = 1 << 18  # bytes
FIELDS = re.compile(r"\{(question|response|answer|criteria)\}")

JUDGE_KEYS = ("base_url", "model", "api_key_env", "requests_per_minute", "price")
_verdicts: OrderedDict[str, list[float]] = OrderedDict()  # of this process; key of url, request, patterns -> verdicts


@rewards.register("judge", batch_size=1)
async def judge_reward(
    completion: str,
    answer: str,
    *,
    base_url: str = "",
    model: str = "",
    prompt: str,
    api_key_env: str | None = None,
    judges: Sequence[Mapping[str, Any]] = (),
    folder: str | None = None,
    pattern: str = PATTERN,
    criteria: Mapping[str, float] | None = None,
    low: float = 0.0,
    high: float = 10.0,
    timeout_s: float = 8.0,
    retries: int = 3,
    max_characters: int = 20_000,
    cache_size: int = 4096,
    options: Mapping[str, Any] | None = None,
    prompt_text: str = "",
) -> dict[str, float]:
    """Returns (verdict - low) / (high - low), from 0 to 1; with `criteria`, its weighted mean over them.

    `prompt` names a text file with the fields {response} and, if needed, {question} (the rendered prompt) and {answer}.
    The last match of `pattern` in the reply is the verdict, its first group a number from `low` to `high`. `options`
    are further keys of the request (OPTIONS are its defaults). `timeout_s`: seconds for all attempts; below
    reward.timeout_s. `max_characters`: of question and response, each; the middle of longer ones is left out.

    `criteria` (a rubric: name -> weight above 0, of reward.kwargs or a column of the row) asks for one line `NAME: number` for
    each, and takes the place of `pattern`; one that the reply lacks fails the sample. {criteria} in the prompt lists the names.

    `judges`, instead of base_url and model: a pool, each {"base_url", "model"}, and if needed "api_key_env",
    "requests_per_minute" and "price", the currency per million tokens of [prompt, reply]. The request's digest chooses
    one, so that the same sample has the same judge in every run; where that one does not answer in its share of
    `timeout_s`, the next one is asked. `folder`: verdicts of earlier requests on disk, and the ledger of tokens and cost,
    for all ranks and runs that name it.

    "verdict": the judge's number, or "criterion/NAME" with each. "attempts", "tokens", "cost": of this sample, 0 where "cached"
    is 1. Raises ValueError (options, reply), TimeoutError, ConnectionError: they fail the sample, as any failing reward
    (reward.max_failed_ratio).
    """
    if not low < high:
        raise ValueError(f"judge: low={low:g} must be below high={high:g}")
    question, response = (_cut(text, max_characters) for text in (prompt_text, completion))
    names = list(criteria or {})
    if not all(isinstance(w, int | float) and 0 < w < math.inf for w in (criteria or {}).values()):
        raise ValueError(f"judge: criteria={dict(criteria or {})} must give each name a weight above 0")
    patterns = {CRITERION.format(re.escape(name)): f"line '{name}: NUMBER'" for name in names}
    patterns = patterns or {pattern: "verdict that `pattern` finds"}
    fields = {"question": question, "response": response, "answer": answer, "criteria": "\n".join(names)}
    text = FIELDS.sub(lambda match: fields[match[1]], _template(prompt))  # once: braces in a response stay as they are
    if bool(judges) == bool(base_url and model):
        raise ValueError("judge: set base_url and model, or judges, a list of {base_url, model}, and not both")
    message = {"role": "user", "content": text.encode("utf-8", "replace").decode()}  # no halves of surrogate pairs
    request = {"messages": [message], **OPTIONS, **(options or {})}
    pool = [dict(one) for one in judges] or [{"base_url": base_url, "model": model, "api_key_env": api_key_env}]
    first = int(result_key(request), 16) % len(pool)
    problem, end, attempts, tokens, cost = None, time.monotonic() + timeout_s, 0, 0, 0.0
    for place, one in enumerate(pool[first:] + pool[:first]):
        if unknown := sorted(one.keys() - JUDGE_KEYS):
            raise ValueError(f"judge: judges has the key {unknown[0]!r}; known are {', '.join(JUDGE_KEYS)}")
        check_url(one.get("base_url", ""), "judge: base_url")
        url = one["base_url"].rstrip("/") + "/chat/completions"
        body = json.dumps({"model": one["model"], **request}).encode()
        key = result_key("judge", url, body.decode(), list(patterns))
        verdicts = _verdicts.get(key) or cached_result(folder, key)
        if verdicts is None or not all(low <= verdict <= high for verdict in verdicts):  # kept with another range
            try:
                left = end - time.monotonic() if place else timeout_s
                seconds = left / (len(pool) - place)  # the others have theirs
                credential = key_of(one.get("api_key_env"), "judge: api_key_env")
                limits = retries, seconds, "judge", folder, one.get("requests_per_minute")
                reply, attempts = await ask(url, body, credential, *limits)
            except (TimeoutError, ConnectionError) as error:
                problem = error
                continue
            tokens, cost = _usage(reply, one.get("price"))
            add_spending(folder, attempts, tokens, cost)  # also where the reply has no verdict
            verdicts = [_verdict(reply, *pair, low, high) for pair in patterns.items()]
            keep_result(folder, key, verdicts)
        break
    else:
        assert problem is not None
        raise problem
    _verdicts[key] = verdicts
    while len(_verdicts) > cache_size:
        _verdicts.popitem(last=False)
    weights = list((criteria or {"": 1.0}).values())
    mean = math.fsum(w * v for w, v in zip(weights, verdicts, strict=True)) / math.fsum(weights)
    named = dict(zip((f"criterion/{name}" for name in names), verdicts, strict=True)) if names else {"verdict": mean}
    usage = {"tokens": tokens, "cost": cost} if judges or folder is not None else {}
    return {"score": (mean - low) / (high - low), **named, "attempts": attempts, "cached": float(not attempts), **usage}


@functools.lru_cache(maxsize=16)
def _template(path: str) -> str:
    from grpo_megatron.untrusted import ReadError, read_text  # imports yaml, which other rewards' workers need not

    try:
        text = read_text(path, MAX_PROMPT_FILE)
    except ReadError as error:
        raise ValueError(f"judge: prompt={path!r} {error}") from None
    if "{response}" not in text:
        raise ValueError(
            f"judge: prompt={path!r} has no field {{response}}, so that the judge would not see the response"
        )
    return text


def _cut(text: str, length: int) -> str:
    """Cuts the middle out of a long text: the answer stands at the end."""
    if len(text) <= length:
        return text
    half = max(1, length // 2)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _usage(reply: bytes, price: Sequence[float] | None) -> tuple[int, float]:
    """Returns (tokens, cost) of a reply. Raises ValueError: there is a price, and the reply has no usage."""
    try:
        usage = json.loads(reply)["usage"]
        counts = [int(usage["prompt_tokens"]), int(usage["completion_tokens"])]
    except (ValueError, LookupError, TypeError, RecursionError):
        if price is None:
            return 0, 0.0
        raise ValueError(
            "the judge's reply has no usage (prompt_tokens, completion_tokens), which `price` needs"
        ) from None
    return sum(counts), sum(count * each / 1e6 for count, each in zip(counts, price or (0, 0), strict=True))


def _verdict(reply: bytes, pattern: str, meaning: str, low: float, high: float) -> float:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"the judge's reply is no chat completion: {reply[:200]!r}")
    verdicts = [match[1] for match in re.finditer(pattern, content)]
    if not verdicts:
        raise ValueError(f"the judge's reply has no {meaning}; it ends with {content[-200:]!r}")
    if not low <= float(verdicts[-1]) <= high:
        raise ValueError(f"the judge's verdict {verdicts[-1]} is not between {low:g} and {high:g}")
    return float(verdicts[-1])
