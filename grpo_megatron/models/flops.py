"""FLOP of a pass and model FLOP utilisation (MFU), for decoders with gated MLPs or experts.

A multiply-add counts 2 and the backward pass twice the forward pass. Causal attention counts half the square. Recomputation
never counts. Embedding and head both count, tied or not (as in verl). Lengths are without padding, so that padding lowers MFU.
Of a window, the pairs within it count. Each sample counts its images, although a frozen tower computes an image once in a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_megatron.algo.plan import SequenceCost
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture


def linear_parameters(arch: Architecture) -> int:
    """Returns the active weights of attention, MLPs and experts: those in FP8 under a recipe. No norms, no biases."""
    heads, groups, latent = arch.num_attention_heads, arch.num_query_groups, arch.latent
    attention = int(arch.hidden_size * ((2 + arch.output_gate) * heads + 2 * groups) * arch.head_dim)
    if latent is not None:
        attention = latent.num_parameters(arch.hidden_size, heads) - latent.kv_rank - (latent.q_rank or 0)
    mlps_per_token = arch.experts_per_token if arch.num_experts else 1
    width = arch.ffn_hidden_size * mlps_per_token + arch.shared_ffn_hidden_size
    width = (arch.num_layers - arch.num_dense_layers) * width + arch.num_dense_layers * arch.dense_ffn_hidden_size
    linear = arch.num_linear_layers
    attentions = (arch.num_layers - linear) * attention
    if (delta := arch.delta) is not None:
        attentions += linear * (delta.input_size + delta.value_size) * arch.hidden_size
    return 3 * arch.hidden_size * width + attentions


def active_parameters(arch: Architecture) -> int:
    """Returns N, the parameters that one token passes through, without biases and norms, with embedding and head both.

        N = L (3 h f k + h E + A) + 2 V h,  A = h (2 H d + 2 K d)

    h hidden size, L layers, H query heads, K key/value heads, d head size, V vocabulary, f width of the MLP or of one expert.
    A dense model has k = 1 and E = 0. A mixture of experts sends each token through k of E experts, through the router, h E,
    and through an MLP that all tokens share. In DeepSeek's models the first layers have an MLP instead, and A is the number
    of weights of latent attention; with an output gate it is h (3 H d + 2 K d), and that of a gated delta net its own.
    """
    routers = (arch.num_layers - arch.num_dense_layers) * arch.hidden_size * (arch.num_experts + arch.shared_gates)
    return linear_parameters(arch) + routers + 2 * arch.vocab_size * arch.hidden_size


def tower_parameters(arch: Architecture) -> int:
    """Returns the tower's multiply-adds M per image token; 0 for a model that reads no images.

        M = p (D (4 w^2 + 3 w f) + 6 c^2 w) + L ((p w)^2 + p w h),  f the MLP's width (2 w f if it is not gated)

    p patches of c x c pixels per token, D layers of width w, L mergers (DeepStack has several). The core
    of the tower's attention, which in Qwen2.5-VL has short windows, does not count.
    A forward pass costs 2 M per image token, and a backward pass that trains any of the tower 4 M more.
    """
    if (vision := arch.vision) is None:
        return 0
    patches, width = vision.merge**2, vision.width
    layer = 4 * width**2 + (3 if vision.gated else 2) * width * vision.ffn_width
    merger = (1 + vision.levels) * patches * width * (patches * width + arch.hidden_size)
    return patches * (vision.depth * layer + 6 * vision.patch**2 * width) + merger


def _per_square(arch: Architecture) -> tuple[float, float]:
    """Returns d H L: a sequence's multiply-adds in attention, over its length squared. d: mean of key's and value's size.

    The first L counts the layers with full attention, the second those with a window (see `SequenceCost`).
    """
    head_dim = arch.head_dim if arch.latent is None else (arch.latent.key_dim + arch.latent.value_dim) / 2
    windowed = sum(arch.window_of(layer) is not None for layer in range(arch.num_layers))
    full = arch.num_layers - arch.num_linear_layers - windowed
    return head_dim * arch.num_attention_heads * full, head_dim * arch.num_attention_heads * windowed


def state_products(arch: Architecture) -> int:
    """Returns the multiply-adds of a token in the convolutions and states of gated delta nets: L (C c + 3 V k v).

    C channels have c taps; V states of k x v are read twice and written once. Kernels work on chunks of tokens, and do more.
    """
    if (delta := arch.delta) is None:
        return 0
    states = 3 * delta.value_heads * delta.key_dim * delta.value_dim
    return arch.num_linear_layers * (delta.conv_size * delta.kernel + states)


def sequence_cost(arch: Architecture) -> SequenceCost:
    """Returns the multiply-adds by which rows are balanced over data-parallel ranks."""
    head, (full, windowed) = arch.vocab_size * arch.hidden_size, _per_square(arch)
    return SequenceCost(
        per_token=active_parameters(arch) + state_products(arch) - 2 * head,  # without embedding and head
        per_response_token=head,
        per_square=round(full),
        per_windowed_square=round(windowed),
        window=arch.sliding_window or 0,
    )


def flops_per_pass(arch: Architecture, sequence_lengths: Sequence[int], forward_only: bool = False) -> float:
    """Returns the FLOP of one pass over all sequences of a batch: forward and backward, or forward alone (a third).

    6 (N + S) T + 6 d H L sum(s^2),  T = sum(s) over sequences of s tokens, S = state_products; for windows see `SequenceCost`
    """
    tokens, cost = sum(sequence_lengths), SequenceCost(0, 0, *_per_square(arch), arch.sliding_window or 0)
    per_token = active_parameters(arch) + state_products(arch)
    return (2.0 if forward_only else 6.0) * (per_token * tokens + sum(map(cost.attention, sequence_lengths)))


def linear_flops_per_pass(arch: Architecture, sequence_lengths: Sequence[int], forward_only: bool = False) -> float:
    """Returns the part of `flops_per_pass` that an FP8 recipe computes in FP8."""
    return (2.0 if forward_only else 6.0) * linear_parameters(arch) * sum(sequence_lengths)


# bf16 peak without sparsity, in TFLOP/s, of SXM parts. For a PCIe or NVL card set trainer.peak_tflops (H100 PCIe 756,
# H100 NVL 835).
_PEAK_BF16 = {
    "H20": 148.0,
    "L20": 119.5,
    "L40S": 362.0,
    "L40": 181.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "MI300X": 1307.0,
}
_PEAK_BF16 |= {**dict.fromkeys(("H100", "H800", "H200"), 989.0), **dict.fromkeys(("A100", "A800"), 312.0)}
_WITHOUT_FP8 = ("A100", "A800")


def peak_tflops(device_name: str, precision: Literal["bf16", "fp8"] = "bf16") -> float | None:
    """Returns the peak of one device in TFLOP/s, without sparsity, by marketing name ("NVIDIA H100 80GB HBM3").

    None: the device is unknown, or has no FP8.
    """
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
    """Returns the ideal time / the measured time, in [0, 1]. Peaks are in TFLOP/s of one device.

        MFU = FLOP / (seconds x devices x peak)

    FP8: other frameworks divide by the bf16 peak. Here the ideal time is the sum of FLOP_p / peak_p over precisions. The
    linear products of attention, MLP and experts are in FP8; attention core, router, embedding and head are not.

    `flops` is the FLOP of all devices; `fp8_flops` is the part of it that ran in FP8, and needs `fp8_peak`.
    """
    assert fp8_flops <= flops
    assert fp8_peak is not None or not fp8_flops
    ideal = (flops - fp8_flops) / peak + (fp8_flops / fp8_peak if fp8_peak else 0.0)
    return ideal / (1e12 * seconds * num_devices)


def peaks(config: Config, device_name: str, num_layers: int) -> dict[str, Any]:
    """Returns the arguments of `mfu_metrics` about peaks. `trainer.peak_tflops`, if set, is the peak of every precision."""
    given, fp8 = config.trainer.peak_tflops, config.actor.megatron.fp8
    uses_fp8_peak = fp8.recipe is not None and given is None
    bf16_layers = 0
    if fp8.first_last_layers_bf16:
        bf16_layers = min(num_layers, fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16)
    return {
        "peak": given or peak_tflops(device_name),
        "fp8_peak": peak_tflops(device_name, "fp8") if uses_fp8_peak else None,
        "fp8_share": 1 - bf16_layers / num_layers,
    }


def mfu_metrics(
    reduced: Mapping[str, float],
    arch: Architecture,
    sequence_lengths: Sequence[int],
    *,
    num_devices: int,
    peak: float | None,
    fp8_peak: float | None = None,
    fp8_share: float = 1.0,
    num_epochs: int = 1,
    forward_only_lengths: Sequence[int] = (),
    image_tokens: float = 0.0,
    trains_tower: bool = False,
) -> dict[str, float]:
    """Returns `perf/tflops/*` (TFLOP/s per device) and, if `peak` is known, `perf/mfu/*` with `perf/peak_tflops`.

    `actor` is the update: `num_epochs` passes in `timing_s/update_actor` seconds. `actor_infer` is the forward pass for
    the old log-probabilities: one pass in `timing_s/old_log_prob` seconds. A phase that took no time is left out.
    `sequence_lengths`: prompt + response tokens of all trained samples of all ranks; `forward_only_lengths`: of those
    among them that the update gives no backward pass; `image_tokens`: of the images of all samples. With `fp8_peak`
    (reported as `perf/peak_tflops_fp8`), `fp8_share` of the layers have their linear products in FP8.
    """
    result: dict[str, float] = {}
    for name, passes, forward_only, phase in (
        ("actor", num_epochs, False, "update_actor"),
        ("actor_infer", 1, True, "old_log_prob"),
    ):
        flops = passes * flops_per_pass(arch, sequence_lengths, forward_only)
        tower = 2.0 if forward_only or not trains_tower else 6.0
        flops += passes * tower * tower_parameters(arch) * image_tokens
        linear = passes * linear_flops_per_pass(arch, sequence_lengths, forward_only)
        if not forward_only:  # a backward pass costs two forward passes
            flops -= 2 * passes * flops_per_pass(arch, forward_only_lengths, forward_only=True)
            linear -= 2 * passes * linear_flops_per_pass(arch, forward_only_lengths, forward_only=True)
        seconds = reduced.get(f"timing_s/{phase}", 0.0)
        if seconds > 0:
            result[f"perf/tflops/{name}"] = flops / (1e12 * seconds * num_devices)
            if peak is not None:
                in_fp8 = linear * fp8_share if fp8_peak else 0.0
                result[f"perf/mfu/{name}"] = mfu(flops, seconds, num_devices, peak, fp8_flops=in_fp8, fp8_peak=fp8_peak)
                result |= {"perf/peak_tflops": peak} | ({"perf/peak_tflops_fp8": fp8_peak} if fp8_peak else {})
    return result


def throughput(
    reduced: Mapping[str, float], total_num_tokens: int, num_devices: int, *, overlaps: bool = False
) -> dict[str, float]:
    """Returns the tokens per second and device, from a step's reduced `timing_s/*`.

    `total_num_tokens`: unpadded prompt + response tokens of all samples. `perf/throughput` divides by the whole step;
    `perf/throughput_train` leaves out `testing` (the slowest rank's seconds), unless validation `overlaps` the training
    (rollout.lag). Neither has `save_checkpoint`, which comes after the step and is timed with the next one.
    """
    result = {"perf/total_num_tokens": float(total_num_tokens)}
    step = reduced.get("timing_s/step", 0.0)
    training = step - (0.0 if overlaps else reduced.get("timing_s/testing", 0.0))
    for name, seconds in (("perf/throughput", step), ("perf/throughput_train", training)):
        if seconds > 0:
            result[name] = total_num_tokens / (seconds * num_devices)
    return result
