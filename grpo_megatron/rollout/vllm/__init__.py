"""vLLM as a rollout engine, in two series. engine.py is the front; nothing imports vLLM before an engine is built.

engine.py     VllmEngine
versions.py   the tested series, and what differs between them
arguments.py  from the `rollout` section to the arguments of vllm.LLM
process.py    vLLM's start and end inside a rank's process; the transfer of weights
memory.py     digests of a worker's memory
images.py     prompts with images
routes.py     the experts that the routers choose
"""
