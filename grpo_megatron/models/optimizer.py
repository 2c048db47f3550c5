"""Megatron-Core's DDP, optimizer and learning-rate schedule, and tensors that may be offloaded to the host.

Also three corrections that saving and loading an optimizer need without Transformer Engine and Apex: `load_optimizer`,
`steps_of_empty_parts` and `_install_step_correction`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from grpo_megatron.config import MegatronConfig, OptimConfig
from grpo_megatron.device import Device


def wrap_ddp(model: torch.nn.Module, megatron: MegatronConfig, device: Device) -> DistributedDataParallel:
    """Wraps a model in DDP that sums gradients in float32: token weights contain every denominator.

    Parameters that tensor-parallel ranks have in full, and whose gradients Megatron-Core does not sum over these ranks, get the
    ranks' average. The gradients are equal up to the rounding of nondeterministic CUDA kernels, by which the copies would drift
    apart.
    """
    config: Any = model.config
    for name, parameter in model.named_parameters():
        is_cut = getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)
        is_summed = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        is_summed |= config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if not is_cut and not is_summed:  # else Megatron-Core would average what it has to sum
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
    with device.megatron():
        ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=megatron.overlap_grad_reduce,
                overlap_param_gather=megatron.overlap_param_gather,
                use_distributed_optimizer=megatron.use_distributed_optimizer,
                average_in_collective=False,
                fp8_param_gather=megatron.fp8.param_gather,
            ),
            model,
        )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp.no_sync
    return ddp


def build_optimizer(
    ddp: DistributedDataParallel,
    optim: OptimConfig,
    megatron: MegatronConfig,
    device: Device,
    vision_lr: float | None = None,
) -> MegatronOptimizer:
    """Adam as Megatron-Core builds it, with its state. Collective over the ranks of the model's groups.

    `vision_lr`: of the vision tower, whose schedule is the others', scaled. None: the same.
    """
    config = ddp.config
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_param_gather=megatron.overlap_param_gather,
        fp8_recipe=megatron.fp8.recipe if megatron.fp8.param_gather else None,
    )
    overrides = get_standard_config_overrides(settings)
    if vision_lr is not None:
        overrides[ParamKey(name="*visual.*")] = {
            "max_lr": vision_lr,
            "min_lr": optim.min_lr * vision_lr / (optim.lr or 1),
        }
    with device.megatron():
        optimizer = get_megatron_optimizer(settings, [ddp], config_overrides=overrides, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    _correct_order_in_mixed_groups(optimizer)
    _initialize_state(optimizer)
    return optimizer


def _correct_order_in_mixed_groups(optimizer: MegatronOptimizer) -> None:
    """Give Megatron's index of parameters the order that its groups have: float32 ones first.

    The index follows the gradient buffers. It is read when a state is saved or loaded. In a bfloat16 model with a float32 head
    it named another parameter, of another size, and no checkpoint could be written.
    """
    for part in _parts_with_state(optimizer):
        if isinstance(part, DistributedOptimizer):
            for number, group in enumerate(part.opt_group_ranges):
                ordered = sorted(group["params"], key=lambda parameter: parameter.dtype != torch.float32)
                for order, parameter in enumerate(ordered):
                    part.model_param_group_index_map[parameter] = (number, order)


def _initialize_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that Adam would create at its first step.

    Megatron cannot save an optimizer without state, nor load into it, and there is none until the first update.
    """
    for part in _parts_with_state(optimizer):
        if (inner := part.optimizer) is None:
            continue
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            # Transformer Engine and Apex count steps per group, and start without a count.
            part.init_state_fn(inner, part.config)
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def build_lr_scheduler(optimizer: MegatronOptimizer, optim: OptimConfig, total_steps: int) -> OptimizerParamScheduler:
    """Learning rate per optimizer step. Call `step(1)` before each update, so that a warmup does not start at 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=max(total_steps, optim.lr_warmup_steps + 1),
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=optim.lr_wsd_decay_steps,
        lr_wsd_decay_style="linear",
    )


def each_optimizer(optimizer: MegatronOptimizer) -> list[Any]:
    """Returns the parts of a chained optimizer (dense parameters, experts), or the one optimizer."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _parts_with_state(optimizer: MegatronOptimizer) -> list[Any]:
    """Returns the parts that have parameters on this rank, or could have them: Megatron marks the others as stubs."""
    return [part for part in each_optimizer(optimizer) if not getattr(part, "is_stub_optimizer", False)]


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yields the tensors that only the optimizer's step reads: moments, and float32 copies of lower-precision weights."""
    for part in _parts_with_state(optimizer):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from _main_parameters(part)


def moments(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
    """Yield (parameter, start, exp_avg, exp_avg_sq) for this rank's part of each parameter, which begins at element `start`."""
    for part in _parts_with_state(optimizer):
        states = part.optimizer.state
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                state = states[part.optimizer.param_groups[group]["params"][order]]
                start = part._get_model_param_range_map(parameter)["param"].start
                yield parameter, start, state["exp_avg"], state["exp_avg_sq"]
        else:
            groups = (getattr(part, name, ()) for name in ("fp32_from_float16_groups", "float16_groups"))
            models = dict(zip(*(itertools.chain(*group) for group in groups), strict=True))
            for main, state in states.items():
                yield models.get(main, main), 0, state["exp_avg"], state["exp_avg_sq"]


def _main_parameters(part: Any) -> Iterator[Tensor]:
    for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):  # distributed or not
        for group in getattr(part, name, ()):
            yield from (main for main in group if main is not None)


@torch.no_grad()
def copy_main_parameters(old: MegatronOptimizer, new: MegatronOptimizer) -> None:
    """Copy the float32 main parameters: with weights in FP8, a new optimizer would start from rounded values."""
    for old_part, new_part in zip(each_optimizer(old), each_optimizer(new), strict=True):
        for source, target in zip(_main_parameters(old_part), _main_parameters(new_part), strict=True):
            target.copy_(source)


@contextlib.contextmanager
def steps_of_empty_parts(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Gives a part without parameters the step count of the others inside the block.

    A pipeline stage whose layers have no experts has such a part. Megatron-Core reads a step count from the state of torch's
    Adam, and asserts that there is one; rank 0's is stored for all ranks.
    """
    parts = [part.optimizer for part in _parts_with_state(optimizer)]
    parts = [part for part in parts if isinstance(part, torch.optim.Adam | torch.optim.AdamW)]
    steps = [state["step"] for part in parts for state in part.state.values()]
    empty = [part for part in parts if not part.state] if steps else []
    for part in empty:
        part.state["no parameter"] = {"step": steps[0].clone()}  # torch keeps a key that is no tensor as it is
    try:
        yield
    finally:
        for part in empty:
            part.state.pop("no parameter", None)


def group_settings(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Returns every parameter group's settings (learning rates, weight decay, betas, eps)."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def load_optimizer(optimizer: MegatronOptimizer, state: Any) -> None:
    """Load Megatron's state. The settings stay those of the config, not of the checkpoint.

    All parameters then share one `step` tensor. Each update would increment it once per parameter, so it is copied.
    """
    settings = group_settings(optimizer)
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    for part in _parts_with_state(optimizer):
        for values in part.optimizer.state.values():
            if isinstance(values.get("step"), Tensor):
                values["step"] = values["step"].clone()


def _install_step_correction() -> None:
    """Pass the existing `step` to torch's Adam in Megatron's load, which passes none and then raises KeyError."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


_install_step_correction()


# -- offloading ----------------------------------------------------------------------------------------------------------


class OffloadedTensors:
    """Tensors of one owner, moved to the host and back. Same objects, same views, same bits.

    `offload` copies a tensor's storage to the host and resizes it to zero bytes. References to the tensor and to its views
    stay valid. `onload` resizes the storage again and copies the bytes back. A second call in a row does nothing.
    Only tensors with a storage of their own are moved. A view of a larger buffer stays: for example the "main" parameters
    of a float32 model, which are the model's own parameters. The host's buffer is kept for the next offload, and pinned if the
    device is a GPU. Tested on the CPU, where the same calls run; not run on a GPU yet.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_offloaded = False
        self._tensors: list[Tensor] = []  # of the last offload, in their order in the buffer
        self._buffer = HostBuffer(0, pinned=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that are offloaded now."""
        return sum(tensor.nbytes for tensor in self._tensors) if self.is_offloaded else 0

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> None:
        """Copy to the host, then free the device's memory for others.

        `unchanged`: the tensors have not changed since `onload`, so that the bytes on the host are used again.
        """
        if self.is_offloaded:
            return
        moved = list({id(tensor): tensor for tensor in tensors if _can_offload(tensor)}.values())
        if list(map(id, moved)) != list(map(id, self._tensors)):
            self._tensors, unchanged = moved, False
            if (size := sum(tensor.nbytes for tensor in moved)) != self._buffer.num_bytes:
                self._buffer = HostBuffer(0, pinned=False)  # the old one goes first
                self._buffer = HostBuffer(size, pinned=self.device.is_cuda)
        if not unchanged:
            for tensor, parts in self._places():
                for begin, part in parts:
                    part.copy_(_bytes_of(tensor)[begin : begin + len(part)], non_blocking=True)
        self.device.synchronize()  # the copies are complete
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.is_offloaded = True
        self.device.empty_cache()

    @torch.no_grad()
    def onload(self) -> None:
        """Undo `offload`."""
        if not self.is_offloaded:
            return
        for tensor, parts in self._places():
            tensor.untyped_storage().resize_(tensor.nbytes)
            # The same bits are no change: a frozen tower's features stay valid (vision.py).
            with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
                for begin, part in parts:
                    _bytes_of(tensor)[begin : begin + len(part)].copy_(part, non_blocking=True)
        self.device.synchronize()
        self.is_offloaded = False

    def _places(self) -> Iterator[tuple[Tensor, Iterable[tuple[int, Tensor]]]]:
        start = 0
        for tensor in self._tensors:
            end = start + tensor.nbytes
            yield tensor, self._buffer.parts(start, end)
            start = end


class HostBuffer:
    """One flat buffer of `num_bytes` on the host, in blocks.

    torch rounds every pinned block up to a power of two, up to twice the bytes of a tensor. These blocks are powers of two:
    BLOCK as often as it fits, then smaller ones. Less than SMALLEST is lost.
    """

    BLOCK, SMALLEST = 1 << 30, 1 << 20

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self.blocks: list[Tensor] = []
        rest, size = num_bytes, self.BLOCK
        while rest > 0:
            while size > rest and size > self.SMALLEST:
                size //= 2
            self.blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
            rest -= size

    def parts(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (offset from `start`, bytes) of every block that overlaps bytes `start` to `end`."""
        first = 0
        for block in self.blocks:
            low, high = max(start, first), min(end, first + len(block))
            if low < high:
                yield low - start, block[low - first : high - first]
            first += len(block)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _can_offload(tensor: Tensor) -> bool:
    """Returns whether it is a plain, contiguous tensor of more than one number, alone in its storage."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous()
    return is_plain and tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.nbytes
