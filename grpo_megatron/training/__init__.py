"""The parts of the loop, which run.py builds.

placement (where samples come from): colocation, device_memory, roles, rollout_rank. What a step does: correction, guards,
validation, beside (reference and critic), reward_model, teachers, remote_teacher, warm_up. What stays: checkpoint,
output_folder, trace, dump, replay_command. Around a step: stopping, profiler, healing.
"""
