"""Where a step's samples come from.

generator (single turns) and multi_turn (trajectories) make samples and grade them. collector, partial and wrappers decide which
prompts a step takes. questions: prompts that a caller of `Run.sample` asks.
"""
