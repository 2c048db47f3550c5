"""Rewards as services: the reward `remote`, and what judges and remote rewards share on disk (`folder`).

    FOLDER/cache/ab/abcd...    one result, by the sha256 of everything that it depends on; written by rename
    FOLDER/ledger.json         requests, tokens and cost of all processes, and when each service takes its next request

Both are safe under any number of ranks and runs, on a file system with flock.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.processes.endpoint import EndpointError, EndpointTimeout, check_url, key_of, post_json
from grpo_megatron.rewards.reward import parse_reward, rewards

VERSION = 1  # of this program's requests and of how it reads replies; in every key
SPENT: dict[str, float] = {"requests": 0, "tokens": 0, "cost": 0.0}


def result_key(*parts: Any) -> str:
    """Returns the key of a result: sha256 of VERSION and `parts`, which are plain JSON."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


def cached_result(folder: str | None, key: str) -> Any:
    """Returns the result under `key`; None: there is none, or it cannot be read."""
    if folder is not None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(Path(folder, "cache", key[:2], key).read_bytes())
    return None


def keep_result(folder: str | None, key: str, result: Any) -> None:
    """Writes a result, complete or not at all. Raises OSError."""
    if folder is not None:
        path = Path(folder, "cache", key[:2], key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{key}.{os.uname().nodename}.{os.getpid()}")
        partial.write_text(json.dumps(result))
        partial.replace(path)


@contextlib.contextmanager
def _ledger(folder: str) -> Iterator[dict[str, Any]]:
    """Locks the ledger, gives its content to change, and writes it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Path(folder, "ledger.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = Path(folder, "ledger.json")
        content = {**SPENT, "next": {}, **(json.loads(path.read_text()) if path.exists() else {})}
        yield content
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.replace(path)


def spent(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Returns what was spent so far, and by the largest step; zeros without a ledger. Raises OSError, ValueError."""
    path = folder / "ledger.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    return {**SPENT, **{name: content[name] for name in SPENT if name in content}}, {**SPENT, **content.get("step", {})}


def record_step(folder: Path, before: Mapping[str, float]) -> None:
    """Records what a step has spent since `before`, where none has spent more. Raises OSError, ValueError."""
    with _ledger(str(folder)) as content:
        most = {**SPENT, **content.get("step", {})}
        content["step"] = {name: max(most[name], content[name] - before[name]) for name in SPENT}


def exceeded(folder: Path, limits: Mapping[str, float]) -> str:
    """Says which limit a step as large as the largest so far could exceed; "" if none. Raises OSError, ValueError."""
    now, step = spent(folder)
    over = [name for name, limit in limits.items() if now[name] + step[name] > limit or now[name] >= limit]
    return (
        f"{now[over[0]]:g} {over[0]} so far + up to {step[over[0]]:g} per step, of {limits[over[0]]:g}" if over else ""
    )


def add_spending(folder: str | None, requests: int, tokens: int, cost: float) -> None:
    """Adds to the ledger, if there is one. Raises OSError."""
    if folder is not None:
        with _ledger(folder) as content:
            for name, value in zip(SPENT, (requests, tokens, cost), strict=True):
                content[name] += value


def take_slot(folder: str | None, service: str, per_minute: float | None, seconds: float, least: float = 0.0) -> float:
    """Takes the next time at which `service` takes a request: 60 / per_minute s after the one before, of all processes.

    Returns the seconds until then, `least` or more. Raises TimeoutError: not within `seconds`, and then nothing is taken;
    ValueError: no folder.
    """
    if per_minute is None:
        return least
    if folder is None or not per_minute > 0:
        raise ValueError(
            f"requests_per_minute={per_minute} must be above 0, and needs `folder`, in which processes share it"
        )
    with _ledger(folder) as content:
        now = time.time()
        at = max(now + least, content["next"].get(service, now))
        if at - now > seconds:
            raise TimeoutError(
                f"{service} takes the next request in {at - now:.1f} s (requests_per_minute={per_minute:g})"
            )
        content["next"][service] = at + 60 / per_minute
    return float(at - now)


async def ask(
    url: str,
    body: bytes,
    key: str | None,
    retries: int,
    timeout_s: float,
    what: str,
    folder: str | None = None,
    per_minute: float | None = None,
) -> tuple[bytes, int]:
    """Returns (reply, number of attempts) of a POST, each of which waits for its slot. Raises TimeoutError, ConnectionError."""
    wait = functools.partial(take_slot, folder, url, per_minute)
    try:
        reply = await asyncio.to_thread(post_json, url, body, {}, retries, timeout_s, key, wait=wait)
    except EndpointError as error:
        message = f"the {what} at {url}: {error}" + (f": {' '.join(error.reason.split())}" if error.reason else "")
        raise (TimeoutError if isinstance(error, EndpointTimeout) else ConnectionError)(message) from None
    return reply.data, reply.attempts


def check_columns(*, columns: Sequence[str] = (), row: Mapping[str, Any], **_: object) -> None:
    """Raises ValueError at a name in `columns` that a row lacks."""
    if row and (missing := [name for name in columns if name not in row]):
        raise ValueError(
            f"columns has {missing[0]!r}, and the row has {', '.join(row)}; correct it, or give the row null"
        )


@rewards.register("remote", batch=True, batch_size=32, check=check_columns)
async def remote_reward(
    completion: Sequence[str],
    answer: Sequence[str],
    prompt: Sequence[str],
    *,
    url: str,
    api_key_env: str | None = None,
    columns: Sequence[str] = (),
    version: str = "",
    folder: str | None = None,
    requests_per_minute: float | None = None,
    retries: int = 3,
    timeout_s: float = 8.0,
    **row: Sequence[Any],
) -> list[Any]:
    """POSTs {"samples": [{"completion", "answer", "prompt", "columns": {...}}, ...]} to `url`; the reply is
    {"results": [...]}, in order: each a number, or an object with "score" and other numbers, which become metrics.

    `columns` names those of the row that are sent, where they are not null. `folder` keeps results, so that a sample is sent
    once; `version`, of the service, is in their key. `timeout_s` is for all attempts. Raises ValueError (reply), TimeoutError,
    ConnectionError.
    """
    check_url(url, "remote: url")
    given = [{n: row[n][i] for n in columns if n in row and row[n][i] is not None} for i in range(len(completion))]
    samples = [
        {"completion": c, "answer": a, "prompt": p, "columns": own}
        for c, a, p, own in zip(completion, answer, prompt, given, strict=True)
    ]
    keys = [result_key("remote", url, version, sample) for sample in samples]
    known = {key: cached_result(folder, key) for key in keys}
    unknown = {key: sample for key, sample in zip(keys, samples, strict=True) if known[key] is None}
    if unknown:
        body = json.dumps({"samples": list(unknown.values())}).encode()
        limits = retries, timeout_s, "reward", folder, requests_per_minute
        reply, attempts = await ask(url, body, key_of(api_key_env, "remote: api_key_env"), *limits)
        add_spending(folder, attempts, 0, 0.0)
        try:
            results = json.loads(reply)["results"]
            new = dict(zip(unknown, results, strict=True))
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f'the reply of {url} is no {{"results": [{len(unknown)} rewards]}}: {reply[:200]!r}'
            ) from None
        for key, result in new.items():
            with contextlib.suppress(ValueError):  # it fails its sample, and is asked for again
                parse_reward(result)
                keep_result(folder, key, result)
        known |= new
    return [_with_cached(known[key], key not in unknown) for key in keys]


def _with_cached(result: Any, is_cached: bool) -> dict[str, Any]:
    return {**(result if isinstance(result, Mapping) else {"score": result}), "cached": float(is_cached)}
