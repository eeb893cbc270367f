"""The engine under the API: it matches the operations of all ranks, then runs them.

`hvd.init` starts one per rank, with two threads beside the callers (the threads of the script, and
those in which autograd calls hooks):

    caller     submits operations, and sends what it has submitted when it waits; fills and sends
               buckets in the hooks of backward
    control    receives messages, and sends operations that no caller waits for: each rank has a
               socket to rank 0, whose control thread is also the Coordinator
    executor   runs collectives one after another, in the order that rank 0 sends to all ranks

A NAMED OPERATION: `allreduce_async`, a broadcast, a sparse gradient. "Small" is an allreduce of at
most 16 KiB on the CPU.

     caller          control              rank 0's Coordinator              executor of each rank
     submit  ------- ops ---------------> counts the ranks that have
             (a small one with its data)  submitted the name; after the
                                          last one:
     result <------- reduced -----------    small: adds up their data
                     run ---------------    else: sends that it is next
                      `-----------------------------------------------> collective on the
     result <---------------------------------------------------------- process set's group

An operation is sent at once while no other is pending. Those that are submitted until it has a
result go into one message, which the caller sends when it waits for one of them, and control once
none has been added for 1 ms.

When all ranks have completed the same small request under a name twice, the second answer gives
the name a number, its slot. From then on a rank sends the numbers of the slots that it has
submitted, and one buffer with their data ("slots"). For the slots that all ranks have sent, rank 0
answers with the sums of these data ("sums"): nobody sends or compares names. A request that has
changed, as to another shape, is sent by name again: see `slots`.

A BATCH is what runs together: its tensors are copied into one flat tensor, this is reduced, and
copied out (`batch`). Rank 0 does so with the data of small operations, the executor with the
tensors of a collective.

A GRADIENT OF `DistributedOptimizer` travels in a bucket, which is a batch without names: all ranks
send the same buckets in the same order, so that nothing needs to be matched, and the executor takes
no part. In the first step hooks only count. In `synchronize` of that step the ranks exchange the
names, shapes and dtypes of their parameters ("exchange", an operation that carries text), make the
same plan of it (`gradients.plan`), and fill and send the buckets. From the second step on:

     hook of a parameter      counts; a gradient of 16,384 elements and more is copied into its
                              bucket, divided by the number of ranks
     the bucket's last hook   copies the others, with zeros for those that backward did not
                              compute; starts the all-reduce, in the hook, on the process group of
                              this optimizer's `BucketChannel`
     synchronize              fills and sends buckets that are not complete, waits, and makes the
                              results the gradients (`gradients.bucket`)

A bucket that is complete before the one in front of it was sent is sent by that one's last hook; no
hook blocks. No bucket asks rank 0: its answers would slow a step of the example task by 12 %, one
of 1,000 tensors by 35 % (2 ranks of one host). Once a step each rank tells rank 0 that it has begun
it ("step"), for the stall inspector and the timeline. A rank that has no data left calls `join`,
and waits: rank 0 tells it of each step of the others ("send_zeros"), and its executor sends zeros
for their buckets. Sparse gradients stay named operations in every step.

ON A GPU the executor has a stream of its own, which waits for the kernels that compute an
operation's inputs and for nothing else (`gpu`); buckets run on NCCL's own. Each optimizer and
process set has its own NCCL communicator; operations are ordered within one. `synchronize` blocks
until a result is complete on the device.

A LOST RANK: rank 0 sees the end of its socket and sends "down" to all; the loss of rank 0 each sees
by itself. A rank that sends no sign of life for `peer_limit_s` (see `settings`) is lost, too. From
then on nothing is submitted, and each wait raises HorovodInternalError, which names the rank.
The connections of collectives are closed, so that peers inside of one fail, too; NCCL is aborted.

The files: `operation` has the request, the name's key and the result that all others use;
`engine` is one rank's side, `coordinator` rank 0's state machine without any I/O, `slots` the
agreed names; `executor` and `batch` run batches, `process_groups` has the connections of
collectives.
"""
