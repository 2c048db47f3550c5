"""The command `convert`. Exit codes: 0; 1 verify has found a difference; 2 an error; 130 interrupted."""

from __future__ import annotations

import sys

from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import hf_to_megatron, megatron_to_hf
from grpo_megatron.convert.inspection import describe_model, verify
from grpo_megatron.convert.options import ConvertOptions, InspectOptions, ToHfOptions, ToMegatronOptions, VerifyOptions
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.storage import StorageError
from grpo_megatron.untrusted import cut, visible


def convert(options: ConvertOptions) -> int:
    """Run the chosen action. Returns the exit code; errors are printed."""
    try:
        if isinstance(options, VerifyOptions):
            return verify(options)
        if isinstance(options, ToMegatronOptions):
            hf_to_megatron(options)
        elif isinstance(options, ToHfOptions):
            megatron_to_hf(options)
        elif isinstance(options, InspectOptions):
            print(visible(describe_model(options)))
    except (ConvertError, StorageError, UnsupportedModel) as error:
        print("\n".join(cut(line, 2000) for line in visible(f"error: {error}").splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0
