#!/bin/bash
# hvdtrain under Flux. Arguments after the script's name go to hvdtrain.
#
#   flux batch launchers/flux.sh --task digits
#   flux batch --nodes 4 launchers/flux.sh ...        a flag overrides the lines below
#   flux run -n 8 bash launchers/flux.sh COMMAND      in each task: set the variables of a rank, and run COMMAND
#   DRY_RUN=1 bash launchers/flux.sh ...              print the command instead of running it
#
# TASKS_PER_NODE   ranks on each host [8]
#
#flux: --job-name=hvdtrain
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=4h
#flux: --output=hvdtrain-{{id}}.out
set -eu

# Set what torch and hvdtrain read, from what Flux sets for a task, and run a command. The ranks meet
# at the first host of the job, at a port that follows from the job's id: MASTER_ADDR and MASTER_PORT
# choose others. The ranks themselves find out which of them share a host.
run_as_rank() {
    : "${1:?give a command for the tasks of flux run}"
    host=${MASTER_ADDR:-}
    if [ -z "$host" ] && [ "$FLUX_JOB_NNODES" = 1 ]; then
        host=localhost # the host's own name may not resolve
    elif [ -z "$host" ]; then
        host=$(flux hostlist --nth=0 "$FLUX_JOB_ID")
    fi
    sum=$(printf %s "$FLUX_JOB_ID" | cksum)
    unset LOCAL_WORLD_SIZE # Flux does not set it, and another job may have left one
    export MASTER_ADDR="$host" MASTER_PORT="${MASTER_PORT:-$((20000 + ${sum%% *} % 8000))}"
    export RANK="$FLUX_TASK_RANK" WORLD_SIZE="$FLUX_JOB_SIZE" LOCAL_RANK="$FLUX_TASK_LOCAL_ID"
    exec "$@"
}

if [ -n "${FLUX_TASK_RANK:-}" ] && [ "${FLUX_JOB_SIZE:-1}" != 1 ]; then
    [ "${DRY_RUN:-0}" != 1 ] || { printf '%q ' "$@" && echo && exit; }
    run_as_rank "$@"
fi

# The instance that flux batch makes has all of the job's hosts, and its flux run uses them. Its tasks
# get the function as text: this script is in a folder of one host.
nodes=$(flux resource list --states=all --format '{nnodes}' --no-header 2>/dev/null || echo 1)
set -- flux run --nodes "$nodes" --tasks-per-node "${TASKS_PER_NODE:-8}" \
    --setopt=exit-on-error --setopt=cpu-affinity=off \
    bash -euc "$(declare -f run_as_rank); run_as_rank \"\$@\"" flux.sh hvdtrain "$@"

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
