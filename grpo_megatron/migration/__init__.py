"""Configs of other trainers in this one's terms."""
