"""Data: files of rows -> prompts with a reward name, and the order in which steps see them."""
