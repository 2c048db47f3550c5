"""Healing: the launcher starts the ranks again after a loss, in the layout for those that are left (docs/design.md).

A loss is a rank that was ended by a signal, a stall, or a lost connection. One rule says when the cause is in the program: an
error that tells the user what to do (a wrong config, a guard, a full disk) ends the run at once; the same exception twice,
or MAX_FAILURES failures of any kind, without a finished step in between, end it as well.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from grpo_megatron.cli.failures import Cause
from grpo_megatron.cli.ranks import Healer, Restart
from grpo_megatron.config import Config
from grpo_megatron.planning.gpus import Gpu
from grpo_megatron.storage.run_files import add_event
from grpo_megatron.training.stopping import EXIT_TO_GROW, HEARTBEAT

if TYPE_CHECKING:
    from grpo_megatron.planning.parameters import RunModels
    from grpo_megatron.planning.search import PlannedLayout

RESUME = "trainer.resume_mode=auto"
MAX_LOSSES = 3  # of the rank on one device; then the device is left out
GROW_FACTOR = 10  # a lost device is tried again after 1 step, after its second loss after 10
MAX_FAILURES = 5  # without a finished step in between
# Seconds of a recovery on GPUs that do not follow from bytes. Estimates; none was measured on a GPU.
NOTICED_S = 1.0  # a killed process
AGREED_S = 4.0  # the next epoch
STARTED_S = 25.0  # imports, process groups, the engine's graphs
STORAGE, SHA256 = 5e9, 1.5e9  # bytes per second: of a node from a shared file system, of a core (measured)
PIECES = 1e9  # bytes per second of a rank from the memory of another node, over TCP


News = tuple[str, dict[str, str], Cause]  # text, facts of the event, why


class Fallbacks:
    """The layouts of a run for fewer devices, planned before the first loss. Of several nodes, a device is a node.

    `unit`: ranks of a device.
    """

    def __init__(self, config: Config, models: RunModels, gpu: Gpu) -> None:
        from grpo_megatron.checks.validate import layout_problems
        from grpo_megatron.planning.search import fallback_layout

        trainer = config.trainer
        self.models = models
        self.config, self.world_size = config, trainer.nnodes * trainer.n_gpus_per_node
        self.has_nodes = trainer.nnodes > 1
        self.unit = trainer.n_gpus_per_node if self.has_nodes else 1
        self.layouts: dict[int, tuple[int, PlannedLayout] | None] = {}
        if config.trainer.healing.layouts == "auto":
            for most in range(self.world_size // self.unit - 1, 0, -1):
                found = fallback_layout(config, models, gpu, most * self.unit, layout_problems, self.unit)
                self.layouts[most] = found

    def restart(self, num_devices: int) -> Restart | None:
        """Returns how the run goes on with so many devices; None: it cannot."""
        if num_devices * self.unit >= self.world_size:
            return Restart(self.world_size, [RESUME])
        if (planned := self.layouts.get(num_devices)) is None:
            return None
        ranks, layout = planned
        size = f"trainer.nnodes={ranks // self.unit}" if self.has_nodes else f"trainer.n_gpus_per_node={ranks}"
        return Restart(ranks, [RESUME, size, *self._changes(layout)])

    def _changes(self, planned: PlannedLayout) -> Iterator[str]:
        from grpo_megatron.planning.search import rollout_size

        if planned.rollout_ranks != self.config.num_rollout_ranks:
            yield "{}={}".format(*rollout_size(self.config, planned.rollout_ranks))
        yield from planned.layout.overrides(self.config)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields rows of the plan: name and text."""
        spares = self.config.trainer.healing.spares
        first = "the first loss changes" if spares == 1 else f"the first {spares} losses change"
        yield "spares", f"{spares}: {first} nothing" if spares else "none"
        for most, planned in self.layouts.items():
            name = f"{most} {'nodes ' if self.has_nodes else ''}left"
            if planned is None:
                place = "the run ends" if self.has_nodes else "a lost rank starts in its place, or the run ends"
                yield name, f"no layout fits: {place}"
                continue
            ranks, layout = planned
            changes = " ".join(self._changes(layout)) or "the keys of the config"
            roles = f"{ranks - layout.rollout_ranks} train"
            roles += f", {layout.rollout_ranks} sample" if layout.rollout_ranks else ""
            estimate = (
                "" if self.config.trainer.device == "cpu" else f", {layout.seconds.step:.3g} s per step (estimated)"
            )
            yield name, f"{roles}{estimate}: {changes}"
            if self.has_nodes:
                parts = self._seconds(ranks, layout)
                named = ", ".join(f"{seconds:.3g} {part}" for part, seconds in parts.items())
                yield "", f"from the loss to the first sample {sum(parts.values()):.0f} s (estimated): {named}"

    def _seconds(self, ranks: int, layout: PlannedLayout) -> dict[str, float]:
        """Names the parts of a recovery: from memory, all of it from other nodes; else from a checkpoint on shared storage."""
        from grpo_megatron.training.checkpoint import checkpoint_bytes

        config, nodes = self.config, max(1, ranks // self.unit)
        size = checkpoint_bytes(self.models.arch, config.model.dtype, config.actor.lora)
        parts = {
            f"to notice a killed process (a silent node: {config.trainer.healing.node_timeout_s:g})": NOTICED_S,
            "to agree": AGREED_S,
            "to start processes and engines": STARTED_S,
        }
        if config.trainer.healing.memory:
            parts[f"to read {size / ranks / 1e9:.0f} GB per rank from other nodes' memory"] = size / ranks / PIECES
            return parts | {"to sync": layout.seconds.sync}
        parts[f"to read {size / nodes / 1e9:.0f} GB per node"] = size / nodes / STORAGE
        parts["to sync"] = layout.seconds.sync
        if config.trainer.verify_checkpoints == "full":  # each file is read once more, by one rank
            parts["for sha256 (trainer.verify_checkpoints)"] = size / nodes / STORAGE + size / ranks / SHA256
        return parts


class Healing(Healer):
    """The launcher's decision after each failure: whether, on which devices and in which layout the ranks start again."""

    def __init__(self, config: Config, fallbacks: Fallbacks) -> None:
        self.output_dir, self.fallbacks = config.trainer.output_dir, fallbacks
        size = fallbacks.world_size // fallbacks.unit
        self.devices: Sequence[int] = range(size + config.trainer.healing.spares)
        self.used = list(range(size))  # the device of each rank, or the nodes
        self.losses: Counter[int] = Counter()  # by device
        self.steps_done = self.num_failures = 0
        self.exceptions: set[str] = set()  # since the last step

    def after(self, cause: Cause) -> Restart | None:
        """Returns how the ranks start again, and tells why; None: the run ends."""
        restart, news = self.decide(cause)
        if news is not None:
            self.tell(*news)
        return restart

    def decide(self, cause: Cause) -> tuple[Restart | None, News | None]:
        """Returns how the ranks start again, and what is to be told of it."""
        ended_at, steps_done = time.time(), self._read_steps()
        if cause.code == EXIT_TO_GROW:
            return self.use(self.usable()), None
        if cause.is_final:
            return None, None
        if steps_done > self.steps_done:
            self.steps_done, self.num_failures = steps_done, 0
            self.exceptions.clear()
        self.num_failures += 1
        lost = [self.used[rank] for rank in cause.ranks]
        self.losses.update(lost)
        usable = self.usable()
        others = usable if self.fallbacks.has_nodes else [device for device in usable if device not in lost]
        devices = others if self.fallbacks.restart(len(others)) is not None else usable  # the lost ones in their place
        unit = self.fallbacks.unit
        problem, ranks_before = self._problem(cause), len(self.used) * unit
        # Where it is not known who is lost, the first rank that was silent counts.
        signs = cause.ranks or (range(len(self.used)) if cause.is_loss else ())
        last_sign = min((self._last_sign(rank * unit) for rank in signs), default=ended_at)
        restart = None if problem else self.use(devices)
        if restart is None:
            print(f"healing: not again: {problem or f'no layout for the {len(devices)} devices left'}", flush=True)
            return None, None
        self.exceptions.add(cause.message)
        more = self.fallbacks.restart(len(usable))
        grows = more is not None and more.world_size > restart.world_size
        grow_after = GROW_FACTOR ** (max((self.losses[d] for d in lost), default=1) - 1) if grows else None
        again = restart._replace(lost_at=last_sign, ended_at=ended_at, grow_after=grow_after)
        return again, (*self._news(cause, restart, ranks_before, lost), cause)

    def usable(self) -> list[int]:
        """Lists the devices, those with the fewest losses first."""
        return sorted((d for d in self.devices if self.losses[d] < MAX_LOSSES), key=lambda d: (self.losses[d], d))

    def use(self, devices: list[int]) -> Restart | None:
        """Returns how the ranks start on the first of these devices; None: in no layout."""
        restart = self.fallbacks.restart(len(devices))
        if restart is None:
            return None
        self.used = sorted(devices[: restart.world_size // self.fallbacks.unit])
        return restart._replace(devices=self.used)

    def _problem(self, cause: Cause) -> str:
        """Says why the cause is in the program; "": it is not."""
        if not cause.is_loss and cause.message in self.exceptions:
            return "the same exception twice without a finished step in between: its cause is in the program"
        if self.num_failures > MAX_FAILURES:
            return f"{self.num_failures} failures without a finished step in between"
        return ""

    def _news(
        self, cause: Cause, restart: Restart, ranks_before: int, lost: Sequence[int]
    ) -> tuple[str, dict[str, str]]:
        unit, names = ("node", lost) if self.fallbacks.has_nodes else ("rank", cause.ranks)
        who = f"lost {unit} {', '.join(map(str, names))}" if names else "failed"
        layout = " ".join(restart.settings[2:]) or "in the layout of the config"
        steps = f"{self.steps_done} step{'s' * (self.steps_done != 1)}"
        text = f"{who} after {steps}, with {ranks_before} ranks; goes on with {restart.world_size}, {layout}"
        return text, {"who": who, "layout": f"{ranks_before} ranks, then {restart.world_size}, {layout}"}

    def tell(self, text: str, facts: dict[str, str], cause: Cause) -> None:
        """Prints what has happened, and records it."""
        print(f"healing: {text}", flush=True)
        add_event(self.output_dir, "lost", self.steps_done, f"{text}. {cause.text.strip()}", **facts)

    def _read_steps(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.output_dir / HEARTBEAT).read_text())
        return 0

    def _last_sign(self, rank: int) -> float:
        with contextlib.suppress(OSError):
            return (self.output_dir / "heartbeats" / f"rank_{rank:05d}.json").stat().st_mtime
        return time.time()
