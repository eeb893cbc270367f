"""The engine under the API: it matches the operations of all ranks, then runs them.

`hvd.init` starts one per rank, with two threads beside the caller's, which autograd's count as:

    caller     submits operations, fills and sends buckets in the hooks of backward, waits
    control    receives messages: each rank has a socket to rank 0, whose control thread is also
               the Coordinator
    executor   runs collectives one after another, in the order that rank 0 sends to all ranks

A NAMED OPERATION: `allreduce_async`, a broadcast, a sparse gradient. "Small" is an allreduce of at
most 16 KiB on the CPU.

     caller          control              rank 0's Coordinator              executor of each rank
     submit  ------- ops ---------------> counts the ranks that have
                                          submitted the name; after the
                                          last one:
                                            small: adds up the data, which
     result <------- reduced -----------    were in the messages "ops"
                                            else: sends to all ranks that
                     run (batch) <-------   it is the next to run
                      `-----------------------------------------------> collective on the
     result <---------------------------------------------------------- process set's group

Submissions are collected into one message. It is sent once the caller pauses for 1 ms, and as soon
as the caller waits for one of them; an operation that is pending alone is sent at once.

When all ranks have completed the same small request under a name twice, rank 0's answer gives the
name a number, its slot. From then on a rank sends the numbers of what it has submitted, and one
buffer with their data ("slots"). Rank 0 adds up the numbers that all ranks have sent, and answers
with their sums ("sums"): nobody sends or compares names. A request that has changed, as to another
shape, is sent by name again: see `slots`.

A BATCH is what runs together: its tensors are copied into one flat tensor, this is reduced, and
copied out (`batch`). That holds for the data that rank 0 adds up, and for collectives.

A GRADIENT OF `DistributedOptimizer` travels in a bucket, which is a batch without names: all ranks
send the same buckets in the same order, so that nothing needs to be matched, and the executor takes
no part. In the first step hooks only count. In its `synchronize` the ranks exchange the names,
shapes and dtypes of their parameters ("exchange", an operation that carries text), make the same
plan of it (`gradients.plan`), and send the buckets. From the second step on:

     hook of a parameter      counts; a gradient of 16,384 elements and more is copied into its
                              bucket, divided by the number of ranks
     the bucket's last hook   copies the others, with zeros for those that backward did not
                              compute; starts the all-reduce, in the hook, on the process group of
                              this optimizer's `BucketChannel`
     synchronize              does so for buckets that are not complete, waits, and makes the
                              results the gradients (`gradients.bucket`)

If bucket k is complete before bucket k - 1 was sent, it waits for that. No bucket waits for a
message of rank 0, which would slow a step of the example task by 12 %, one of 1,000 tensors by 35 %
(2 ranks of one host). Once a step each rank tells rank 0 that it has begun it ("step"), for the
stall inspector and the timeline. Ranks that have called `join` are told to send zeros for each
bucket of it ("send_zeros"). Sparse gradients stay named operations in every step.

ON A GPU the executor has a stream of its own, which waits for the kernels that compute an
operation's inputs and for nothing else (`gpu`). Each optimizer and process set has its own NCCL
communicator; operations are ordered within one. The caller waits until a result is complete on the
device.

A LOST RANK: rank 0 sees the end of its socket and sends "down" to all; the loss of rank 0 each sees
by itself. A silent rank counts as lost after `peer_limit_s`. From then on nothing is submitted, and
each wait raises HorovodInternalError, which names the rank. The executor closes the connections, so
that peers inside a collective fail, too; NCCL is aborted.

The files: `operation` is what all use, `job_state` the connections and why the job is over;
`engine` is one rank's side, `coordinator` rank 0's state machine without any I/O, `slots` the
agreed names; `executor` and `batch` run batches, `process_groups` has the connections of
collectives.
"""
