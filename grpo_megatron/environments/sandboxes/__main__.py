"""`python -m grpo_megatron.environments.sandboxes STATE COMMAND`: runs a command in a sandbox that an environment has started."""

from __future__ import annotations

import sys

from grpo_megatron.environments.sandboxes.backend import run_attached


def main() -> None:
    """Prints the output, and exits with the exit code; 124: it was ended, and stderr says why."""
    result = run_attached(sys.argv[1:2], sys.argv[2])
    sys.stdout.buffer.write(result.output)
    sys.stdout.flush()
    if result.problem:
        print(result.problem, file=sys.stderr)
    sys.exit(124 if result.problem else result.exit_code)


if __name__ == "__main__":
    main()
