#!/bin/bash
# hvdtrain under LSF, one rank for each slot. Arguments after the script's name go to hvdtrain.
#
#   bsub < launchers/lsf.sh                                           the options below, and HVDTRAIN_*
#   bsub -n 16 -R "span[ptile=8]" launchers/lsf.sh --task digits      with arguments, without those
#   DRY_RUN=1 bash launchers/lsf.sh ...                               print the command
#
#BSUB -J hvdtrain
#BSUB -n 16
#BSUB -R "span[ptile=8]"
#BSUB -W 4:00
#BSUB -o hvdtrain-%J.out
set -eu

# hvdrun takes the hosts from $LSB_DJOB_HOSTFILE, and starts a supervisor on each by ssh.
set -- hvdrun hvdtrain "$@"

# With IBM's jsrun, which needs no ssh:
#
# set -- jsrun --nrs 16 --tasks_per_rs 1 --cpu_per_rs 4 --bind none hvdtrain "$@"

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
