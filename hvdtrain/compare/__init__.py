"""Side-by-side comparison of backends.

Used by the commands `hvdtrain compare` and `hvdtrain report`. An arm is a backend on a transport
(or under a Horovod controller) at one world size, started by its own real launcher. All arms stay
alive for the whole comparison; the ranks of an arm are stopped (SIGSTOP) while another arm runs:

    run        starts the arms, and times them in interleaved blocks
    proof      checks that the arms do equal work, and diagnoses why not
    record     holds all raw measurements: compare.json
    analysis   computes every displayed number from the record alone
    report     renders tables, pictures and one HTML page from the record and its summary
"""
