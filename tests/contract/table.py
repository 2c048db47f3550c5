"""The table of the contract: what expressions of our code hold, and what is allowed to be missing, each with its reason.

`uses.py` finds imported names by itself. An object that comes back from a call has no type in the source, so its
expressions are listed here. A file is relative to `grpo_megatron/`; "function:expression" narrows it to one function.
"""

from __future__ import annotations

PACKAGES = ("vllm", "megatron", "transformer_engine")

LLM = "vllm:LLM"
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"

# Expression -> the class whose members and methods it uses, or whose constructor it calls.
OBJECTS: dict[str, dict[str, str]] = {
    "rollout/vllm/engine.py": {
        "self._llm": LLM,
        "self._llm.llm_engine": "vllm.v1.engine.llm_engine:LLMEngine",
        "self._llm.llm_engine.engine_core": "vllm.v1.engine.core_client:InprocClient",
        "self._sampling_params": "vllm:SamplingParams",
        "logprobs:output": "vllm:RequestOutput",
        "logprobs:output.prompt_logprobs": "vllm.logprobs:FlatLogprobs",
        "self._engine": "vllm.v1.engine.llm_engine:LLMEngine",
        "self._kinds": "vllm.sampling_params:RequestOutputKind",
        "llm": LLM,
        "self._llm.model_config": "vllm.config:ModelConfig",
        "_completion:new": "vllm:CompletionOutput",
        "_completion:flat": "vllm.logprobs:FlatLogprobs",
        "_completion:output": "vllm:RequestOutput",
        "step:output": "vllm:RequestOutput",
    },
    "rollout/vllm/process.py": {"llm": LLM},
    "rollout/vllm/versions.py": {"llm": LLM},
    "rollout/vllm/routes.py": {
        "llm": LLM,
        "self._runner": "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "batch": "vllm.v1.worker.gpu_input_batch:InputBatch",
        "output": "vllm:CompletionOutput",
        "first": "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter",
    },
    "models/optimizer.py": {
        "ddp": "megatron.core.distributed:DistributedDataParallel",
        "wrap_ddp:config": CONFIG,
        "build_optimizer:config": CONFIG,
        "build_optimizer:optimizer": "megatron.core.optimizer.optimizer:MegatronOptimizer",
    },
    "models/layers/modules.py": {"packed_seq_params": "megatron.core.packed_seq_params:PackedSeqParams"},
    "models/layers/spec.py": {
        "config": CONFIG,
        "parts": "megatron.core.transformer.transformer_layer:TransformerLayerSubmodules",
        "attention": "megatron.core.transformer.attention:SelfAttentionSubmodules",
        "latents": "megatron.core.transformer.multi_latent_attention:MLASelfAttentionSubmodules",
        "layer": "megatron.core.transformer.spec_utils:ModuleSpec",
    },
}

# "file:function" -> the class or function that takes the string keys of the function's dicts as keyword arguments.
FIELDS: dict[str, str] = {
    "rollout/vllm/arguments.py:vllm_arguments": "vllm:EngineArgs",
    "rollout/vllm/versions.py:image_arguments": "vllm:EngineArgs",
    "models/layers/spec.py:transformer_config": CONFIG,
    "models/layers/spec.py:expert_config": CONFIG,
    "models/layers/spec.py:latent_config": "megatron.core.transformer.transformer_config:MLATransformerConfig",
    "models/layers/precision.py:fp8_settings": CONFIG,
    "models/layers/spec.py:settings": CONFIG,
}

# Target -> the vLLM series that have it, for what rollout/vllm/versions.py uses of one series only.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "call vllm:LLM.finish_weight_update 0 weight_version": ("0.32",),
    "field vllm:EngineArgs mm_device_do_normalize": ("0.32",),
    "name vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides": ("0.32",),
    "call vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides 0": ("0.32",),
    "name vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector": ("0.32",),
    "name vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector.take_output": ("0.32",),
    "name vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts": ("0.32",),
    "name vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply": ("0.32",),
}

# Megatron-Core's files through which we use Transformer Engine; what they use of it must be there too.
MEGATRON_USES_TE = (
    "extensions/transformer_engine.py",
    "fp8_utils.py",
    "optimizer/__init__.py",
    "optimizer/clip_grads.py",
    "optimizer/distrib_optimizer.py",
    "optimizer/optimizer.py",
    "tensor_parallel/layers.py",
    "tensor_parallel/random.py",
    "transformer/attention.py",
    "transformer/moe/moe_layer.py",
    "transformer/transformer_block.py",
)

# What those files name and Transformer Engine 2.11 has not -> why that is no error.
NOT_IN_TE: dict[str, str] = {
    "transformer_engine.pytorch.attention:_SplitAlongDim": "Megatron splits with torch instead",
    "transformer_engine.pytorch.attention:apply_rotary_pos_emb": "the branch for 2.2 and older",
    "transformer_engine.pytorch.module.base:get_workspace": "Megatron's te_general_gemm is None: the router uses torch",
    "transformer_engine.pytorch.cpp_extensions:general_gemm": "as get_workspace: the same function passes `workspace`",
    "transformer_engine.pytorch.cpp_extensions:cast_to_fp8": "the branch for 1.x",
    "transformer_engine.pytorch.float8_tensor:Float8Tensor": "the branch for 1.x passes other arguments",
}

# Name that a Megatron module reads, but leaves unbound without Transformer Engine or Apex -> why that is no error.
_FP8 = "read only with FP8, which needs Transformer Engine"
_SPEC = "read only for the Transformer Engine spec"
_UNUSED = "a feature that we do not use"
_APEX = "read only where Apex was imported"
UNDEFINED_WITHOUT_TE: dict[str, str] = {
    "megatron.core.fp8_utils:transformer_engine": _FP8,
    "megatron.core.fusions.fused_layer_norm:FastLayerNormFN": _APEX,
    "megatron.core.fusions.fused_layer_norm:FusedLayerNormAffineFunction": _APEX,
    "megatron.core.models.gpt.gpt_layer_specs:TEFusedMLP": _SPEC,
    "megatron.core.models.gpt.gpt_layer_specs:TENorm": _SPEC,
    "megatron.core.models.gpt.gpt_layer_specs:TESpecProvider": _SPEC,
    "megatron.core.ssm.gated_delta_net:l2norm": "read in Megatron-Core's forward pass; PackedGatedDeltaNet has its own",
    "megatron.core.tensor_parallel.inference_layers:TE_DType": _UNUSED,
    "megatron.core.tensor_parallel.inference_layers:tex": _UNUSED,
    "megatron.core.tensor_parallel.random:FP8GlobalStateManager": _FP8,
    "megatron.core.tensor_parallel.random:activation_recompute_forward": _FP8,
    "megatron.core.tensor_parallel.random:fp8_autocast": _FP8,
    "megatron.core.transformer.attention:_flash_attn_forward": "read only by the inference of Megatron-Core",
    "megatron.core.transformer.cuda_graphs:FP8GlobalStateManager": _UNUSED,
    "megatron.core.transformer.cuda_graphs:make_graphed_callables": _UNUSED,
    "megatron.core.transformer.cuda_graphs:te": _UNUSED,
    "megatron.core.transformer.moe.moe_layer:te_checkpoint": _FP8,
    "megatron.core.transformer.moe.moe_utils:te_general_gemm": "BOUND",  # by us: the router reads it
    "megatron.core.transformer.multi_token_prediction:TESpecProvider": _UNUSED,
    "megatron.core.utils:nvtx": "read only with NVTX ranges switched on",
}
