"""`python -m tests.soak.command train ...`: the real command. Its ranks carry out the fault that SOAK_FAULT describes."""

import os
import sys

if __name__ == "__main__":
    from grpo_megatron.cli.main import main

    os.environ["SOAK_LAUNCHER"] = str(os.getpid())
    sys.exit(main())
else:  # multiprocessing imports this file in every forked rank, before the rank begins
    from tests.soak import injection

    injection.install()
