"""The reward `judge`: the verdict of another model, asked by an OpenAI-compatible endpoint (POST base_url/chat/completions).

A worker has one request per judge at a time, so an engine has at most reward.num_workers of them. Each worker keeps its
latest `cache_size` verdicts. The key comes from the environment variable that `api_key_env` names; no message shows it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from grpo_megatron.processes.endpoint import EndpointError, EndpointTimeout, check_url, key_of, post_json
from grpo_megatron.rewards.reward import rewards

PATTERN = r"(?im)^[ \t*#>`_-]*(?:score|verdict|rating)[ \t*:=`_]*(-?[0-9]+(?:\.[0-9]+)?)"
CRITERION = r"(?im)^[ \t*#>`_-]*{}[ \t*:=`_]*(-?[0-9]+(?:\.[0-9]+)?)"  # with a criterion's name
OPTIONS = {"temperature": 0, "max_tokens": 512}
MAX_PROMPT_FILE = 1 << 18  # bytes
FIELDS = re.compile(r"\{(question|response|answer|criteria)\}")

_verdicts: OrderedDict[bytes, list[float]] = (
    OrderedDict()
)  # of this process; sha256 of url, request, patterns -> verdicts


@rewards.register("judge", batch_size=1)
async def judge_reward(
    completion: str,
    answer: str,
    *,
    base_url: str,
    model: str,
    prompt: str,
    api_key_env: str | None = None,
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

    "verdict": the judge's number, or "criterion/NAME" with each. "attempts": requests, 0 where "cached" is 1. Raises
    ValueError (options, reply), TimeoutError, ConnectionError: they fail the sample, as any failing reward
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
    check_url(base_url, "judge: base_url")
    url = base_url.rstrip("/") + "/chat/completions"
    message = {"role": "user", "content": text.encode("utf-8", "replace").decode()}  # no halves of surrogate pairs
    body = json.dumps({"model": model, "messages": [message], **OPTIONS, **(options or {})}).encode()
    place = hashlib.sha256(b"\0".join([url.encode(), body, *(one.encode() for one in patterns)])).digest()
    attempts = 0
    if (verdicts := _verdicts.get(place)) is None:
        reply, attempts = await _ask(url, body, key_of(api_key_env, "judge: api_key_env"), retries, timeout_s)
        _verdicts[place] = verdicts = [_verdict(reply, *one, low, high) for one in patterns.items()]
        while len(_verdicts) > cache_size:
            _verdicts.popitem(last=False)
    weights = list((criteria or {"": 1.0}).values())
    mean = math.fsum(w * v for w, v in zip(weights, verdicts, strict=True)) / math.fsum(weights)
    named = dict(zip((f"criterion/{name}" for name in names), verdicts, strict=True)) if names else {"verdict": mean}
    return {"score": (mean - low) / (high - low), **named, "attempts": attempts, "cached": float(not attempts)}


async def _ask(url: str, body: bytes, key: str | None, retries: int, timeout_s: float) -> tuple[bytes, int]:
    """Returns (reply, number of attempts)."""
    try:
        reply = await asyncio.to_thread(post_json, url, body, {}, retries, timeout_s, key)
    except EndpointError as error:
        message = f"the judge at {url}: {error}" + (f": {' '.join(error.reason.split())}" if error.reason else "")
        raise (TimeoutError if isinstance(error, EndpointTimeout) else ConnectionError)(message) from None
    return reply.data, reply.attempts


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
