"""mini-swe-agent, unmodified, in the sandbox of a task folder: it ends when its model submits.

It is an extra: `pip install "mini-swe-agent>=2.4,<3"` in the run's Python. What stands at this module's top is imported once
per worker; `main` runs in a fork for each trajectory. It needs `branches: samples`: an answer without a call is left out of its
next request.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"  # a refused request is refused again, after minutes

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from grpo_megatron.environments.sandboxes.backend import run_attached

litellm.suppress_debug_info = True
litellm.completion("openai/model", [{"role": "user", "content": ""}], mock_response="")  # imports what a request needs


class Sandbox(LocalEnvironment):
    """Its commands run in the sandbox."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Runs one command. Raises Submitted when it prints the word that ends a task."""
        result = run_attached(ROW["sandbox"], action["command"], timeout_s=20.0)
        output = {"output": result.text(), "returncode": result.exit_code, "exception_info": result.problem}
        self._check_finished(output)
        return output


def main() -> None:
    """Runs the agent on the task's instruction, for three turns at most."""
    global ROW
    ROW = json.loads(sys.stdin.readline())["row"]
    options = {"api_base": os.environ["OPENAI_BASE_URL"], "max_tokens": 48}
    texts = {"observation_template": "{{output.output}}", "format_error_template": "{{error}}"}
    name = f"openai/{os.environ['OPENAI_MODEL']}"
    model = LitellmModel(model_name=name, model_kwargs=options, cost_tracking="ignore_errors", **texts)
    templates = {"system_template": "You use bash.", "instance_template": "{{task}}"}
    DefaultAgent(model, Sandbox(), **templates, step_limit=3, cost_limit=0).run(ROW["instruction"])
