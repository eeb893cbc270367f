"""The functions that are put into a converted script, below its imports.

`rewrite` adds those that the script names, and what these name of the lines above them.
"""

SOURCE = '''\
import atexit
import contextlib
import os
import time
import weakref
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

AVERAGED = set()  # the parameters whose gradients DDP averages
PENDING = set()  # those of them whose gradients have grown since
CALLBACKS = weakref.WeakSet()  # of reductions, those that a thread of torch still holds


class Forward(torch.nn.Module):
    """The forward pass of a model, as the module that DDP runs."""

    def __init__(self, model):
        super().__init__()
        self.model, self.forward = model, model.forward


def release_callbacks():
    """Wait until torch's threads have dropped the callbacks: dropping one after exit aborts."""
    for _ in range(5000):  # not forever, after an error
        if CALLBACKS:
            time.sleep(0.001)
    time.sleep(0.05)  # the last one was in the set a moment before its thread is done with Python


def call_through_ddp(model, compression, op):
    """Let calls of a model go through DDP; the model stays the object that it is."""

    def reduce_bucket(state, bucket):
        PENDING.difference_update(bucket.parameters())
        gradients = bucket.buffer()
        sent = gradients if compression is None else gradients.half()

        def receive(future):
            total = future.value()[0]
            return gradients.copy_(total / dist.get_world_size() if op == "mean" else total)

        CALLBACKS.add(receive)
        return dist.all_reduce(sent, async_op=True).get_future().then(receive)

    if not AVERAGED:
        atexit.register(release_callbacks)

    # Weights and buffers are what the script makes them: it broadcasts what it wants equal.
    ddp = DistributedDataParallel(Forward(model), init_sync=False)
    ddp.broadcast_buffers = False
    ddp.register_comm_hook(None, reduce_bucket)
    for parameter in model.parameters():
        if parameter.requires_grad:
            AVERAGED.add(parameter)
            parameter.register_post_accumulate_grad_hook(PENDING.add)

    def forward(self, *arguments, **options):
        if self is not model:  # a copy of it
            return type(self).forward(self, *arguments, **options)
        return ddp(*arguments, **options)

    model.forward = forward.__get__(model)


def average_gradients(optimizer, models, compression=None, op="mean"):
    """Let DDP average the gradients of an optimizer's models, in each backward pass."""
    if op not in ("mean", "sum"):
        raise NotImplementedError(f"op={op}: DDP has no such reduction")
    for model in models:
        if AVERAGED.isdisjoint(model.parameters()):
            call_through_ddp(model, compression, op)

    def before_step(*_):
        averaged = AVERAGED - PENDING
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is None and parameter in AVERAGED:
                parameter.grad = torch.zeros_like(parameter)  # as Horovod does
            elif parameter.grad is not None and parameter not in averaged:
                raise RuntimeError(
                    "DDP did not average a gradient: its parameter is in no model of the "
                    "optimizer, was frozen at the wrapping, or was not used through forward(); or "
                    "another parameter got no gradient: then pass find_unused_parameters=True to "
                    "DistributedDataParallel"
                )

    optimizer.register_step_pre_hook(before_step)
    # What Horovod's optimizers have: DDP has averaged by then.
    optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext
    return optimizer


def start_reduction(tensor, average=None, name=None, op=None):
    """Start a reduction of a tensor over the ranks, in place; return what `wait` takes."""
    op = op or ("sum" if average is False else "mean")
    if op not in ("mean", "sum", "min", "max", "product"):
        raise NotImplementedError(f"op={op}: torch.distributed has no such reduction")
    kind = dist.ReduceOp.SUM if op == "mean" else getattr(dist.ReduceOp, op.upper())
    return tensor, op, dist.all_reduce(tensor, op=kind, async_op=True)


def wait(handle):
    """Return the tensor of an operation that has begun, when it has ended."""
    tensor, op, work = handle
    work.wait()
    if op == "mean":
        is_float = tensor.is_floating_point() or tensor.is_complex()
        tensor.div_(dist.get_world_size(), rounding_mode=None if is_float else "trunc")
    return tensor


def allreduce_(tensor, average=None, name=None, op=None):
    """Replace a tensor by its mean over the ranks, or by the reduction `op`."""
    return wait(start_reduction(tensor, average, name, op))


def allreduce_async_(tensor, average=None, name=None, op=None):
    """Start an allreduce in place; `wait` ends it."""
    return start_reduction(tensor, average, name, op)


def allreduce_async(tensor, average=None, name=None, op=None):
    """Start an allreduce of a copy, which `wait` returns."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return start_reduction(copy, average, name, op)


class Reduced(torch.autograd.Function):
    """A tensor reduced over the ranks; its gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx, tensor, *how):
        ctx.how = how
        return wait(allreduce_async(tensor, *how))

    @staticmethod
    def backward(ctx, gradient):
        return Reduced.apply(gradient, *ctx.how), None, None, None


def allreduce(tensor, average=None, name=None, compression=None, op=None):
    """Return a tensor's mean over the ranks, or its reduction `op`."""
    sent = tensor if compression is None else tensor.half()
    return Reduced.apply(sent, average, name, op).to(tensor.dtype)


def synchronize(handle):
    """Return the tensor of an operation that has begun, when it has ended."""
    return wait(handle)


def broadcast_(tensor, root_rank, name=None):
    """Overwrite a tensor on all ranks with that of rank `root_rank`."""
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, src=root_rank)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(sent)
    return tensor


def broadcast(tensor, root_rank, name=None):
    """Return the tensor of rank `root_rank`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("torch.distributed.broadcast has no gradient")
    return broadcast_(tensor.clone(memory_format=torch.contiguous_format), root_rank)


def broadcast_async_(tensor, root_rank, name=None):
    """Start to overwrite a tensor on all ranks with that of `root_rank`; `wait` ends it."""
    return tensor, "broadcast", dist.broadcast(tensor.detach(), src=root_rank, async_op=True)


def broadcast_object(obj, root_rank=0, name=None):
    """Return the object of rank `root_rank`."""
    found = [obj]
    dist.broadcast_object_list(found, src=root_rank)
    return found[0]


def broadcast_parameters(params, root_rank=0):
    """Overwrite the tensors of all ranks, a state_dict or parameters, with those of `root_rank`."""
    items = [params[name] for name in sorted(params)] if isinstance(params, dict) else params
    for item in items:
        tensor = item[1] if isinstance(item, tuple) else item
        if torch.is_tensor(tensor):
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer, root_rank=0):
    """Overwrite the optimizer state of all ranks with that of rank `root_rank`."""
    found = [optimizer.state_dict()]
    dist.broadcast_object_list(found, src=root_rank)
    if dist.get_rank() != root_rank:
        optimizer.load_state_dict(found[0])


def allgather_object(obj, name=None):
    """Return the objects of all ranks, in rank order."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, obj)
    return found


class Gathered(torch.autograd.Function):
    """The rows of all ranks; the gradient of a rank's rows is the mean over the ranks."""

    @staticmethod
    def forward(ctx, tensor):
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(tensor))
        ctx.start, ctx.count = sum(counts[: dist.get_rank()]), len(tensor)
        sent = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        sent[: len(tensor)] = tensor
        found = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(found, sent)
        return torch.cat([rows[:count] for rows, count in zip(found, counts)])

    @staticmethod
    def backward(ctx, gradient):
        return allreduce(gradient)[ctx.start : ctx.start + ctx.count]


def allgather(tensor, name=None):
    """Return the rows of all ranks, in rank order; ranks may have different numbers of rows."""
    return Gathered.apply(tensor)
'''
