"""A small HTTP server with the protocol of NeMo-Gym's agents, `python gym_agent.py PORT`: it asks the model at `policy_base_url`.

Written after `responses_api_agents/mini_swe_agent` and `nemo_gym/base_resources_server.py` of Gym: the body of /run is a row with
`responses_create_params`, its answer repeats it with `response` and `reward`. Gym itself needs Python 3.13.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openai import OpenAI
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


def answer(body: dict[str, Any]) -> dict[str, Any]:
    client = OpenAI(base_url=body["policy_base_url"], api_key=body["policy_api_key"], max_retries=0)
    response = client.responses.create(model="policy", **body["responses_create_params"])
    right = response.output_text == body["expected_answer"]
    extra = {"mask_sample": False, "num_steps": 1, "_ng_rollout_index": 3}
    return {**body, **extra, "response": response.model_dump(mode="json"), "reward": float(right)}


async def run(request: Request) -> JSONResponse:
    body = await request.json()
    if "expected_answer" not in body:
        return JSONResponse({"detail": "expected_answer is missing"}, 422)
    return JSONResponse(await run_in_threadpool(answer, body))


if __name__ == "__main__":
    uvicorn.run(Starlette(routes=[Route("/run", run, methods=["POST"])]), port=int(sys.argv[1]), log_level="error")
