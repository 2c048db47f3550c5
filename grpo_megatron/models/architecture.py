"""Architecture: the numbers that describe a decoder, read from config.json. Needs neither torch nor Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from grpo_megatron.types import route_itemsize
from grpo_megatron.untrusted import shown


class UnsupportedModel(ValueError):
    """A config.json with a feature that Megatron-Core or this project cannot express. The message names it."""

    tells_what_to_do = True  # the command line prints it without a traceback


def _size(largest: int, **default: Any) -> Any:
    """Declares a positive integer of at most `largest`: some hundred times that of the largest model.

    A larger one would fill the memory.
    """
    return field(metadata={"largest": largest}, **default)


def _number(low: float, high: float, **default: Any) -> Any:
    """Declares a number from `low` to `high`. One beyond would fill the weights with NaN."""
    return field(metadata={"range": (low, high)}, **default)


_LAYERS, _HEADS, _WIDTH = 10_000, 1 << 16, 1 << 24  # the largest


@dataclass(frozen=True)
class Yarn:
    """YaRN, arXiv 2309.00071: RoPE for `factor` times the length that the model was trained for first.

    Dimensions that turn more than `beta_fast` times in `original_length` tokens keep their frequency, those that turn
    less than `beta_slow` times are divided by `factor`, a ramp lies between. `truncate`: its ends are whole dimensions.
    `attention_factor` multiplies cosine and sine, hence the logits by its square.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def log_scale(self) -> float:
        """Returns the m of attention_factor = 0.1 m ln(factor) + 1. In the paper, m = 1."""
        return (self.attention_factor - 1.0) / (0.1 * math.log(self.factor))


@dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention (MLA), arXiv 2405.04434, section 2.1.

        c_q = norm(W_qa x)                  [q_rank]       without q_rank, queries are W_q x
        q = W_qb c_q                        [H, nope_dim + rope_dim]
        c_kv, k_rope = W_kva x              [kv_rank], [rope_dim]: one rotated key for all heads
        k_nope, v = W_kvb norm(c_kv)        [H, nope_dim], [H, value_dim]

    Only c_kv and k_rope would be cached. The rotated parts are interleaved: dimension 2 i turns with dimension 2 i + 1.
    `logit_scale`: the m that YaRN multiplies the logits with, as (0.1 m ln(factor) + 1) ** 2. 0: it does not.
    """

    kv_rank: int = _size(_HEADS)
    rope_dim: int = _size(_HEADS)
    nope_dim: int = _size(_HEADS)
    value_dim: int = _size(_HEADS)
    q_rank: int | None = _size(_HEADS, default=None)
    logit_scale: float = 0.0

    @property
    def key_dim(self) -> int:
        """Size of a query head and of a key head."""
        return self.nope_dim + self.rope_dim

    @property
    def down_rows(self) -> int:
        """Rows of W_kva."""
        return self.kv_rank + self.rope_dim

    @property
    def up_rows(self) -> int:
        """Rows of W_kvb, per head."""
        return self.nope_dim + self.value_dim

    def num_parameters(self, hidden_size: int, heads: int) -> int:
        """Counts the parameters of one layer's attention, norms of the latents included."""
        queries = heads * self.key_dim
        query = queries * hidden_size
        if self.q_rank is not None:
            query = self.q_rank * (hidden_size + 1 + queries)
        key_value = self.down_rows * hidden_size + self.kv_rank * (1 + heads * self.up_rows)
        return query + key_value + heads * self.value_dim * hidden_size


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of gated delta nets, arXiv 2412.06464: linear attention in all layers but every `full_every`-th.

        q, k, v = silu(conv(W_qkv x))                        a convolution over `kernel` tokens of each channel alone
        S = exp(g) S + b k (v - exp(g) S^T k)^T,  o = S^T q     per value head, with a state S [key_dim, value_dim]
        g = -exp(A_log) softplus(W_a x + dt_bias),  b = sigmoid(W_b x);  q and k have length 1
        y = W_out (norm(o) silu(W_z x))

    `key_heads` key heads have value_heads / key_heads value heads each. `is_fused`: the files have W_qkv and W_z as one matrix
    in the order of key heads, and W_b and W_a as another (Qwen3-Next); else there are four (Qwen3.5).
    """

    is_fused: bool
    full_every: int = _size(_LAYERS)
    kernel: int = _size(1 << 10)
    key_heads: int = _size(_HEADS)
    value_heads: int = _size(_HEADS)
    key_dim: int = _size(_HEADS)
    value_dim: int = _size(_HEADS)

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_size(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def input_size(self) -> int:
        """Rows of W_qkv, W_z, W_b and W_a together."""
        return self.conv_size + self.value_size + 2 * self.value_heads

    def num_parameters(self, hidden_size: int) -> int:
        """Counts the parameters of one layer's attention."""
        return (
            (self.input_size + self.value_size) * hidden_size
            + self.conv_size * self.kernel
            + 2 * self.value_heads
            + self.value_dim
        )


# Names of the layers that make the decoder's features; the tower's others are in `visual.`
MERGERS = ("visual.merger.", "visual.deepstack_merger_list.")
MAX_KEPT = 1 << 32  # bytes of features that a frozen tower keeps on the host


@dataclass(frozen=True)
class Vision:
    """The tower of a model that reads images: transformers' own, described by `config` (vision_config as JSON text).

    It has `depth` layers of `width`, whose MLP has `ffn_width`, and turns merge x merge patches of patch x patch pixels into one
    token. `gated`: the MLP is gated, and norms have no bias (Qwen2.5-VL); else Qwen2-VL's. `sections`: how many of the angles
    of a head turn with the time, the row and the column of a token. `norm`: mean and standard deviation of pixels' channels.

    Qwen3-VL (arXiv 2511.21631) has `positions` learned embeddings, a square that is resampled to an image's patches. Its
    sections are interleaved, and it has DeepStack (arXiv 2406.04334): features of `levels` inner layers of the tower, by a
    merger each, are added to the hidden states of the images' tokens behind the decoder's layers 0, 1, ...
    """

    config: str
    gated: bool
    sections: tuple[int, ...]
    norm: tuple[tuple[float, float, float], tuple[float, float, float]]
    depth: int = _size(_LAYERS)
    width: int = _size(1 << 20)
    ffn_width: int = _size(_WIDTH)
    patch: int = _size(1 << 10)
    merge: int = _size(1 << 5)
    token_id: int = _size(1 << 27)
    positions: int = _size(1 << 27, default=0)
    levels: int = _size(_LAYERS, default=0)

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor in the model's files."""
        h, f, m = self.width, self.ffn_width, self.width * self.merge**2

        def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
            return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

        def norm(name: str, size: int = h) -> dict[str, tuple[int, ...]]:
            return {f"{name}.{part}": (size,) for part in (("weight",) if self.gated else ("weight", "bias"))}

        mlp: tuple[tuple[str, ...], str] = (("gate_proj", "up_proj"), "down_proj") if self.gated else (("fc1",), "fc2")
        merger = ("ln_q", "mlp.0", "mlp.2")
        out: dict[str, tuple[int, ...]] = {"visual.patch_embed.proj.weight": (h, 3, 2, self.patch, self.patch)}
        if self.positions:
            mlp, merger = (("linear_fc1",), "linear_fc2"), ("norm", "linear_fc1", "linear_fc2")
            out |= {"visual.patch_embed.proj.bias": (h,), "visual.pos_embed.weight": (self.positions, h)}
        for layer in range(self.depth):
            block = f"visual.blocks.{layer}."
            out |= norm(f"{block}norm1") | norm(f"{block}norm2")
            out |= linear(f"{block}attn.qkv", 3 * h, h) | linear(f"{block}attn.proj", h, h)
            for name in mlp[0]:
                out |= linear(f"{block}mlp.{name}", f, h)
            out |= linear(f"{block}mlp.{mlp[1]}", h, f)
        for prefix in (MERGERS[0], *(f"{MERGERS[1]}{level}." for level in range(self.levels))):
            inputs, into, out_of = (prefix + name for name in merger)
            out |= norm(inputs, h if prefix == MERGERS[0] else m) | linear(into, m, m) | linear(out_of, hidden_size, m)
        return out

    def num_parameters(self, hidden_size: int, merger: bool | None = None) -> int:
        """Counts the parameters of the mergers (True), of all but the mergers (False), or of both (None)."""
        shapes = self.shapes(hidden_size).items()
        return sum(math.prod(shape) for name, shape in shapes if merger in (None, name.startswith(MERGERS)))


@dataclass(frozen=True)
class Routing:
    """The selection and the weights of experts in DeepSeek's routers.

        V2, arXiv 2405.04434: softmax scores; a group's score is that of its best expert; the weights are not renormalised
        V3, arXiv 2412.19437: sigmoid scores; experts are chosen by score + bias, a group by its two best; the weights are
                              the scores without the bias, scaled to sum to 1

    The weights are multiplied by `scale`. V3's bias balances the load during pre-training. It is kept as it was loaded: a
    policy whose bias moved between rollout and update would route the same tokens to other experts.
    `groups` 1: no groups. Of `groups`, a token reaches `groups_per_token`. `best_of_group`: experts in a group's score.
    """

    is_sigmoid: bool
    scale: float
    groups: int = _size(_HEADS)
    groups_per_token: int = _size(_HEADS)
    best_of_group: int = _size(_HEADS)


@dataclass(frozen=True)
class Architecture:
    """A decoder: dense, or with `num_experts` experts instead of one MLP in every layer after the first `num_dense_layers`.

    `rope_factor` belongs to llama3 scaling, `rope_linear_factor` to linear interpolation, `rope_yarn` to YaRN.
    """

    family: str
    tied: bool
    hidden_size: int = _size(1 << 20)
    ffn_hidden_size: int = _size(_WIDTH)  # of the MLP, or of one expert
    num_layers: int = _size(_LAYERS)
    num_attention_heads: int = _size(_HEADS)
    num_query_groups: int = _size(_HEADS)
    head_dim: int = _size(_HEADS)
    vocab_size: int = _size(1 << 27)
    norm_eps: float = _number(0.0, 1.0)
    rope_theta: float = _number(1.0, 1e15)
    max_position_embeddings: int = _size(1 << 30)
    qkv_bias: bool = False
    qk_norm: bool = False  # of every head alone
    post_norms: bool = False  # norms after attention and MLP, none before them; q and k norms over all heads together
    sandwich_norms: bool = False  # norms before and after attention and MLP
    rope_factor: float | None = _number(1.0, 1e6, default=None)
    rope_linear_factor: float | None = _number(1.0, 1e6, default=None)
    rope_yarn: Yarn | None = None
    rotary_share: float = _number(1e-3, 1.0, default=1.0)  # the first of a head's dimensions, which rotate
    sliding_window: int | None = _size(1 << 40, default=None)  # a token sees so many tokens, itself among them
    full_layers: tuple[int, ...] = ()  # the layers, from 0, that have no window
    local_rope_theta: float | None = _number(1.0, 1e15, default=None)  # of layers with a window, without scaling
    query_scalar: float | None = _number(1e-3, 1e9, default=None)  # logits are divided by its root; None: head_dim
    scaled_embedding: bool = False  # by the root of hidden_size, in the type of the weights
    gelu: bool = False  # of the MLP's gate, in tanh's approximation, in place of SiLU
    num_experts: int = _size(_HEADS, default=0)  # 0: dense
    experts_per_token: int = _size(_HEADS, default=0)
    renormalise_experts: bool = True  # the selected experts' probabilities are scaled to sum to 1
    routing: Routing | None = None  # None: softmax scores, no groups, no scale
    num_dense_layers: int = _size(_LAYERS, default=0)
    dense_ffn_hidden_size: int = _size(_WIDTH, default=0)  # of the MLPs of these layers
    shared_ffn_hidden_size: int = _size(_WIDTH, default=0)  # of the experts of every token, together; 0: none
    shared_gates: int = _size(1, default=0)  # 1: a sigmoid of each token scales the output of its shared experts
    output_gate: bool = (
        False  # the attention's output is multiplied by a sigmoid, which W_q computes beside each query head
    )
    centred_norms: bool = False  # norms multiply by 1 + their weight; not those of `delta`
    latent: Latent | None = None  # None: grouped-query attention
    delta: DeltaNet | None = None  # None: all layers have attention
    sinks: bool = False  # a learned logit per head takes part in every softmax of attention, with a value of 0
    linear_bias: bool = (
        False  # of the attention's output, the experts and their router; with `qkv_bias`, of every layer
    )
    swiglu_limit: float | None = _number(0.0, 1e6, default=None)  # bounds gate and up (see `megatron_fields`)
    vision: Vision | None = None  # None: it reads no images
    # Layers after the last one, which predict further tokens. They are not trained; exports have them as they were.
    num_extra_layers: int = _size(100, default=0)

    @property
    def attention_size(self) -> int:
        """Input width of the attention's output projection. It may differ from hidden_size."""
        return self.num_attention_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def key_size(self) -> int:
        """Width of all key heads together."""
        return self.num_query_groups * self.head_dim

    @property
    def has_extras(self) -> bool:
        """Files may have tensors that are not trained."""
        return self.num_extra_layers > 0 or self.delta is not None

    def is_extra(self, tensor_name: str) -> bool:
        """Returns whether a Hugging Face tensor belongs to a layer after the last, or to a tower that is not read."""
        names = [f"model.layers.{self.num_layers + index}." for index in range(self.num_extra_layers)]
        return tensor_name.startswith((*names, *(["mtp.", "visual."] if self.delta is not None else [])))

    def is_linear(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, has a gated delta net instead of attention."""
        return self.delta is not None and (layer + 1) % self.delta.full_every != 0

    def window_of(self, layer: int) -> int | None:
        """Returns the sliding window of a layer, counted from 0. None: a token sees all tokens before it."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def num_linear_layers(self) -> int:
        """The layers with a gated delta net."""
        return sum(self.is_linear(layer) for layer in range(self.num_layers))

    @property
    def local_reason(self) -> str | None:
        """Names what this model has and Transformer Engine's layers, FP8 and context parallelism here have not; None: nothing."""
        reasons = {
            "gated delta nets": self.delta,
            "norms after attention and MLP": self.has_norms_after,
            "attention sinks": self.sinks,
        }
        return next((reason for reason, is_there in reasons.items() if is_there), None)

    @property
    def has_norms_after(self) -> bool:
        """Attention and MLP have a norm of their output."""
        return self.post_norms or self.sandwich_norms

    def padded_vocab_size(self, tp: int) -> int:
        """Returns the rows of the embedding for `tp` ranks: a multiple of 8 tp (8 for tensor cores)."""
        multiple = 8 * tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_routes(self) -> int:
        """The experts that a token visits in all layers together."""
        return (self.num_layers - self.num_dense_layers) * self.experts_per_token if self.num_experts else 0

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's routes."""
        return self.num_routes * route_itemsize(self.num_experts)

    def num_parameters(self) -> int:
        """Counts the parameters, tied embeddings once."""
        d, h = self.head_dim, self.hidden_size
        qkv = (self.num_attention_heads * (1 + self.output_gate) + 2 * self.num_query_groups) * d
        attention = qkv * h + h * self.attention_size
        attention += (qkv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        attention += self.attention_size + self.key_size if self.post_norms else 0
        attention += (h if self.linear_bias else 0) + (self.num_attention_heads if self.sinks else 0)
        if self.latent is not None:
            attention = self.latent.num_parameters(h, self.num_attention_heads)
        mlp = 3 * h * (self.ffn_hidden_size * (self.num_experts or 1) + self.shared_ffn_hidden_size)
        mlp += self.num_experts * (h + (self.routing is not None and self.routing.is_sigmoid)) + self.shared_gates * h
        mlp += self.num_experts * (2 * self.ffn_hidden_size + h + 1) if self.linear_bias else 0
        mlps = self.num_dense_layers * 3 * h * self.dense_ffn_hidden_size
        mlps += (self.num_layers - self.num_dense_layers) * mlp
        tower = self.vision.num_parameters(h) if self.vision else 0
        linear = self.num_linear_layers
        mlps += linear * (self.delta.num_parameters(h) - attention) if self.delta is not None else 0
        norms = (4 if self.sandwich_norms else 2) * h
        return self.num_layers * (attention + norms) + mlps + h + self.vocab_size * h * (1 if self.tied else 2) + tower


def megatron_fields(arch: Architecture) -> dict[str, Any]:
    """Returns the fields that Megatron-Core's TransformerConfig and the arguments of Megatron-LM name alike."""
    routing, latent, first = arch.routing, arch.latent, arch.num_dense_layers
    fields: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.dense_ffn_hidden_size or arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "qk_layernorm": arch.qk_norm or latent is not None,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "attention_dropout": 0.0,  # with dropout a policy would differ from its own rollouts
        "hidden_dropout": 0.0,
    }
    if arch.num_experts:
        groups = (routing.groups, routing.groups_per_token) if routing and routing.groups > 1 else (None, None)
        fields |= {
            "moe_ffn_hidden_size": arch.ffn_hidden_size,
            "moe_layer_freq": [int(layer >= first) for layer in range(arch.num_layers)] if first else 1,
            "moe_router_topk": arch.experts_per_token,
            # A softmax over the selected logits equals the softmax over all, renormalised over the selected.
            "moe_router_pre_softmax": not arch.renormalise_experts,
            "moe_token_dispatcher_type": "alltoall",
            "moe_shared_expert_intermediate_size": arch.shared_ffn_hidden_size or None,
            "moe_router_score_function": "sigmoid" if routing and routing.is_sigmoid else "softmax",
            "moe_router_enable_expert_bias": routing is not None and routing.is_sigmoid,
            "moe_router_topk_scaling_factor": routing.scale if routing else None,
            "moe_router_num_groups": groups[0],
            "moe_router_group_topk": groups[1],
        }
    if arch.sliding_window is not None:  # Megatron-Core counts the keys before a query's own
        fields |= {
            "window_size": (arch.sliding_window - 1, 0),
            "window_attn_skip_freq": [int(arch.window_of(layer) is not None) for layer in range(arch.num_layers)],
        }
    if arch.sinks:
        fields["softmax_type"] = "learnable"
    if arch.swiglu_limit is not None:
        # SwiGLU of gpt-oss: quick_gelu(min(gate, limit)) (clamp(up, -limit, limit) + 1), quick_gelu(x) = x sigmoid(1.702 x)
        fields |= {"activation_func_clamp_value": arch.swiglu_limit, "glu_linear_offset": 1.0}
    if arch.shared_gates:
        fields["moe_shared_expert_gate"] = True
    if arch.centred_norms:
        fields["layernorm_zero_centered_gamma"] = True
    if arch.output_gate:
        fields["attention_output_gate"] = True
    if (delta := arch.delta) is not None:
        fields |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(arch.is_linear(layer)) for layer in range(arch.num_layers)],
            "linear_conv_kernel_dim": delta.kernel,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
        }
    if latent is not None:
        fields |= {
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
        }
    return fields


# -- config.json ---------------------------------------------------------------------------------------------------------

MAX_BLOCKS = 1 << 20  # experts of all layers together


def check_bounds(arch: Architecture) -> None:
    """Raises UnsupportedModel that names the first number which no model can have."""
    parts = {"": arch, "latent.": arch.latent, "delta.": arch.delta, "routing.": arch.routing, "vision.": arch.vision}
    for part, owner in parts.items():
        for declared in fields(owner) if owner is not None else ():
            name, value, facts = part + declared.name, getattr(owner, declared.name), declared.metadata
            if not facts or value == declared.default:
                continue
            if "range" in facts:
                low, high = facts["range"]
                if type(value) not in (int, float) or not low <= value <= high:  # false for NaN
                    raise UnsupportedModel(
                        f"config.json gives {name}={shown(value)}, not a number from {low:g} to {high:g}"
                    )
            elif type(value) is not int or value < 1:
                raise UnsupportedModel(f"config.json gives {name}={shown(value)}, not a positive integer")
            elif value > facts["largest"]:
                raise UnsupportedModel(f"config.json gives {name}={value}; at most {facts['largest']:,} is accepted")
    if arch.num_layers * arch.num_experts > MAX_BLOCKS:
        raise UnsupportedModel(
            f"config.json gives {arch.num_layers} layers of {arch.num_experts} experts; at most {MAX_BLOCKS:,} experts"
            " altogether are accepted"
        )
    if arch.num_attention_heads % arch.num_query_groups:
        raise UnsupportedModel(
            f"config.json gives {arch.num_attention_heads} attention heads in {arch.num_query_groups} key-value groups;"
            " the second must divide the first"
        )
    if arch.delta is not None and arch.delta.value_heads % arch.delta.key_heads:
        raise UnsupportedModel(
            f"config.json gives {arch.delta.value_heads} value heads to {arch.delta.key_heads} key heads of its gated delta"
            " nets; the second must divide the first"
        )


def rope_settings(config: dict[str, Any], rotary: float | None = None) -> dict[str, Any]:
    """Returns the Architecture keywords of RoPE: theta, scaling and share. Raises UnsupportedModel.

    config.json has either `rope_parameters` (transformers 5) or the older keys. `rotary`: see `common_settings`.
    """
    given = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if not isinstance(value, dict):
            raise UnsupportedModel(f"config.json gives {key}={shown(value)}, not an object")
    merged = {**given["rope_scaling"], **given["rope_parameters"]}
    theta = merged.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = merged.get("rope_type", merged.get("type", "default"))
    out: dict[str, Any] = {"rope_theta": float(theta)}
    partial = merged.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary is not None:
        out["rotary_share"] = rotary if partial is None else partial
    elif partial not in (None, 1):
        raise UnsupportedModel(f"RoPE with partial_rotary_factor={partial} is not supported (every dimension rotates)")
    if kind in (None, "default"):
        return out
    if rotary is not None:
        raise UnsupportedModel(f"RoPE scaling {kind!r} of a share of each head is not supported (supported: default)")
    if kind == "linear":
        return {**out, "rope_linear_factor": float(merged["factor"])}
    if kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in fixed.items():
            if merged.get(key, value) != value:
                raise UnsupportedModel(
                    f"llama3 RoPE scaling with {key}={merged[key]}: Megatron-Core has {value:g} built in and takes no other"
                )
        return {**out, "rope_factor": float(merged["factor"])}
    if kind == "yarn":
        yarn = _yarn(merged)
        return {**out, "rope_yarn": yarn, "max_position_embeddings": int(yarn.original_length * yarn.factor)}
    raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported (supported: default, linear, llama3, yarn)")


def _yarn(scaling: dict[str, Any]) -> Yarn:
    """Reads YaRN's settings, with the defaults of transformers and vLLM. Raises UnsupportedModel."""
    factor = float(scaling["factor"] or math.nan)
    if not 1.0 < factor <= 1e6 or not scaling.get("original_max_position_embeddings"):
        raise UnsupportedModel(
            f"yarn RoPE scaling with factor={scaling['factor']} and original_max_position_embeddings="
            f"{scaling.get('original_max_position_embeddings')}: it needs a factor from 1 to 1e6, and that length"
        )
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            upper, lower = (0.1 * scaling[name] * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim"))
            attention_factor = upper / lower
    return Yarn(
        factor=factor,
        original_length=int(scaling["original_max_position_embeddings"]),
        attention_factor=float(attention_factor),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def common_settings(config: dict[str, Any], rotary: float | None = None) -> dict[str, Any]:
    """Returns the Architecture keywords that all families read alike. Raises UnsupportedModel; KeyError for a missing key.

    `rotary`: the share of each head that rotates where config.json gives none. None: a family whose heads rotate whole.
    """
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r} is not supported (supported: silu)")
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size" if "intermediate_size" in config else "moe_intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        **rope_settings(config, rotary),
    }


def expert_settings(config: dict[str, Any], *, width: str, renormalise: bool) -> dict[str, Any]:
    """Returns the Architecture keywords of a mixture of experts in every layer. Raises UnsupportedModel; KeyError.

    They replace the MLP size of `common_settings`. `width` is the family's key for the size of an expert.
    """
    family = config["model_type"]
    supported: dict[str, tuple[Any, ...]] = {
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
        "shared_expert_intermediate_size": (0, None),
        "num_shared_experts": (0, None),
        "n_shared_experts": (0, None),
    }
    for key, values in supported.items():
        if config.get(key) not in values:
            what = "shared experts" if "shared" in key else "layers without experts"
            raise UnsupportedModel(f"{family} with {key}={config[key]}: {what} are not supported beside experts")
    if renormalise and config.get("norm_topk_prob", True) is False:
        raise UnsupportedModel(
            f"{family} with norm_topk_prob=false: transformers scales the weights of a token's experts to sum to 1 all the"
            " same, and vLLM would not; set norm_topk_prob=true in config.json, if the model was trained so"
        )
    # transformers 5 writes num_local_experts for every family. Qwen3-MoE on the hub has num_experts.
    num_experts = config["num_local_experts" if "num_local_experts" in config else "num_experts"]
    experts_per_token, size = config["num_experts_per_tok"], config[width]
    if not 1 <= experts_per_token <= num_experts:
        raise UnsupportedModel(f"{family} with num_experts_per_tok={experts_per_token}: it has {num_experts} experts")
    if experts_per_token == 1 and renormalise:
        raise UnsupportedModel(
            f"{family} with num_experts_per_tok=1 and probabilities scaled to sum to 1: Megatron-Core refuses such a router"
        )
    return {
        "ffn_hidden_size": size,
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "renormalise_experts": renormalise,
    }


# -- tensor-parallel sizes that a model allows, for the policy and for the engine ----------------------------------------

ENGINE_VOCABULARY_MULTIPLE = 64  # vLLM pads the embedding to it, for every tp (Megatron-Core: to 8 x tp)


def split_problems(arch: Architecture, tp: int, *, has_whole_experts: bool = False) -> list[str]:
    """Returns why `tp` ranks cannot share a model: nothing if they can. `has_whole_experts`: they do not cut experts."""
    mlp = ("rows of an expert's MLP" if arch.num_experts else "rows of the MLP", arch.ffn_hidden_size)
    sizes = (
        ("attention heads", arch.num_attention_heads),
        ("experts", arch.num_experts) if has_whole_experts and arch.num_experts else mlp,
        ("rows of a dense layer's MLP", arch.dense_ffn_hidden_size),
        ("rows of the shared experts' MLP", arch.shared_ffn_hidden_size),
        ("key heads of gated delta nets", arch.delta.key_heads if arch.delta is not None else 0),
    )
    problems = [f"{size} {what} over {tp} leave {size % tp}" for what, size in sizes if size % tp]
    groups = arch.num_query_groups
    if arch.post_norms and groups % tp:  # their norm is over all heads, and each key head is on one rank
        problems.append(f"{groups} key-value heads over {tp} leave {groups % tp}")
    elif groups % tp and tp % groups:
        problems.append(f"{groups} key-value heads and {tp} ranks: neither number divides the other")
    return problems


def engine_split_problems(arch: Architecture, tp: int, *, has_whole_experts: bool = False) -> list[str]:
    """Returns `split_problems`, and why vLLM cannot cut the vocabulary over `tp` ranks."""
    problems = split_problems(arch, tp, has_whole_experts=has_whole_experts)
    multiple = ENGINE_VOCABULARY_MULTIPLE
    padded = -(-arch.vocab_size // multiple) * multiple
    if padded % tp:
        rows = f"{padded} rows of the vocabulary"
        if padded != arch.vocab_size:
            rows += f" ({arch.vocab_size}, padded to a multiple of {multiple})"
        problems.append(f"{rows} over {tp} leave {padded % tp}")
    return problems


def fitting_sizes(arch: Architecture, problems: Callable[[Architecture, int], list[str]]) -> str:
    """Returns the sizes up to 64 without problems, for an error message."""
    return ", ".join(str(tp) for tp in range(1, 65) if not problems(arch, tp))
