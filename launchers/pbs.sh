#!/bin/bash
# hvdtrain under PBS, one rank for each mpiprocs. Arguments after the script's name go to hvdtrain.
#
#   qsub launchers/pbs.sh                                             the options below, and HVDTRAIN_*
#   qsub -v HVDTRAIN_TASK=digits launchers/pbs.sh                     qsub hands on no arguments
#   qsub -l select=2:ncpus=8:mpiprocs=8 -- "$PWD/launchers/pbs.sh" --task digits      but after --
#   DRY_RUN=1 bash launchers/pbs.sh ...                               print the command
#
#PBS -N hvdtrain
#PBS -l select=2:ncpus=8:mpiprocs=8
#PBS -l walltime=04:00:00
#PBS -j oe
set -eu
cd "${PBS_O_WORKDIR:-.}"

# hvdrun takes the hosts from $PBS_NODEFILE, and starts a supervisor on each by ssh.
set -- hvdrun hvdtrain "$@"

# On a Cray, whose mpiexec is PALS, which needs no ssh:
#
# set -- mpiexec -n 16 --ppn 8 --cpu-bind none hvdtrain "$@"

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
