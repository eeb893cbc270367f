"""The engine under the API: operations of all ranks are matched by name, then carried out.

```
 user's thread        control thread (one per rank)       executor thread (one per rank)
 submit --request-->  rank 0: Coordinator matches names
                      all: answer --small data: done
                                  --batch ---------------> collectives on process groups: done
```

`control` carries messages over a star of sockets around rank 0; `coordinator` holds what rank 0
knows, without any I/O; `engine` is one rank's side; `executor` runs batches, `collectives` are the
operations on tensors, `groups` the process groups, `lanes` the agreed buckets of optimizers.
"""
