"""Slots: many models share the parameters and the optimizer of one policy. One is in it, the others wait in host memory.

A model's state is what an optimizer step reads and writes: trained parameters, float32 main parameters, moments, step counts,
and the gradients since the last step. Going in and out copies bits, so models do not see each other. A rank moves its own
shards without communication, and all ranks move the same model at the same time.

With LoRA a model of rank r uses the first r rows of A and columns of B of the server's rank. The other rows of A and all of B
start as zeros, so their gradients are zeros, and Adam leaves zeros as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.models.lora.layers import initial_factor
from grpo_megatron.models.lora.table import LORA_A
from grpo_megatron.models.optimizer import each_optimizer, state_tensors
from grpo_megatron.models.policy import Policy
from grpo_megatron.service.wire import AdamSettings, LoraRequest


@dataclass
class _State:
    """The copies of one model's tensors on the host, in the order of `Slots._tensors`; the group's step counts."""

    tensors: list[Tensor]
    steps: list[Any]
    gradients: list[Tensor] | None  # None: none since the last step


class Slots:
    """The states of all loaded models. `model_id`: the one in the policy; None: none."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.model_id: str | None = None
        self.has_gradients = False
        self._waiting: dict[str, _State] = {}
        self.first = self._copied(list(self.parameters()))  # of every new model

    @property
    def loaded(self) -> set[str]:
        """Returns the models that are in memory."""
        return {*self._waiting} | ({self.model_id} if self.model_id is not None else set())

    def parameters(self) -> Iterator[Tensor]:
        """Yields the trained parameters of this rank."""
        return (one.data for one in self.policy.ddp.parameters() if one.requires_grad)

    def _tensors(self) -> list[Tensor]:
        """Returns all tensors of the state, each once: in float32 the main parameters may be the model's own."""
        tensors = [*self.parameters(), *state_tensors(self.policy.optimizer)]
        return list({(one.data_ptr(), one.shape): one for one in tensors}.values())

    def _buffers(self) -> list[Tensor]:
        ddp = self.policy.ddp
        return [buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups. Fused optimizers count steps there."""
        parts = (part.optimizer for part in each_optimizer(self.policy.optimizer))
        return [group for part in parts if part is not None for group in part.param_groups]

    def _copied(self, tensors: list[Tensor]) -> list[Tensor]:
        return [one.detach().to("cpu", copy=True) for one in tensors]

    @torch.no_grad()
    def enter(self, model_id: str) -> None:
        """Put a loaded model into the policy."""
        if model_id == self.model_id:
            return
        self.leave()
        state = self._waiting.pop(model_id)
        for tensor, saved in zip(self._tensors(), state.tensors, strict=True):
            tensor.copy_(saved)
        self._set_steps(state.steps)
        for buffer, saved in zip(self._buffers(), state.gradients or (), strict=False):
            buffer.copy_(saved)
        self.model_id, self.has_gradients = model_id, state.gradients is not None

    @torch.no_grad()
    def leave(self) -> None:
        """Copy the model in the policy to the host."""
        if self.model_id is None:
            return
        with self.policy.readable_weights():
            gradients = self._copied(self._buffers()) if self.has_gradients else None
            steps = [group.get("step") for group in self._groups()]
            self._waiting[self.model_id] = _State(self._copied(self._tensors()), steps, gradients)
        self.model_id, self.has_gradients = None, False

    def _set_steps(self, steps: list[Any]) -> None:
        for group, step in zip(self._groups(), steps, strict=True):
            if step is not None:
                group["step"] = step

    @torch.no_grad()
    def create(self, model_id: str, lora: LoraRequest | None) -> None:
        """Put a new model with its first values into the policy: of the base, or new adapters."""
        self.leave()
        for parameter, first in zip(self.parameters(), self.first, strict=True):
            parameter.copy_(first)
        if lora is not None:
            self._set_factors(lora)
        self.policy.optimizer.reload_model_params()  # into the float32 main parameters
        self.reset_optimizer()
        self.model_id, self.has_gradients = model_id, False

    def _set_factors(self, lora: LoraRequest) -> None:
        adapters, mesh = self.policy.lora, self.policy.mesh
        assert adapters is not None and adapters.config.rank is not None
        mesh = mesh if lora.seed is None else replace(mesh, seed=lora.seed)
        for name, row in adapters.rows.items():
            if not name.endswith(LORA_A):
                continue
            a = adapters.modules[row.base.megatron].lora_a
            a.copy_(initial_factor(row, adapters.config, self.policy.arch, mesh))
            is_trained = lora.train_attn if "attn" in row.hf[0] or "attention" in row.hf[0] else lora.train_mlp
            rank = lora.rank if is_trained else 0
            for number in range(len(row.targets)):
                a[number * adapters.config.rank + rank : (number + 1) * adapters.config.rank] = 0

    def reset_optimizer(self) -> None:
        """Set the moments and step counts to zero."""
        for part in each_optimizer(self.policy.optimizer):
            states = part.optimizer.state.values() if part.optimizer is not None else ()
            for value in (value for state in states for value in state.values()):
                if isinstance(value, Tensor):
                    value.zero_()
        self._set_steps([0 if "step" in group else None for group in self._groups()])

    def drop(self, model_id: str) -> None:
        """Forget a model."""
        self._waiting.pop(model_id, None)
        if model_id == self.model_id:
            self.model_id, self.has_gradients = None, False

    # -- gradients and steps ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_gradients(self, compute: Any) -> Any:
        """Returns `compute()`, a pass that replaces the gradients: what was there is added to its own."""
        before = [buffer.clone() for buffer in self._buffers()] if self.has_gradients else []
        try:
            with torch.enable_grad():
                result = compute()
        except BaseException:  # a failed pass leaves a part of its gradients
            for buffer, saved in zip(self._buffers(), before, strict=False):
                buffer.copy_(saved)
            raise
        for buffer, saved in zip(self._buffers(), before, strict=False):
            buffer += saved
        self.has_gradients = True
        return result

    def step(self, adam: AdamSettings) -> float:
        """Make one step of AdamW. Returns the gradient's norm before clipping; infinity: no step, as it is not finite."""
        policy = self.policy
        if not self.has_gradients:
            policy.ddp.zero_grad_buffer()
        self.has_gradients = False
        for group in self._groups():
            group.update(
                lr=adam.learning_rate, weight_decay=adam.weight_decay, betas=(adam.beta1, adam.beta2), eps=adam.eps
            )
        for part in each_optimizer(policy.optimizer):
            part.config.clip_grad = adam.grad_clip_norm
        policy.num_skipped_in_a_row = 0  # one model's gradients end no other's
        return policy.optim_step(scheduled=False)
