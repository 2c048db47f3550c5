"""Sandboxes for agents: backend.py is the protocol, local.py and containers.py are backends."""
