"""The rollout engines. Nothing here imports Megatron-Core.

engine.py               RolloutEngine, the interface; requests, completions, stop texts; the states of an engine
build.py                from `rollout.engine` to an engine
vllm/                   vLLM
transformers_engine.py  transformers on the CPU, for small models
"""
