"""Where a step's samples come from.

generator (single turns), multi_turn (trajectories) and grading make samples. collector, partial and wrappers decide which
prompts a step takes. questions: prompts that a caller of `Run.sample` asks.
"""
