#!/usr/bin/env bash
# GRPO of a 70B model on 8 nodes x 8 GPUs:   sbatch slurm/train_70b.sh [CONFIG] [section.key=value ...]
#
#   sbatch slurm/train_70b.sh                                              # Llama-3.3-70B in FP8: variables MODEL and DATA, below
#   sbatch --nodes=2 slurm/train_70b.sh examples/qwen2_72b.yaml model.path=/models/qwen trainer.save_freq=2
#   sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 ...             # nodes of 4 GPUs
#   DRY_RUN=1 bash slurm/train_70b.sh CONFIG                               # show the plan and every command, start nothing
#
# The job is named after OUTPUT_DIR, which is named after the config, unless sbatch --job-name gives it another name.
# Sizes and --time are Slurm's own options. Everything else is a variable of ranks.sh or of the block below, for example
# sbatch --export=ALL,CONTAINER=/images/grpo.sqsh. How an attempt ends decides what follows:
#
#   the run is finished                                    the job ends with 0
#   pre-emption, time limit, USR1, the file stop (below)   finish the step, save, requeue
#   pre-emption without notice                             requeue; not counted as a failure
#   a rank was killed, a node died, no step for an hour    requeue; resume from the newest undamaged checkpoint
#   an exception after a new checkpoint                    requeue (hardware, network); before one: end with its code
#   the pre-flight check finds bad nodes                   requeue without them (two nodes and a bad link: without both)
#   ... and all nodes fail: file system, image, network    requeue with the same nodes, once
#   a mistake in the config (2), two attempts without a new checkpoint, MAX_ATTEMPTS          the job ends
# With HEALING=1, and sbatch --no-kill, a lost rank or node does not end the attempt (docs/clusters.md).
# OUTPUT_DIR/attempts/JOB-N/ keeps log, config, overrides, git state, environment, nodes and pre-flight of attempt N. Create
# the file stop in it to stop that attempt.
#SBATCH --job-name=grpo-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --dependency=singleton
#SBATCH --signal=B:USR1@600
# time                   at the limit the run is saved and requeued. It must not be above the partition's
# exclusive, mem         all cores and all memory of the nodes
# requeue, open-mode     Slurm may start the job again, and appends to its log
# dependency             never two jobs with the same name
# signal                 USR1 ten minutes before the time limit, to this script only. Also GraceTime of the partition before
#                        a pre-emption, if slurm.conf has SlurmctldParameters=preempt_send_user_signal. Without that
#                        setting Slurm ends the ranks at once.
set -uo pipefail

export JOB_NAME=train_70b DEFAULT_NODES=8
cd "${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}" && [ -f slurm/ranks.sh ] || { echo "error: submit from the project's root, or set REPO" >&2; exit 2; }
# shellcheck source=slurm/ranks.sh
source slurm/ranks.sh

MAX_ATTEMPTS=${MAX_ATTEMPTS:-50}      # of this job, pre-emptions included
SAVE_MARGIN=${SAVE_MARGIN:-600}       # the last step must end this many seconds before the time limit
HANG_SECONDS=${HANG_SECONDS:-3600}    # a run without a step for so long hangs (twice as long for an attempt's first step)
PREFLIGHT=${PREFLIGHT:-1}             # 0: do not check the nodes
PREFLIGHT_MINUTES=${PREFLIGHT_MINUTES:-10} # imports, PREFLIGHT_RENDEZVOUS_SECONDS and the all-reduces (preflight.py)

# Without CONFIG: this model, and train.jsonl and test.jsonl of this folder. A dry run without MODEL plans its architecture.
CONFIG=examples/llama3_70b_fp8.yaml
MODEL=${MODEL:-/models/Llama-3.3-70B-Instruct}
DATA=${DATA:-/data/math}
NEEDS_MODEL=
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then
    CONFIG=$1 && shift
elif [ "$DRY_RUN" != 1 ] || [ -e "$MODEL" ]; then
    NEEDS_MODEL=1
    set -- model.path="$MODEL" data.train_files="[$DATA/train.jsonl]" data.val_files="[$DATA/test.jsonl]" "$@"
fi
[ -f "$CONFIG" ] || die "no config $CONFIG in $PWD; the first argument is a YAML file, the rest are section.key=value"
OUTPUT_DIR=outputs/$(basename "$CONFIG" .yaml)
for override; do
    [[ $override == *.*=* ]] || die "argument '$override' is not of the form section.key=value"
    [[ $override == trainer.output_dir=* ]] && OUTPUT_DIR=${override#*=}
    [[ $override == model.path=* ]] && MODEL=${override#*=}
done
[ -z "$NEEDS_MODEL" ] || [ -e "$MODEL" ] || die "no model $MODEL; set MODEL, or give a config: sbatch slurm/train_70b.sh CONFIG"
ATTEMPT=$OUTPUT_DIR/attempts/$JOB-$RESTARTS
TRAIN=("$PYTHON" -m grpo_megatron train "$CONFIG" "$@" trainer.output_dir="$OUTPUT_DIR" trainer.device="$DEVICE"
    trainer.nnodes="$NODES" trainer.n_gpus_per_node="$RANKS_PER_NODE" trainer.stop_file="$ATTEMPT/stop" "${ROLES[@]}")

# -- state of the run --------------------------------------------------------------------------------------------------

newest() { find "$OUTPUT_DIR/checkpoints" -maxdepth 1 -regex '.*/step_[0-9]+' 2>/dev/null | sort | tail -n 1; }
newest_step() { local path; path=$(newest); path=${path##*_}; echo $((10#${path:-0})); }

# finish CODE TEXT: print the last line of this attempt and exit.
finish() {
    say "job $JOB attempt $RESTARTS: $2; newest checkpoint: $(newest | grep . || echo none)"
    exit "$1"
}

# no_progress N: attempt N started from the checkpoint that is still the newest, and no request or node interrupted it.
no_progress() { [ "$(cat "$OUTPUT_DIR/attempts/$JOB-$1/start" 2>/dev/null)" = "$(newest_step)" ] && [ ! -e "$OUTPUT_DIR/attempts/$JOB-$1/interrupted" ]; }

# requeue TEXT [NODE,NODE]: have Slurm start the job again, without these nodes, or finish with the reason why not.
requeue() {
    [ $((RESTARTS + 1)) -lt "$MAX_ATTEMPTS" ] || finish 1 "$1, and this was attempt $((RESTARTS + 1)) of MAX_ATTEMPTS=$MAX_ATTEMPTS"
    if [ "$RESTARTS" -gt 0 ] && no_progress "$RESTARTS" && no_progress $((RESTARTS - 1)); then
        finish 1 "$1, and two attempts in a row have not advanced a step"
    fi
    trap '' TERM USR1 # Slurm sends TERM to this script as soon as the job is in the queue again
    run scontrol requeue "$JOB" || finish 75 "$1, but Slurm does not requeue it: submit it again"
    [ -n "${2:-}" ] || finish 75 "$1; requeued"
    for _ in {1..40}; do # Slurm refuses this while the job runs; it keeps the list for all later attempts
        update_job ExcNodeList="$2" && finish 75 "$1; requeued without $2"
        sleep 0.5
    done
    finish 75 "$1; requeued, but Slurm does not accept ExcNodeList=$2"
}

# -- the attempt -------------------------------------------------------------------------------------------------------

snapshot() {
    mkdir -p "$ATTEMPT" || finish 1 "cannot write $ATTEMPT"
    newest_step >"$ATTEMPT/start"
    cp "$CONFIG" "$ATTEMPT/config.yaml"
    printf '%s\n' "${TRAIN[@]}" >"$ATTEMPT/command.txt"
    printf '%s\n' "${NODE_LIST[@]}" >"$ATTEMPT/nodes.txt"
    { git log -1 --format=%H && git status --short && git diff HEAD; } >"$ATTEMPT/git.txt" 2>&1
    env | grep -viE '^[^=]*(key|token|secret|passw|credential|run_id)' | sort >"$ATTEMPT/environment.txt"
}

# Check every node. If some are bad, print why, and requeue the job without them.
preflight() {
    local bad=() linked=() fault node reason excluded enough
    [ "$DRY_RUN" = 1 ] || mkdir -p "$ATTEMPT/preflight"
    on_ranks --time="$PREFLIGHT_MINUTES" -- "$PYTHON" slurm/preflight.py "$ATTEMPT/preflight" --device "$DEVICE"
    [ "$DRY_RUN" = 1 ] && return
    for node in "${NODE_LIST[@]}"; do
        reason=$(cat "$ATTEMPT/preflight/$node.verdict" 2>/dev/null || echo "did not answer in $PREFLIGHT_MINUTES min")
        say "pre-flight $node: $reason"
        if [[ $reason == "link with "* ]]; then linked+=("$node"); elif [ "$reason" != ok ]; then bad+=("$node"); fi
    done
    [ "$NODES" -eq 2 ] || bad+=("${linked[@]}") # slow with both its neighbours
    [ "$signalled" != TERM ] || finish 75 "ended by Slurm during the pre-flight"
    [ "$signalled" != USR1 ] || requeue "stopped on request during the pre-flight"
    [ ${#bad[@]} -gt 0 ] || [ ${#linked[@]} -gt 0 ] || return 0
    fault="bad nodes: ${bad[*]}"
    if [ ${#bad[@]} -eq 0 ]; then # two nodes: which end of the link it is, nobody can say
        bad=("${linked[@]}") fault="bad link between ${linked[0]} and ${linked[1]} (${reason#*: })"
    elif [ ${#bad[@]} -eq "$NODES" ] && [ "$NODES" -gt 1 ]; then # no node is excluded; a second attempt of this kind is the last
        requeue "all $NODES nodes fail the pre-flight: the infrastructure (shared file system, image or network), no single node"
    fi
    touch "$ATTEMPT/interrupted" # this attempt has not trained, so it does not count as one without progress
    excluded=$(scontrol -o show job "$JOB" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
    excluded=$(IFS=,; echo "${excluded:+$excluded,}${bad[*]}")
    enough=$(sinfo -h -N -p "$PARTITIONS" -o %N | sort -u | grep -cvxF "$(scontrol show hostnames "$excluded")")
    [ "$enough" -ge "$NODES" ] || finish 1 "$fault; the partition has $enough others, and $NODES are needed"
    requeue "$fault" "$excluded"
}

# Run in the background until standard input is closed. When a step takes too long, dump the stacks of all ranks, then end srun.
watch_for_hangs() {
    local limit=$((HANG_SECONDS * 2)) since=$SECONDS
    touch "$ATTEMPT/began"
    while read -rt $((HANG_SECONDS / 20 + 1)); [ $? -gt 128 ]; do # the read has timed out: the attempt goes on
        if [ "$OUTPUT_DIR/heartbeat" -nt "$ATTEMPT/began" ]; then
            touch -r "$OUTPUT_DIR/heartbeat" "$ATTEMPT/began"
            limit=$HANG_SECONDS since=$SECONDS
        fi
        [ $((SECONDS - since)) -lt "$limit" ] && continue
        say "no step for $limit s: the ranks dump their stacks and are ended"
        touch "$ATTEMPT/hung"
        scancel --signal=USR2 "$JOB" && sleep 5
        kill -TERM "$1" # srun ends the step
        return
    done
}

signalled=
# USR1: the time limit or a pre-emption is near. TERM: Slurm ends this attempt, and decides whether another one follows.
# shellcheck disable=SC2329 # called by the traps
on_signal() {
    say "$1: $2"
    signalled=$1
    touch "$ATTEMPT/interrupted" "$ATTEMPT/stop"
}

main() {
    local ends status=0 state srun watcher
    trap 'on_signal USR1 "finish the step, save, requeue"' USR1
    trap 'on_signal TERM "Slurm ends this attempt"' TERM
    print_place
    say "config: $CONFIG $*; outputs: $OUTPUT_DIR; newest checkpoint: $(newest | grep . || echo none)"
    if [ "$DRY_RUN" = 1 ]; then
        say "the plan:"
        "$PYTHON" -m grpo_megatron train "$CONFIG" "$@" --dry-run --world-size $((RANKS - SPARES * RANKS_PER_NODE)) \
            trainer.nnodes="$NODES" trainer.n_gpus_per_node="$RANKS_PER_NODE" "${ROLES[@]}" || exit
        say "the commands:"
    else
        name_job grpo-70b "${OUTPUT_DIR##*/}"
        [ "$RESTARTS" -lt "$MAX_ATTEMPTS" ] || finish 1 "MAX_ATTEMPTS=$MAX_ATTEMPTS have been made"
        # When a node dies, Slurm requeues the job itself: the previous attempt did not reach `decide`.
        if [ "$RESTARTS" -ge 2 ] && no_progress $((RESTARTS - 1)) && no_progress $((RESTARTS - 2)); then
            finish 1 "two attempts in a row have not advanced a step"
        fi
        ends=$(squeue -h -j "$JOB" -o %e) && ends=$(date -d "$ends" +%s 2>/dev/null) &&
            TRAIN+=(trainer.stop_at=$((ends - SAVE_MARGIN)))
        snapshot
    fi
    [ "$PREFLIGHT" = 0 ] || preflight
    [ -z "$TEACHER" ] || serve_teacher "$ATTEMPT/teacher.log" || requeue "the teacher's server has ended: $ATTEMPT/teacher.log"
    if [ "$DRY_RUN" = 1 ]; then "$STARTER" -- "${TRAIN[@]}" && exit; fi
    rm -f "$OUTPUT_DIR/outcome.json"
    EXEC=1 "$STARTER" -- "${TRAIN[@]}" > >(tee -a "$ATTEMPT/train.log") 2>&1 &
    srun=$!
    exec {watcher}> >(watch_for_hangs "$srun")
    wait "$srun"
    status=$?
    while kill -0 "$srun" 2>/dev/null; do # a signal has interrupted the wait
        wait "$srun"
        status=$?
    done
    exec {watcher}>&-
    # srun reports the highest code of all ranks, often 143 of a rank that it has ended itself. outcome.json is the run's own.
    state=$(sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$OUTPUT_DIR/outcome.json" 2>/dev/null)
    echo "${state:-failed} $status" >"$ATTEMPT/end"
    decide "${state:-failed}" "$status"
}

decide() { # STATE SRUN_STATUS
    case $1 in
        done) finish 0 "finished" ;;
        stopped)
            touch "$ATTEMPT/interrupted"
            [ "$signalled" = TERM ] || requeue "saved on request"
            finish 75 "saved on request, and ended by Slurm"
            ;;
    esac
    [ "$signalled" != TERM ] || finish 75 "ended by Slurm before it could save"
    if scontrol -o show job "$JOB" 2>/dev/null | grep -q ' PreemptTime=[0-9]'; then
        touch "$ATTEMPT/interrupted"
        requeue "pre-empted before it could save"
    fi
    [ ! -e "$ATTEMPT/hung" ] || requeue "it hung"
    [ "$2" != 2 ] || finish 2 "a mistake in the config or the data, named above"
    [ "$2" -le 128 ] || requeue "a rank was killed (srun: $2)"
    [ "$(newest_step)" = "$(cat "$ATTEMPT/start")" ] || requeue "failed with $2 after progress"
    finish "$2" "failed with $2 before it had saved anything; the reason is above"
}

main "$@"
