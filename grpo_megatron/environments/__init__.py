"""Environments, which answer the model's turns.

environment.py                 the protocol, and one trajectory's process
pool.py                        EnvironmentPool; environments from the section `rollout.multi_turn`
tool.py, tool_environment.py   functions that the model may call; tools/ has the built-in ones
folders.py                     task folders: an agent in a sandbox (sandboxes/), and the verifier's reward
programs.py, call_matching.py  rewards: a program's tests, and the tool calls that a row allows
command.py, openai_api.py      a program of the user's as the environment, and the OpenAI API that it asks
"""
