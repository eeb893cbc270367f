"""Side-by-side comparison of backends: `hvdtrain compare` and `hvdtrain report`.

An arm is a backend on a transport (or under a controller) at a world size, started by its own real
launcher. All arms stay alive, and stand still but for their turn:

    runner   proves that the arms do equal work, then times them in interleaved blocks
    record   what was measured, raw: compare.json
    summary  every number that is shown, from the record alone
    report   tables, pictures and one HTML page, from the summary alone
"""
