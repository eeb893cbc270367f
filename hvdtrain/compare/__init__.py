"""Side-by-side comparison of backends.

Used by the commands `hvdtrain compare` and `hvdtrain report`. An arm is a backend on a transport
(or under a Horovod controller) at one world size, started by its own real launcher. All arms stay
alive for the whole comparison; the ranks of an arm are stopped (SIGSTOP) while another arm runs:

    runner   checks that the arms do equal work, then times them in interleaved blocks
    record   holds all raw measurements: compare.json
    summary  computes every displayed number from the record alone
    report   renders tables, pictures and one HTML page from the record and its summary
"""
