"""RolloutRank: the program of a rank that only samples (`rollout.placement: separate`). roles.py has the other side.

for each version of the weights, when it has arrived:
    load it, checked                  the next version may arrive from now on
    validate, when due
    sample the steps of this version    prompts -> samples -> rewards, and send them
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.checks.validate import Checked, check_alone
from grpo_megatron.config import Config
from grpo_megatron.device import Device
from grpo_megatron.parallel.control import JOINED_FILE
from grpo_megatron.parallel.heartbeat import STEP, Heartbeat
from grpo_megatron.parallel.mesh import destroy_mesh
from grpo_megatron.processes.variables import set_determinism_variables
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import Group, without_row
from grpo_megatron.sync.attest import EngineWeights
from grpo_megatron.training.colocation import build_probe, build_rollout_engine, build_weight_sync
from grpo_megatron.training.placement import build_generator, join_world, local_collector, with_engine_sequences
from grpo_megatron.training.roles import Begin, End, NewWeights, SampledStep, StateWanted, is_validated
from grpo_megatron.training.stopping import Cadence, Stopped
from grpo_megatron.training.validation import Validator


class RolloutRank:
    """The program of a rank that only samples. Build it on every such rank, `run` once. Collective over these ranks."""

    weights: EngineWeights

    def __init__(self, config: Config, checked: Checked | None = None) -> None:
        set_determinism_variables(config)
        checked = checked or check_alone(config)
        with contextlib.ExitStack() as opened:
            self._build(checked.config, checked, opened)
            self.opened = opened.pop_all()  # reward workers, which `run` closes

    def _build(self, config: Config, checked: Checked, opened: contextlib.ExitStack) -> None:
        trainer, device = config.trainer, Device(config.trainer.device)
        self.mesh = join_world(config, device)
        assert self.mesh.bridge is not None
        self.bridge, self.batch_size = self.mesh.bridge, config.data.train_batch_size
        config = with_engine_sequences(config, checked, self.mesh)
        self.heartbeat = opened.enter_context(Heartbeat(trainer.output_dir, self.mesh, trainer.stall_timeout_s))
        if file := os.environ.get(JOINED_FILE):
            Path(file).touch()
        self.metrics = Metrics(device.synchronize, in_float32=config.model.exact)
        self.metrics.within = self.heartbeat.phase
        self.cadence = Cadence(trainer, config.algorithm.iteration_steps)
        self.engine = build_rollout_engine(config, checked, self.mesh, device)
        weights_digest = lambda: self.weights.weights_digest  # noqa: E731
        generator = build_generator(config, checked, self.mesh, self.engine, weights_digest, opened)

        begin: Begin = self._receive()  # the trainer has restored its checkpoint
        self.clock, self.heals = begin.clock, begin.heals
        self.weight_sync = build_weight_sync(config, checked.arch, self.mesh, device, begin.stage_of)
        self.weights = EngineWeights(self.engine, self.mesh, self.weight_sync, build_probe(config, checked.arch))
        self.collector = local_collector(config, checked, self.mesh, generator, clock=self.clock)
        if begin.state:
            self.collector.load_state(begin.state)
        self.validator = None
        if checked.val_prompts:
            self.validator = Validator(generator, checked.val_prompts, config, self.cadence)

    def run(self) -> None:
        """Sample until the trainer needs no more, and release everything. Raises Stopped when the run stops early."""
        with self.opened, self.heartbeat.naming_timeouts():
            exit_code = self._serve()
            self.bridge.close()
            self.mesh.all_gather(None)  # all are at the end, or all are replaced
        if file := os.environ.get(JOINED_FILE):  # torch's agent hangs where one that has ended is replaced
            Path(file).unlink(missing_ok=True)
        self.engine.shutdown()
        destroy_mesh()
        if exit_code:
            raise Stopped("the ranks that train have stopped", exit_code)

    def _serve(self) -> int:
        """Do what the trainer says; returns the exit code with which it ends."""
        self._expect(self.clock.first)
        while True:
            with self.metrics.phase("wait_weights"):
                message = self._receive()
            if isinstance(message, End):
                return message.exit_code
            if isinstance(message, StateWanted):
                self._send(self.collector.state())
            else:
                self._sample_with(message)

    def _sample_with(self, new: NewWeights) -> None:
        """Generate everything that these weights sample."""
        version = new.header.version
        steps = self.clock.steps(version)
        self.heartbeat.step = steps.start if steps else version
        self.weights.load(self.weight_sync.received(new.header), version, new.expected, self.metrics)
        with self.metrics.phase("probe"):
            self.weights.measure("policy", new.logprobs, self.metrics)
        self._expect(version + 1)
        validation = None
        if self.validator is not None and is_validated(version, self.clock, self.cadence):
            validation = version, self.validator.run(version, self.metrics)
        for step in steps:
            self.heartbeat.step = step
            with self.heartbeat.phase(STEP):
                groups = self.collector.groups(step, self.batch_size, self.metrics)
            self._send_step(groups, validation)
            validation = None
        if validation is not None:
            self._send_step(None, validation)

    def _expect(self, version: int) -> None:
        """Receive the next weights from now on where they are staged, unless there will be none from `version` on."""
        cadence = self.cadence if self.validator is not None else None
        versions = range(version, self.clock.num_steps + 1)
        if any(self.clock.steps(v) or is_validated(v, self.clock, cadence) for v in versions):
            self.weight_sync.expect()

    def _send_step(self, groups: list[Group] | None, validation: tuple[int, dict[str, float]] | None) -> None:
        numbers = self.metrics.reduce(self.mesh.all_gather)
        versions = None if groups is None else [group.version for group in groups]
        state = self.collector.state() if self.heals and groups is not None else None
        self._send(SampledStep(versions, numbers, self.collector.epoch(), validation, state))
        if groups and self.mesh.is_replica_leader:
            prompts = {id(sample.prompt): without_row(sample.prompt) for group in groups for sample in group.samples}
            groups = [Group(g.version, [replace(s, prompt=prompts[id(s.prompt)]) for s in g.samples]) for g in groups]
            self.bridge.send(groups, to=self.mesh.engine_replica % self.bridge.num_training)
        self.bridge.flush(keep=2 * self.clock.lag + 4)  # these may wait for the end of an update; the others were read

    def _send(self, value: Any) -> None:
        if self.mesh.rank == 0:
            self.bridge.send(value, to=0)

    def _receive(self) -> Any:
        return self.mesh.broadcast(self.bridge.receive(0) if self.mesh.rank == 0 else None)
