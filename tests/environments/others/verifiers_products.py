"""A taskset of verifiers with a harness: a program that asks twice, by the client of OpenAI, and a reward of its last message."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

PROGRAM = """
import sys
from openai import OpenAI
url, key, model, prompt = sys.argv[1:]
client, messages = OpenAI(base_url=url, api_key=key, max_retries=0), [{"role": "user", "content": prompt}]
for more in ("sure?", None):
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=9).choices[0].message
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": more}]
"""


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self) -> Iterable[Product]:
        for a, b in ((2, 3), (4, 5)):
            yield Product(ProductData(prompt=f"{a} * {b} = ?", answer=str(a * b)), self.config.task)


class Asks(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, urls: Any, data: Any) -> Any:
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt], {})


__all__ = ["Asks", "Products"]
