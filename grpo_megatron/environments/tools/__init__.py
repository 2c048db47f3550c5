"""The built-in tools. Looking up a tool's name imports and registers them (tool.py)."""
