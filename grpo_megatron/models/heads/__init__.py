"""Models with a scalar head: critics and reward models.

scalar.py          the model, where its head is read, and the classes for training and for scoring
reward_folder.py   its Hugging Face folder, for reading and for export
"""
