"""`hvdtrain launch`, also installed as `hvdrun`: start the ranks of a command on one or more hosts.

    host_list        hosts and their slots: from -H, a hostfile, or the scheduler's variables
    remote           the command line that runs a program on another host, and what travels with it
    event_loop       connections to hosts, ranks, signals, and the end of a job: for all launchers
    launcher         the ranks of fixed hosts, and which failed first
    supervisor       on each host: start ranks, relay output, and leave no process behind
    output           what is printed: the lines of the ranks, and the launchers' own
    elastic          --host-discovery-script: a world that changes
    elastic_server   where the ranks ask for their place; discovery: the hosts that may be used
    value_server     where they read and write values
    runner           hvdtrain.run: a function on the ranks; function_call: what sends it to them
    ray              RayExecutor: a function on ranks that are actors of Ray
    spark            a function on ranks in the tasks of Spark; spark_task: one of these
    placement        free ports; the variables of ranks that Ray or Spark has placed
    real_launchers   torchrun, mpirun and horovodrun: their command lines and their output

Commands start fast: only those that send functions (`function_call`, `runner`, `ray`, `spark`)
import torch.
"""
