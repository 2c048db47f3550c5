"""`python -m grpo_megatron.environments.sandboxes STATE COMMAND`: runs a command in a sandbox that an environment has started."""

from __future__ import annotations

import json
import sys
from typing import Any

from grpo_megatron.data.folders import FolderTask
from grpo_megatron.environments.sandboxes.backend import Sandbox, SandboxLimits
from grpo_megatron.registry import import_function

ATTACHED_S = 600.0


def main() -> None:
    """Prints the output, and exits with the exit code; 124: it was ended, and stderr says why."""
    state, command = json.loads(sys.argv[1]), sys.argv[2]
    backend: Any = import_function(state["class"])
    sandbox: Sandbox = backend(FolderTask("attached", ""), SandboxLimits(**state["limits"]), **state["chosen"])
    sandbox.attach(state["state"])
    result = sandbox.run(["bash", "-c", command], ATTACHED_S, stdin=b"", variables=state["variables"])
    sys.stdout.buffer.write(result.output)
    sys.stdout.flush()
    if result.problem:
        print(result.problem, file=sys.stderr)
    sys.exit(124 if result.problem else result.exit_code)


if __name__ == "__main__":
    main()
