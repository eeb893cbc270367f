#!/bin/bash
# hvdtrain under Flux. What follows the script's name goes to hvdtrain.
#
#   flux batch launchers/flux.sh --task digits
#   flux batch --nodes 4 launchers/flux.sh ...        a flag counts before the lines below
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

# The instance that flux batch makes has all of the job's hosts, and its flux run uses them.
nodes=$(flux resource list --states=all --format '{nnodes}' --no-header 2>/dev/null || echo 1)
set -- flux run --nodes "$nodes" --tasks-per-node "${TASKS_PER_NODE:-8}" \
    --setopt=exit-on-error --setopt=cpu-affinity=off hvdtrain "$@"

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
