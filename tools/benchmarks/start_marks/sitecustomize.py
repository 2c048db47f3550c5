"""Reports the moments of a start, from inside the processes of a run that `tools/benchmarks/start.py` has started.

Python imports this file in every process that has its folder in PYTHONPATH. It changes no file of the measured checkout, so
that any commit can be measured. Each line that it writes is a JSON object: process, rank, moment, wall clock and the
processor time of this process so far.
"""

import contextlib
import functools
import importlib.util
import json
import os
import sys
import time

PIPE = "GRPO_MEGATRON_START_MARKS"  # path of a named pipe
MODULES = (
    "torch",
    "transformers",
    "megatron.core",
    "vllm",
    "grpo_megatron.trainer",
)  # -> when their import begins and ends
CALLS = {  # module -> qualified name -> moment. Both names of what has another name at commit 016e06b
    "grpo_megatron.checks.validate": {"validate": "validate"},
    "grpo_megatron.validate": {"validate": "validate"},
    "grpo_megatron.cli.ranks": {"start_ranks": "start ranks"},
    "grpo_megatron.starting": {"start_ranks": "start ranks"},
    "grpo_megatron.trainer": {"Trainer.__init__": "build trainer"},
    "grpo_megatron.parallel.mesh": {"build_mesh": "join process groups"},
    "grpo_megatron.models.policy": {"Policy.__init__": "build policy"},
    "grpo_megatron.rollout.vllm.engine": {
        "VllmEngine.__init__": "build engine",
        "VllmEngine.load_weights": "sync weights",
        "VllmEngine.logprobs": "probe",
        "VllmEngine.score": "probe",
    },
    "grpo_megatron.rollout.transformers_engine": {
        "TransformersEngine.__init__": "build engine",
        "TransformersEngine.load_weights": "sync weights",
        "TransformersEngine.logprobs": "probe",
    },
    "grpo_megatron.rollout.vllm.process": {"preload": "import vllm, all", "_import_vllm": "import vllm, core"},
    "grpo_megatron.rewards.pool": {"RewardPool.__init__": "reward workers"},
}
DRAWS = {  # what hands the first request to the engine
    "grpo_megatron.rollout.vllm.engine": ("VllmEngine.submit", "VllmEngine.generate"),
    "grpo_megatron.rollout.transformers_engine": ("TransformersEngine.submit",),
}
SAMPLERS = {  # what returns the first token
    "vllm.v1.sample.sampler": ("Sampler.forward",),
    "grpo_megatron.rollout.transformers_engine": ("RunningBatch.step",),
}
FIRST_TOKEN = "first token"
_begun = []  # of samples


def report(moment, kind):
    line = {"pid": os.getpid(), "rank": os.environ.get("RANK"), "moment": moment, "kind": kind, "wall": time.time()}
    line["processor"] = time.process_time()
    with contextlib.suppress(OSError):
        file = os.open(os.environ[PIPE], os.O_WRONLY | os.O_NONBLOCK)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)


def timed(call, moment):
    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        report(moment, "begin")
        try:
            return call(*args, **kwargs)
        finally:
            report(moment, "end")

    return wrapped


def drawing(call):
    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        if not _begun:
            _begun.append(call)
            report("draw", "begin")
        return call(*args, **kwargs)

    return wrapped


def sampling(call):
    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        result = call(*args, **kwargs)
        if len(_begun) == 1:
            _begun.append(call)
            report(FIRST_TOKEN, "end")
        return result

    return wrapped


def wrap(module, name, wrapper):
    owner = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is not None and last in vars(owner):
        setattr(owner, last, wrapper(vars(owner)[last]))


class Loader:
    """The loader of a module, which wraps functions of it once it is loaded."""

    def __init__(self, loader, name):
        self.loader, self.name = loader, name

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        if self.name in MODULES:
            report(f"import {self.name}", "begin")
        self.loader.exec_module(module)
        if self.name in MODULES:
            report(f"import {self.name}", "end")
        for name, moment in CALLS.get(self.name, {}).items():
            wrap(module, name, functools.partial(timed, moment=moment))
        for name in DRAWS.get(self.name, ()):
            wrap(module, name, drawing)
        for name in SAMPLERS.get(self.name, ()):
            wrap(module, name, sampling)


class Finder:
    def __init__(self):
        self.names = {*MODULES, *CALLS, *DRAWS, *SAMPLERS}

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        self.names.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, name)
        return spec


if PIPE in os.environ:
    report("python", "begin")
    sys.meta_path.insert(0, Finder())
