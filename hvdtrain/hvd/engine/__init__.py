"""The engine under the API: it matches the operations of all ranks by name, then runs them.

`hvd.init` starts one per rank. Small data travels with the messages, and rank 0 reduces it; other
operations run as collectives, in the order that rank 0 sends to all ranks:

```
 user's thread        control thread (one per rank)       executor thread (one per rank)
 submit --request-->  rank 0: Coordinator matches names
                      all: answer --small data: done
                                  --batch ---------------> collectives on process groups: done
```

`engine` is one rank's side, and connects a star of sockets around rank 0 for the messages;
`coordinator` is rank 0's state machine, without any I/O; `executor` runs batches; `collectives` are
the operations on tensors, `eager` those on small data; `process_groups` are the connections. A
`bucket_channel` runs the buckets of one optimizer, by its `bucket_plan`.
"""
