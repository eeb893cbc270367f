"""Side-by-side comparison of training commands.

Used by the commands `hvdtrain compare` and `hvdtrain report`. An arm is a command, which trains
with any engine under any launcher. All arms stay alive for the whole comparison; the ranks of an
arm are stopped (SIGSTOP) while another arm runs:

    run        starts the arms, and times them in interleaved blocks
    probe      in each rank: records the first steps, and takes those that a block has
    proof      checks that the arms do equal work, and diagnoses why not
    record     holds all raw measurements: compare.json
    analysis   computes every displayed number from the record alone
    report     renders the table in the terminal and on one HTML page
"""
