"""Beginnings for a new user.

new_config.py   `init`: a commented config for a model, a task and a machine
quickstart.py   `quickstart` and `examples`
prepare.py      `prepare`: data and random models; generated.py: the data itself
"""
