#!/usr/bin/env bash
# GRPO of a 70B model on 8 nodes x 8 GPUs:   sbatch slurm/train_70b.sh [CONFIG] [section.key=value ...]
#
#   sbatch --nodes=2 slurm/train_70b.sh examples/qwen2_72b.yaml model.path=/models/qwen trainer.save_freq=2
#   sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 ...             # nodes of 4 GPUs
#   DRY_RUN=1 bash slurm/train_70b.sh CONFIG                               # the plan and every command, nothing started
#
# Sizes are Slurm's own options; everything else is a variable of ranks.sh or of the block below, for example
# sbatch --export=ALL,CONTAINER=/images/grpo.sqsh. What happens at the end of an attempt:
#
#   it finished                                            job ends with 0
#   pre-emption, time limit, USR1, OUTPUT_DIR/.../stop     the step is finished and saved; requeued
#   pre-emption without notice                             requeued; counts as no failure
#   a rank was killed, a node died, no step for an hour    requeued; resumes from the newest undamaged checkpoint
#   an exception after progress (hardware, network)        requeued; before any step: ends with its code
#   pre-flight finds bad nodes                             requeued without them
#   a mistake in the config (2), two attempts without a step, MAX_ATTEMPTS          ends
#
# OUTPUT_DIR/attempts/JOB-N/ keeps of every attempt: log, config, overrides, git state, environment, nodes, pre-flight.
#SBATCH --job-name=grpo-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --dependency=singleton
#SBATCH --signal=B:USR1@600
# The last seven: all cores and all memory; Slurm may start it again, and keeps the log then; never two jobs of a name
# over one OUTPUT_DIR; ten minutes' notice of the time limit, to this script only. Of a pre-emption too, as long as the
# partition's GraceTime is, where slurm.conf has SlurmctldParameters=preempt_send_user_signal; elsewhere ranks are ended.
set -uo pipefail

export JOB_NAME=train_70b DEFAULT_NODES=8
cd "${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}" && [ -f slurm/ranks.sh ] || { echo "error: submit from the project's root, or set REPO" >&2; exit 2; }
# shellcheck source=slurm/ranks.sh
source slurm/ranks.sh

MAX_ATTEMPTS=${MAX_ATTEMPTS:-50}      # of this job, pre-emptions included
SAVE_MARGIN=${SAVE_MARGIN:-600}       # seconds before the time limit by which the last step must be done
HANG_SECONDS=${HANG_SECONDS:-3600}    # without a step: a hang (the first step of an attempt may take twice as long)
PREFLIGHT=${PREFLIGHT:-1}             # 0: trust the nodes
PREFLIGHT_MINUTES=${PREFLIGHT_MINUTES:-5}

CONFIG=examples/llama3_70b.yaml
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then CONFIG=$1 && shift; fi
[ -f "$CONFIG" ] || die "no config $CONFIG in $PWD; the first argument is a YAML file, the rest are section.key=value"
OUTPUT_DIR=outputs/$(basename "$CONFIG" .yaml)
for override; do
    [[ $override == *.*=* ]] || die "argument '$override' is not of the form section.key=value"
    [[ $override == trainer.output_dir=* ]] && OUTPUT_DIR=${override#*=}
done
ATTEMPT=$OUTPUT_DIR/attempts/$JOB-$RESTARTS
TRAIN=("$PYTHON" -m grpo_megatron train "$CONFIG" "$@" trainer.output_dir="$OUTPUT_DIR" trainer.device="$DEVICE"
    trainer.nnodes="$NODES" trainer.n_gpus_per_node="$RANKS_PER_NODE" trainer.stop_file="$ATTEMPT/stop")

# -- what is known of the run ------------------------------------------------------------------------------------------

newest() { find "$OUTPUT_DIR/checkpoints" -maxdepth 1 -regex '.*/step_[0-9]+' 2>/dev/null | sort | tail -n 1; }
newest_step() { local path; path=$(newest); path=${path##*_}; echo $((10#${path:-0})); }

# The last line of every attempt. finish CODE TEXT
finish() {
    say "job $JOB attempt $RESTARTS: $2; newest checkpoint: $(newest | grep . || echo none)"
    exit "$1"
}

# Whether attempt $1 ran to its own end, from the step that is still the newest: nothing asked it to stop.
stood_still() { [ "$(cat "$OUTPUT_DIR/attempts/$JOB-$1/start" 2>/dev/null)" = "$(newest_step)" ] && [ ! -e "$OUTPUT_DIR/attempts/$JOB-$1/asked" ]; }

# requeue TEXT [node,node: never again]: start again, or say why not.
requeue() {
    [ $((RESTARTS + 1)) -lt "$MAX_ATTEMPTS" ] || finish 1 "$1, and this was attempt $((RESTARTS + 1)) of MAX_ATTEMPTS=$MAX_ATTEMPTS"
    if [ "$RESTARTS" -gt 0 ] && stood_still "$RESTARTS" && stood_still $((RESTARTS - 1)); then
        finish 1 "$1, and two attempts in a row have not advanced a step"
    fi
    trap '' TERM USR1 # Slurm ends this script as soon as it has put the job back into the queue
    run scontrol requeue "$JOB" || finish 75 "$1, but Slurm does not requeue it: submit it again"
    if [ -n "${2:-}" ]; then # refused while the job runs, so only now; Slurm keeps it over later attempts
        for _ in 1 2 3 4 5; do
            run scontrol update jobid="$JOB" ExcNodeList="$2" && break
            sleep 0.5
        done
    fi
    finish 75 "$1; requeued${2:+ without $2}"
}

# -- the attempt -------------------------------------------------------------------------------------------------------

snapshot() {
    mkdir -p "$ATTEMPT" || finish 1 "cannot write $ATTEMPT"
    newest_step >"$ATTEMPT/start"
    cp "$CONFIG" "$ATTEMPT/config.yaml"
    printf '%s\n' "${TRAIN[@]}" >"$ATTEMPT/command.txt"
    printf '%s\n' "${NODE_LIST[@]}" >"$ATTEMPT/nodes.txt"
    { git log -1 --format=%H && git status --short && git diff HEAD; } >"$ATTEMPT/git.txt" 2>&1
    env | grep -viE '^[^=]*(key|token|secret|passw|credential)' | sort >"$ATTEMPT/environment.txt"
}

# Every node is looked at; the bad ones are named, and the job goes back to the queue without them.
preflight() {
    local bad=() node reason excluded enough
    [ "$DRY_RUN" = 1 ] || mkdir -p "$ATTEMPT/preflight"
    on_ranks --time="$PREFLIGHT_MINUTES" -- "$PYTHON" slurm/preflight.py "$ATTEMPT/preflight" --device "$DEVICE"
    [ "$DRY_RUN" = 1 ] && return
    for node in "${NODE_LIST[@]}"; do
        reason=$(cat "$ATTEMPT/preflight/$node.verdict" 2>/dev/null || echo "did not answer in $PREFLIGHT_MINUTES min")
        say "pre-flight $node: $reason"
        [ "$reason" = ok ] || bad+=("$node")
    done
    [ "$asked" != TERM ] || finish 75 "ended by Slurm during the pre-flight"
    [ "$asked" != USR1 ] || requeue "asked to stop during the pre-flight"
    [ ${#bad[@]} -gt 0 ] || return 0
    touch "$ATTEMPT/asked" # it never came to train: not a step without progress
    excluded=$(scontrol -o show job "$JOB" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p') # so far
    excluded=$(IFS=,; echo "${excluded:+$excluded,}${bad[*]}")
    enough=$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -o %N | sort -u | grep -cvxF "$(scontrol show hostnames "$excluded")")
    [ "$enough" -ge "$NODES" ] || finish 1 "bad nodes: ${bad[*]}; the partition has $enough others, and $NODES are needed"
    requeue "bad nodes: ${bad[*]}" "$excluded"
}

# In the background, until its standard input is closed: stacks of all ranks, then the end, when no step is done for too long.
watch_for_hangs() {
    local patience=$((HANG_SECONDS * 2)) since=$SECONDS
    touch "$ATTEMPT/began"
    while read -rt $((HANG_SECONDS / 20 + 1)); [ $? -gt 128 ]; do # a time-out, not the end of the attempt
        if [ "$OUTPUT_DIR/heartbeat" -nt "$ATTEMPT/began" ]; then
            touch -r "$OUTPUT_DIR/heartbeat" "$ATTEMPT/began"
            patience=$HANG_SECONDS since=$SECONDS
        fi
        [ $((SECONDS - since)) -lt "$patience" ] && continue
        say "no step for $patience s: stacks of all ranks, then the end"
        touch "$ATTEMPT/hung"
        scancel --signal=USR2 "$JOB" && sleep 5
        kill -TERM "$1" # srun ends the step
        return
    done
}

asked=
# shellcheck disable=SC2329 # called by the traps
on_signal() { # USR1: the time limit or a pre-emption is near. TERM: Slurm is ending this attempt, and decides on another.
    say "$1: $2"
    asked=$1
    touch "$ATTEMPT/asked" "$ATTEMPT/stop"
}

main() {
    local ends status=0 state srun watched
    trap 'on_signal USR1 "finish the step, save, requeue"' USR1
    trap 'on_signal TERM "Slurm ends this attempt"' TERM
    print_place
    say "config: $CONFIG $*; outputs: $OUTPUT_DIR; newest checkpoint: $(newest | grep . || echo none)"
    if [ "$DRY_RUN" = 1 ]; then
        say "the plan:"
        "$PYTHON" -m grpo_megatron train "$CONFIG" "$@" --dry-run --world-size "$RANKS" \
            trainer.nnodes="$NODES" trainer.n_gpus_per_node="$RANKS_PER_NODE" || exit
        say "the commands:"
    else
        [ "$RESTARTS" -lt "$MAX_ATTEMPTS" ] || finish 1 "MAX_ATTEMPTS=$MAX_ATTEMPTS have been made"
        # Slurm's own requeues (a dead node) pass through no decision of the attempt before.
        if [ "$RESTARTS" -ge 2 ] && stood_still $((RESTARTS - 1)) && stood_still $((RESTARTS - 2)); then
            finish 1 "two attempts in a row have not advanced a step"
        fi
        ends=$(squeue -h -j "$JOB" -o %e) && ends=$(date -d "$ends" +%s 2>/dev/null) &&
            TRAIN+=(trainer.stop_at=$((ends - SAVE_MARGIN)))
        snapshot
    fi
    [ "$PREFLIGHT" = 0 ] || preflight
    if [ "$DRY_RUN" = 1 ]; then on_ranks -- "${TRAIN[@]}" && exit; fi

    rm -f "$OUTPUT_DIR/outcome.json"
    EXEC=1 on_ranks -- "${TRAIN[@]}" > >(tee -a "$ATTEMPT/train.log") 2>&1 &
    srun=$!
    exec {watched}> >(watch_for_hangs "$srun")
    wait "$srun"
    status=$?
    while kill -0 "$srun" 2>/dev/null; do # a signal has interrupted the wait
        wait "$srun"
        status=$?
    done
    exec {watched}>&-
    # srun reports the highest code of any task: 143 as often as not. What the run itself has left knows better.
    state=$(sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$OUTPUT_DIR/outcome.json" 2>/dev/null)
    echo "${state:-failed} $status" >"$ATTEMPT/end"
    decide "${state:-failed}" "$status"
}

decide() { # STATE SRUN_STATUS
    case $1 in
        done) finish 0 "finished" ;;
        stopped)
            touch "$ATTEMPT/asked"
            [ "$asked" = TERM ] || requeue "saved as asked"
            finish 75 "saved as asked, and ended by Slurm"
            ;;
    esac
    [ "$asked" != TERM ] || finish 75 "ended by Slurm before it could save"
    if scontrol -o show job "$JOB" 2>/dev/null | grep -q ' PreemptTime=[0-9]'; then
        touch "$ATTEMPT/asked"
        requeue "pre-empted before it could save"
    fi
    [ ! -e "$ATTEMPT/hung" ] || requeue "it hung"
    [ "$2" != 2 ] || finish 2 "a mistake in the config or the data, named above"
    [ "$2" -le 128 ] || requeue "a rank was killed (srun: $2)"
    [ "$(newest_step)" = "$(cat "$ATTEMPT/start")" ] || requeue "failed with $2 after progress"
    finish "$2" "failed with $2 before it had saved anything; the reason is above"
}

main "$@"
