"""The engine under the API: it matches the operations of all ranks by name, then runs them.

`hvd.init` starts one per rank, with two threads beside the caller's:

    caller     submits operations, fills and sends buckets in the hooks of backward, waits
    control    receives messages over a star of sockets around rank 0; there it is the Coordinator
    executor   runs collectives one after another, in the order that rank 0 sends to all ranks

A NAMED OPERATION: `allreduce_async`, a broadcast, a sparse gradient.

     caller          control              rank 0's Coordinator              executor of each rank
     submit  ------- ops ---------------> counts the ranks that have
                                          submitted the name; after the
                                          last one:
                                            small data on the CPU came
     result <------- reduced -----------    with ops: adds it up
                                            else: the next place in
                     run (batch) <-------   the order of all ranks
                      `-----------------------------------------------> collective on the
     result <---------------------------------------------------------- process set's group

A caller that submits several sends them in one message: after 1 ms, or when it waits for one. A
small one that has completed twice has a number, its slot; from then on ranks send numbers and one
buffer for all of them, and nobody looks at names ("slots", "sums": see `slots`).

A BATCH is what runs together: its tensors are copied into one flat tensor, that is reduced, and
copied out (`batch`), whether rank 0 adds up small data or all ranks run a collective.

A GRADIENT OF `DistributedOptimizer` needs no name: a bucket is a batch whose place in the order is
agreed beforehand. In the first step the ranks exchange what parameters they have ("exchange", an
operation that only carries text), and all make the same plan of it (`gradients.plan`).

     hook of a parameter      counts; a large gradient is copied into the bucket
     the bucket's last hook   copies the others; starts the all-reduce, in the hook, on
                              the process group of this optimizer's `BucketChannel`
     synchronize              sends buckets that are not complete, waits, writes the averages

No bucket waits for a message of rank 0, which would cost a step of the digits 12 %, one of 1,000
tensors 35 % (2 ranks, shm): one that is complete before bucket k - 1 is held until that is sent, on
every rank. Once a step each rank tells rank 0 that it has begun it ("step"), for the stall
inspector, the timeline, and ranks that have called `join`: these are told to send zeros
("send_zeros"). Sparse gradients stay named operations in every step.

ON A GPU the executor has a stream of its own, which waits for the tensors of an operation and for
nothing else that its rank computes (`gpu`). Each optimizer and process set has its own NCCL
communicator, with one order in each. The caller waits until a result is complete on the device.

A LOST RANK: rank 0 sees the end of its socket and sends "down" to all; the loss of rank 0 each sees
by itself. A silent rank counts as lost after `peer_limit_s`. From then on nothing is submitted, and
each wait raises HorovodInternalError, which names the rank. The executor closes the connections, so
that peers inside a collective fail, too; NCCL is aborted.

The files: `operation` is what all use, `job_state` how the job ends; `engine` is one rank's side,
`coordinator` rank 0's state machine without any I/O, `slots` the agreed names; `executor` and
`batch` run batches, `process_groups` has the connections.
"""
