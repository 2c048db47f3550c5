"""Sandboxes for agents of task folders.

backend.py      the protocol, and what all share
local.py        this machine's programs in namespaces
containers.py   docker and podman
hosted.py       the service E2B
__main__.py     runs a command in a sandbox that an environment has started
"""
