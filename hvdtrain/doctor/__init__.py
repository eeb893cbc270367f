"""`hvdtrain doctor`: what works on this machine, and the command that fixes what does not.

    finding          the result of one check
    findings_display the output
    checks           the table of checks, and their order
    software         torch, launchers, Horovod, MPI, transports, GPUs
    limits           /dev/shm, open files, cores, threads
    network          host name, interfaces, variables that name one
    remains          what killed jobs have left in memory and in the temporary folder
    arm_checks       starts ranks; collective_rank: every collective, with a known answer
    host_checks      the same checks on several hosts, by ssh

Used by `cli.doctor`. No check detects by itself what another part of hvdtrain detects already: it
calls that part.
"""
