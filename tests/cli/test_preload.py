"""What the process that CPU ranks are forked from imports, and what it leaves out: modules by name, no seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.cli import ranks
from grpo_megatron.imports import without

ROOT = Path(__file__).resolve().parents[2]
# Of torch's compiler, what Megatron-Core would import for functions that no CPU run calls; and what other engines need.
NOT_IMPORTED = (
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "functorch.compile",
    "networkx",
    "vllm",
    "openai",
)


def test_the_server_is_told_the_engine_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda names: None)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: started.append(os.environ[ranks.PRELOADED_ENGINE]))
    for engine in ("vllm", "my.module:Engine", None):
        ranks.start_fork_server(engine)
    assert started == ["vllm", "my.module:Engine", ""] and ranks.PRELOADED_ENGINE not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA, Megatron-Core compiles its fused functions")
def test_the_trainer_and_the_transformers_engine_need_no_compiler() -> None:
    lines = [
        "import sys",
        "from grpo_megatron.cli import preload",
        "preload.import_trainer(); preload.import_engine('transformers')",
        "assert {'grpo_megatron.trainer', 'transformers.models.llama.modeling_llama'} <= sys.modules.keys()",
        f"found = sys.modules.keys() & set({NOT_IMPORTED})",
        "assert not found, found",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT)


def test_a_package_can_be_left_out_of_an_import() -> None:
    already: Any = torch
    with without(["wave", "torch"]):
        with pytest.raises(ImportError):
            import wave
        import torch as same

        assert same is already
    import wave

    assert wave.open is not None
