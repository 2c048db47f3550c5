"""FLOP of a pass and model FLOP utilisation (MFU), for dense decoders with grouped-query attention and a gated MLP.

    training pass = 6 N T + 6 d H L sum(s^2),  T = sum(s) over sequences of s tokens
    N = L (3 h f + h (2 H d + 2 K d)) + 2 V h

h hidden size, f MLP width, L layers, H query heads, K key/value heads, d head size, V vocabulary. A multiply-add counts
2, backward counts twice forward, so forward alone is one third. Causal attention counts half the square. Recomputation
never counts. Embedding and head both count, tied or not (as verl does). Lengths are the true ones, so that padding
lowers MFU. Sliding-window attention is counted as full causal attention.

    MFU = FLOP / (seconds x devices x peak)

FP8 departs from the peers, which divide by the bf16 peak: the ideal time is the sum of FLOP_p / peak_p over precisions,
with the layers' linear products in FP8 and attention core, embedding and head in bf16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import Config


@dataclass(frozen=True)
class ModelShape:
    """The seven numbers of a dense decoder that FLOP depend on."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int

    @classmethod
    def from_hf(cls, config: Any) -> ModelShape:
        """From a Hugging Face config: the object, or the mapping of its config.json.

        Raises ValueError for a mixture of experts, whose active parameters the formula does not describe.
        """
        values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if values.get(k)), None)
        if experts is not None:
            raise ValueError(f"{experts}={values[experts]}: FLOP are counted for dense models only")
        heads = values["num_attention_heads"]
        return cls(
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            ffn_size=values["intermediate_size"],
            vocab_size=values["vocab_size"],
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of the linear products of all layers."""
        attention = self.hidden_size * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * (3 * self.hidden_size * self.ffn_size + attention)

    @property
    def num_parameters(self) -> int:
        """N of the header: without biases and norms, embedding and head both."""
        return self.layer_parameters + 2 * self.vocab_size * self.hidden_size


def flops_per_pass(shape: ModelShape, sequence_lengths: Sequence[int], forward_only: bool = False) -> float:
    """FLOP of one pass over all sequences of a batch: forward and backward, or forward alone."""
    tokens, squares = sum(sequence_lengths), sum(s * s for s in sequence_lengths)
    attention = shape.head_dim * shape.num_heads * shape.num_layers * squares
    return (2.0 if forward_only else 6.0) * (shape.num_parameters * tokens + attention)


def linear_flops_per_pass(shape: ModelShape, sequence_lengths: Sequence[int], forward_only: bool = False) -> float:
    """The part of `flops_per_pass` in the layers' linear products: what an FP8 recipe runs in FP8."""
    return (2.0 if forward_only else 6.0) * shape.layer_parameters * sum(sequence_lengths)


# Dense bf16 peak, TFLOP/s. SXM parts: on a PCIe or NVL card set trainer.peak_tflops (H100 PCIe 756, H100 NVL 835).
_PEAK_BF16 = {
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "H20": 148.0,
    "L20": 119.5,
    "L40S": 362.0,
    "L40": 181.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "MI300X": 1307.0,
}
_WITHOUT_FP8 = ("A100", "A800")


def peak_tflops(device_name: str, precision: Literal["bf16", "fp8"] = "bf16") -> float | None:
    """Dense peak of one device in TFLOP/s, by marketing name ("NVIDIA H100 80GB HBM3"). None: unknown, or no FP8."""
    words = re.findall(r"[A-Z0-9]+", device_name.upper())  # whole words: H20 is not H200
    part = next((word for word in words if word in _PEAK_BF16), None)
    if part is None or (precision == "fp8" and part in _WITHOUT_FP8):
        return None
    if precision == "bf16":
        return _PEAK_BF16[part]
    return 1979.0 if _PEAK_BF16[part] == 989.0 else 2 * _PEAK_BF16[part]  # 989 is 989.4 rounded


def mfu(
    flops: float,
    seconds: float,
    num_devices: int,
    peak: float,
    *,
    fp8_flops: float = 0.0,
    fp8_peak: float | None = None,
) -> float:
    """Ideal time / time, in [0, 1]. Peaks are TFLOP/s of one device.

    `flops` is all FLOP on all devices; `fp8_flops` is the part of it that ran in FP8, and needs `fp8_peak`.
    """
    assert fp8_flops <= flops
    assert fp8_peak is not None or not fp8_flops
    ideal = (flops - fp8_flops) / peak + (fp8_flops / fp8_peak if fp8_peak else 0.0)
    return ideal / (1e12 * seconds * num_devices)


def peaks(config: Config, device_name: str, num_layers: int) -> dict[str, Any]:
    """The arguments of `mfu_metrics` about peaks. `trainer.peak_tflops`, where given, is the divisor of everything."""
    own, fp8 = config.trainer.peak_tflops, config.actor.megatron.fp8
    in_fp8 = fp8.recipe is not None and own is None
    in_bf16 = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16 if fp8.first_last_layers_bf16 else 0
    return {
        "peak": own or peak_tflops(device_name),
        "fp8_peak": peak_tflops(device_name, "fp8") if in_fp8 else None,
        "fp8_share": 1 - min(in_bf16, num_layers) / num_layers,
    }


def mfu_metrics(
    reduced: Mapping[str, float],
    shape: ModelShape,
    sequence_lengths: Sequence[int],
    *,
    num_devices: int,
    peak: float | None,
    fp8_peak: float | None = None,
    fp8_share: float = 1.0,
    num_epochs: int = 1,
) -> dict[str, float]:
    """`perf/tflops/*` (TFLOP/s per device) and, where `peak` is known, `perf/mfu/*` with `perf/peak_tflops`.

    With `fp8_peak` (then `perf/peak_tflops_fp8`), `fp8_share` of the layers have their linear products in FP8.

    `actor` is the update over `timing_s/update_actor`, `num_epochs` passes; `actor_infer` the forward pass over
    `timing_s/old_log_prob`. A phase without seconds is left out. `sequence_lengths`: prompt + response tokens of all
    trained samples of all ranks.
    """
    result: dict[str, float] = {}
    for name, passes, forward_only, phase in (
        ("actor", num_epochs, False, "update_actor"),
        ("actor_infer", 1, True, "old_log_prob"),
    ):
        flops = passes * flops_per_pass(shape, sequence_lengths, forward_only)
        linear = passes * linear_flops_per_pass(shape, sequence_lengths, forward_only)
        seconds = reduced.get(f"timing_s/{phase}", 0.0)
        if seconds > 0:
            result[f"perf/tflops/{name}"] = flops / (1e12 * seconds * num_devices)
            if peak is not None:
                in_fp8 = linear * fp8_share if fp8_peak else 0.0
                result[f"perf/mfu/{name}"] = mfu(flops, seconds, num_devices, peak, fp8_flops=in_fp8, fp8_peak=fp8_peak)
                result |= {"perf/peak_tflops": peak} | ({"perf/peak_tflops_fp8": fp8_peak} if fp8_peak else {})
    return result
