"""The table of Horovod's names: what each becomes on torch.distributed, or why there is nothing.

`rewrite` reads it. A name that has no row is listed, as one whose row has no counterpart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Idiom:
    """What a name of `horovod.torch` becomes."""

    value: str = ""
    """The expression in place of the name itself."""
    call: str = ""
    """The expression in place of its call, which has no arguments."""
    function: str = ""
    """The source of a function of the same name, which is added to the script."""
    needs: tuple[str, ...] = ()
    """The rows whose functions this function calls."""
    note: str = ""
    """What is worth knowing of the conversion."""
    why: str = ""
    """Why there is no counterpart, and what to do by hand."""


def _environment(name: str) -> Idiom:
    return Idiom(call=f'int(os.environ["{name}"])')


_PROCESS_SET = "torch.distributed.new_group(ranks) makes a group; give group= to the operations"
_ELASTIC = (
    "torchrun --nnodes MIN:MAX --max-restarts N starts all ranks again when one is lost; save and "
    "load the state in the script"
)
_TIMELINE = "torch.profiler.profile() around the steps writes a trace"
_RUN = "start the script by torchrun --nproc-per-node N"
_BY_ORDER = "torch.distributed matches operations by their order on each rank, Horovod by name"

IDIOMS = {
    "init": Idiom(call="dist.init_process_group()"),
    "shutdown": Idiom(call="dist.destroy_process_group()"),
    "is_initialized": Idiom(call="dist.is_initialized()"),
    "rank": Idiom(call="dist.get_rank()"),
    "size": Idiom(call="dist.get_world_size()"),
    "local_rank": _environment("LOCAL_RANK"),
    "local_size": _environment("LOCAL_WORLD_SIZE"),
    "cross_rank": _environment("GROUP_RANK"),
    "cross_size": _environment("GROUP_WORLD_SIZE"),
    "barrier": Idiom(call="dist.barrier()"),
    "nccl_built": Idiom(call="dist.is_nccl_available()"),
    "gloo_built": Idiom(call="dist.is_gloo_available()"),
    "mpi_built": Idiom(call="dist.is_mpi_available()"),
    "cuda_built": Idiom(call="torch.backends.cuda.is_built()"),
    "Average": Idiom(value='"mean"'),
    "Sum": Idiom(value='"sum"'),
    "Min": Idiom(value='"min"'),
    "Max": Idiom(value='"max"'),
    "Product": Idiom(value='"product"'),
    "Compression.none": Idiom(value="None"),
    "Compression.fp16": Idiom(
        value='"fp16"', note="rounded in another order than by Horovod: other last bits"
    ),
    "SyncBatchNorm": Idiom(
        value="torch.nn.SyncBatchNorm", note="other last bits; in training on GPUs only"
    ),
    "DistributedOptimizer": Idiom(
        function='''
class Forward(torch.nn.Module):
    """The forward pass of a model, as the module that DDP runs."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.run = model.forward
        self.averaged = {p for p in model.parameters() if p.requires_grad}
        self.is_called = False

    def forward(self, *arguments, **options):
        return self.run(*arguments, **options)


FORWARDS = {}


def sum_hook(group, bucket):
    """Add up the gradients of a bucket, where DDP takes their mean."""
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def call_through_ddp(model, compression, op):
    """Let calls of a model go through DDP; the model stays the object that it is."""
    hooks = {
        ("mean", None): None,
        ("mean", "fp16"): default_hooks.fp16_compress_hook,
        ("sum", None): sum_hook,
    }
    if (op, compression) not in hooks:
        raise NotImplementedError(f"op={op}, compression={compression}: DDP has no such reduction")
    inner = Forward(model)
    # Weights and buffers are what the script makes them: it broadcasts what it wants equal.
    ddp = DistributedDataParallel(inner, init_sync=False)
    ddp.broadcast_buffers = False
    if hooks[op, compression] is not None:
        ddp.register_comm_hook(None, hooks[op, compression])

    def forward(self, *arguments, **options):
        if self is not model:  # a copy
            return type(self).forward(self, *arguments, **options)
        if not torch.is_grad_enabled():
            return inner.run(*arguments, **options)
        inner.is_called = True
        return ddp(*arguments, **options)

    def check(parameter):
        if not inner.is_called:
            raise RuntimeError(
                f"{type(model).__name__}: gradients of what did not go through its forward(); DDP "
                "does not average them"
            )

    for parameter in inner.averaged:
        parameter.register_post_accumulate_grad_hook(check)
    model.forward = forward.__get__(model)
    return inner


def average_gradients(optimizer, models, compression=None, op="mean"):
    """Let DDP average the gradients of the models of an optimizer, in each backward pass."""
    for model in models:
        if model not in FORWARDS:
            FORWARDS[model] = call_through_ddp(model, compression, op)
    averaged = set().union(*(FORWARDS[model].averaged for model in models))

    def check(*_):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter not in averaged:
                raise RuntimeError(
                    "a parameter of the optimizer is in none of its models, or was frozen when DDP "
                    "was made: DDP does not average its gradient"
                )

    def reset(*_):
        for model in models:
            FORWARDS[model].is_called = False

    optimizer.register_step_pre_hook(check)
    optimizer.register_step_post_hook(reset)
    return optimizer
'''
    ),
    "allreduce": Idiom(
        function='''
class Reduced(torch.autograd.Function):
    """A tensor combined over the ranks, and its gradient in the same way."""

    @staticmethod
    def forward(ctx, tensor, op):
        ctx.op = op
        result = tensor.clone(memory_format=torch.contiguous_format)
        wait(start_reduction(result, op))
        return result

    @staticmethod
    def backward(ctx, gradient):
        return Reduced.apply(gradient, ctx.op), None


def allreduce(tensor, average=None, name=None, compression=None, op=None):
    """Return a tensor's mean over the ranks, or what `op` says."""
    op = op or ("sum" if average is False else "mean")
    if compression is None:
        return Reduced.apply(tensor, op)
    return Reduced.apply(tensor.half(), op).to(tensor.dtype)
''',
        needs=("start_reduction",),
    ),
    "allreduce_": Idiom(
        function='''
def allreduce_(tensor, average=None, name=None, op=None):
    """Put the mean over the ranks into a tensor, or what `op` says."""
    return wait(start_reduction(tensor, op or ("sum" if average is False else "mean")))
''',
        needs=("start_reduction",),
    ),
    "allreduce_async_": Idiom(
        function='''
def allreduce_async_(tensor, average=None, name=None, op=None):
    """Begin an allreduce in place; `wait` ends it."""
    return start_reduction(tensor, op or ("sum" if average is False else "mean"))
''',
        needs=("start_reduction",),
        note=_BY_ORDER,
    ),
    "allreduce_async": Idiom(
        function='''
def allreduce_async(tensor, average=None, name=None, op=None):
    """Begin an allreduce of a copy, which `wait` returns."""
    op = op or ("sum" if average is False else "mean")
    return start_reduction(tensor.detach().clone(memory_format=torch.contiguous_format), op)
''',
        needs=("start_reduction",),
        note=_BY_ORDER,
    ),
    "synchronize": Idiom(value="wait", needs=("start_reduction",)),
    "start_reduction": Idiom(
        function='''
def start_reduction(tensor, op):
    """Begin to combine a tensor over the ranks, in place; return what `wait` takes."""
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
'''
    ),
    "broadcast": Idiom(
        function='''
def broadcast(tensor, root_rank, name=None):
    """Return the tensor of one rank."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("torch.distributed.broadcast has no gradient")
    return broadcast_(tensor.clone(memory_format=torch.contiguous_format), root_rank)
''',
        needs=("broadcast_",),
    ),
    "broadcast_": Idiom(
        function='''
def broadcast_(tensor, root_rank, name=None):
    """Give a tensor of all ranks the values of one rank."""
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, src=root_rank)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(sent)
    return tensor
'''
    ),
    "broadcast_async_": Idiom(
        function='''
def broadcast_async_(tensor, root_rank, name=None):
    """Begin to give a tensor of all ranks the values of one; `wait` ends it."""
    return tensor, "broadcast", dist.broadcast(tensor.detach(), src=root_rank, async_op=True)
''',
        needs=("start_reduction",),
        note=_BY_ORDER,
    ),
    "broadcast_object": Idiom(
        function='''
def broadcast_object(obj, root_rank=0, name=None):
    """Return the object of one rank."""
    found = [obj]
    dist.broadcast_object_list(found, src=root_rank)
    return found[0]
'''
    ),
    "broadcast_parameters": Idiom(
        function='''
def broadcast_parameters(params, root_rank=0):
    """Give all ranks the tensors of one rank: a state_dict's, or parameters."""
    items = [params[name] for name in sorted(params)] if isinstance(params, dict) else params
    for item in items:
        tensor = item[1] if isinstance(item, tuple) else item
        if torch.is_tensor(tensor):
            broadcast_(tensor, root_rank)
''',
        needs=("broadcast_",),
    ),
    "broadcast_optimizer_state": Idiom(
        function='''
def broadcast_optimizer_state(optimizer, root_rank=0):
    """Give all ranks the state of one rank's optimizer."""
    found = [optimizer.state_dict()]
    dist.broadcast_object_list(found, src=root_rank)
    if dist.get_rank() != root_rank:
        optimizer.load_state_dict(found[0])
'''
    ),
    "allgather_object": Idiom(
        function='''
def allgather_object(obj, name=None):
    """Return the objects of all ranks, in rank order."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, obj)
    return found
'''
    ),
    "allgather": Idiom(
        function='''
class Gathered(torch.autograd.Function):
    """The rows of all ranks; the gradient of a rank's rows is the mean over the ranks."""

    @staticmethod
    def forward(ctx, tensor):
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(tensor))
        ctx.start, ctx.count = sum(counts[: dist.get_rank()]), len(tensor)
        shape = (max(counts), *tensor.shape[1:])
        sent = tensor.new_zeros(shape)
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
''',
        needs=("allreduce",),
    ),
    "Adasum": Idiom(value='"adasum"', why="torch.distributed has no Adasum; use hvd.Average"),
    "join": Idiom(
        why="DDP's join() is a context manager around the loop; or give all ranks as many batches"
    ),
    "alltoall": Idiom(why="torch.distributed.all_to_all_single takes the splits"),
    "reducescatter": Idiom(why="torch.distributed.reduce_scatter_tensor adds, and does not divide"),
    "poll": Idiom(why="an operation of torch.distributed has work.is_completed()"),
    "elastic": Idiom(why=_ELASTIC),
    "ProcessSet": Idiom(why=_PROCESS_SET),
    "add_process_set": Idiom(why=_PROCESS_SET),
    "remove_process_set": Idiom(why=_PROCESS_SET),
    "global_process_set": Idiom(why=_PROCESS_SET),
    "start_timeline": Idiom(why=_TIMELINE),
    "stop_timeline": Idiom(why=_TIMELINE),
    "run": Idiom(why=_RUN),
    "runner": Idiom(why=_RUN),
}

IMPORTS = {
    "os": "import os",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "default_hooks": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
}
"""What is imported where the text that is added has a name."""

ADDED = {
    *("dist", "Forward", "FORWARDS", "sum_hook", "call_through_ddp", "average_gradients"),
    *("Reduced", "Gathered", "start_reduction", "wait"),
    *(name for name, idiom in IDIOMS.items() if idiom.function),
}
"""The names that are bound in a converted script."""

# The arguments of DistributedOptimizer, in their order: what they become, or what is said of them.
OPTIMIZER = {
    "optimizer": "",
    "named_parameters": "",
    "compression": "",
    "backward_passes_per_step": "DDP averages in each backward pass, not in the last alone: other "
    "last bits; wrap the others in model.no_sync() of DDP to save time",
    "op": "",
    "gradient_predivide_factor": "DDP divides by the number of ranks before it adds: other last "
    "bits",
    "groups": "DDP sends gradients in buckets of its own",
    "num_groups": "DDP sends gradients in buckets of its own",
}
NEUTRAL = {
    "backward_passes_per_step": ("1",),
    "gradient_predivide_factor": ("1", "1.0"),
    "groups": ("None",),
    "num_groups": ("0",),
}
"""Values of these arguments that change nothing."""
ARGUMENTS = {
    "process_set": _PROCESS_SET,
    "sparse_as_dense": "DDP reduces sparse gradients as they are; give the embedding sparse=False",
    "prescale_factor": "multiply the tensor before",
    "postscale_factor": "multiply the result",
}
"""Why arguments of Horovod's calls have no counterpart."""

OPTIMIZER_METHODS = ("synchronize", "skip_synchronize", "set_backward_passes_per_step")
"""Methods that Horovod's optimizers alone have."""

MODULE_METHODS = frozenset(
    "train eval parameters named_parameters buffers named_buffers children named_children modules "
    "named_modules state_dict load_state_dict zero_grad requires_grad_ to to_empty cuda cpu half "
    "float double bfloat16 apply compile type share_memory add_module register_module "
    "register_buffer register_parameter register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook get_submodule get_parameter "
    "get_buffer extra_repr forward".split()
)
"""Methods of torch.nn.Module, which compute nothing."""
