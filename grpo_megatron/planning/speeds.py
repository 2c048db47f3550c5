"""Fractions of a GPU's peaks that the cost model counts on, and fixed times. All are estimates; none was measured here.

They were set once, so that the phases of one published run come out (70B on 64 H100, the only dense one with a breakdown:
generation 84 s, log-probabilities 18 s, update 28 s). They are the same for every model and GPU:

    MATMUL, HALF_TOKENS   of the bf16 peak, in a micro-batch of many tokens; half of it in one of HALF_TOKENS tokens.
                          Megatron-LM's pretraining reaches 0.41 to 0.48 on H100, bubbles and communication included
    EXPERTS               a mixture of experts reaches about half of this: its products are small
    MEMORY                of the memory's bandwidth, where decoding reads weights and cache
    LINK, NETWORK, HOST   large messages over NVLink, the network and the host link
    ENGINE_STEP_S         host work of the engine per decoding step; SAMPLE_S more for each sequence
    REDUCE_S              latency of one all-reduce of a decoding step within a node, and NETWORK_REDUCE_S between nodes
    SWITCH_S              waking the engine, resetting its cache, and putting it to sleep (published: 1.6 to 2)

docs/layouts.md says by how much the estimate misses other published step times.
"""

from __future__ import annotations

MATMUL = 0.46
EXPERTS = 0.23
HALF_TOKENS = 1024
FP8_SPEEDUP = 1.3  # of a whole pass; published steps get 15 to 25 % shorter
MEMORY = 0.7
LINK = 0.75
NETWORK = 0.75
HOST = 0.4
ENGINE_STEP_S = 9e-3
SAMPLE_S = 20e-6
REDUCE_S = 20e-6
NETWORK_REDUCE_S = 60e-6
SWITCH_S = 2.0
