"""Hugging Face <-> Megatron-Core checkpoints, on a CPU, in bounded memory.

    python tools/convert_hf.py to-megatron HF_DIR OUT [--dtype bfloat16] [--tp 8]
    python tools/convert_hf.py to-hf CKPT OUT [--shard-size 5G] [--dtype bfloat16]
    python tools/convert_hf.py verify A B [--dtype bfloat16] [--tolerance 1e-3]
    python tools/convert_hf.py inspect X [--hashes]

CKPT is what to-megatron has written, or a training step (OUTPUT_DIR/checkpoints/step_000020), or its critic/ or reward_model/.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from grpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
