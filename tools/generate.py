"""Answers of a model to one prompt, a file of prompts, or in a chat: from a Hugging Face folder or a checkpoint.

python tools/generate.py --model outputs/run/hf --prompt "What is 12 * 12?"
python tools/generate.py --model STEP_FOLDER --file test.jsonl --samples 4 --temperature 1 --output out.jsonl
python tools/generate.py --model HF_DIR --chat
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from grpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
