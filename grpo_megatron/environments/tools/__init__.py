"""The built-in tools. Looking up a tool's name imports and registers them (tool.py).

calculator.py   exact arithmetic
search.py       `search` in a local corpus, `remote` at an endpoint
python.py       programs in a subprocess; isolation.py guards the machine, sandbox.py is the program that runs them
"""
