"""Scores of a model on GSM8K, MATH and others: graded greedy and drawn samples, with intervals and an HTML report.

python tools/evaluate.py --model HF_DIR_OR_CHECKPOINT --tasks gsm8k,math,math500 --data DIR [--samples 16] [--tp 4]
torchrun --nproc-per-node 8 tools/evaluate.py --model ... --tp 4
python tools/evaluate.py grade --task math ROWS.jsonl --output OUT.jsonl
python tools/evaluate.py compare A/results.json B/results.json
python tools/evaluate.py tasks
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from grpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
