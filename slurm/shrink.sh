#!/usr/bin/env bash
# Takes nodes out of a running job with HEALING=1:   bash slurm/shrink.sh JOB OUTPUT_DIR NODE...
#
# The run saves after its step and goes on without them, and no step is repeated. Then Slurm takes them back. Where no layout
# fits the nodes that stay, the run saves and stops.
set -euo pipefail
[ $# -ge 3 ] || { echo "error: $0 JOB OUTPUT_DIR NODE..." >&2; exit 2; }
job=$1 healing=$2/healing
shift 2

nodes_of_job() { scontrol show hostnames "$(squeue -h -t R -j "$job" -o %N)"; }
for node; do
    nodes_of_job | grep -qxF "$node" || { echo "error: $node is none of the nodes of job $job, which runs" >&2; exit 2; }
    ! scontrol -o show job "$job" | grep -q "BatchFlag=1 .*BatchHost=$node " ||
        { echo "error: $node has the batch script, and Slurm does not take it out" >&2; exit 2; }
done
for node; do touch "$healing/leave_$node"; done
for node; do
    while [ -e "$healing/leave_$node" ]; do sleep 1; done # its launcher removes it at its end
done
stay=$(nodes_of_job | grep -vxF "$(printf '%s\n' "$@")" | paste -sd,)
scontrol update jobid="$job" NodeList="$stay"
