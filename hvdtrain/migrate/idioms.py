"""The tables of Horovod's names: what each becomes on torch.distributed, or why there is nothing.

`rewrite` reads them. A name that is in none of them, and no function of `added`, is listed.
"""

from __future__ import annotations

_PROCESS_SET = "torch.distributed.new_group(ranks) makes a group; give group= to the operations"
_TIMELINE = "torch.profiler.profile() around the steps writes a trace"
_RUN = "start the script by torchrun --nproc-per-node N"
_BY_ORDER = "torch.distributed matches operations by their order on each rank, Horovod by name"

BECOMES = {
    "init": "dist.init_process_group()",
    "shutdown": "dist.destroy_process_group()",
    "is_initialized": "dist.is_initialized()",
    "rank": "dist.get_rank()",
    "size": "dist.get_world_size()",
    "local_rank": 'int(os.environ["LOCAL_RANK"])',
    "local_size": 'int(os.environ["LOCAL_WORLD_SIZE"])',
    "cross_rank": 'int(os.environ["GROUP_RANK"])',
    "cross_size": 'int(os.environ["GROUP_WORLD_SIZE"])',
    "barrier": "dist.barrier()",
    "nccl_built": "dist.is_nccl_available()",
    "gloo_built": "dist.is_gloo_available()",
    "mpi_built": "dist.is_mpi_available()",
    "cuda_built": "torch.backends.cuda.is_built()",
    "Average": '"mean"',
    "Sum": '"sum"',
    "Min": '"min"',
    "Max": '"max"',
    "Product": '"product"',
    "Adasum": '"adasum"',
    "Compression.none": "None",
    "Compression.fp16": '"fp16"',
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
}
"""The expression in place of a name; where it ends with a parenthesis, of its call."""

BY_HAND = {
    "Adasum": "torch.distributed has no Adasum; use hvd.Average",
    "join": "DDP's join() is a context manager around the loop; or even out the ranks' batches",
    "alltoall": "torch.distributed.all_to_all_single takes the splits",
    "reducescatter": "torch.distributed.reduce_scatter_tensor sums and does not divide",
    "poll": "an operation of torch.distributed has work.is_completed()",
    "elastic": "torchrun --nnodes MIN:MAX --max-restarts N restarts all ranks when one is lost; "
    "save and load the state in the script",
    "ProcessSet": _PROCESS_SET,
    "add_process_set": _PROCESS_SET,
    "remove_process_set": _PROCESS_SET,
    "global_process_set": _PROCESS_SET,
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "run": _RUN,
    "runner": _RUN,
    # Arguments of calls.
    "process_set": _PROCESS_SET,
    "sparse_as_dense": "DDP reduces sparse gradients as they are; use Embedding(sparse=False)",
    "prescale_factor": "multiply the tensor before the call",
    "postscale_factor": "multiply the result",
    # Methods of Horovod's optimizers.
    "set_backward_passes_per_step": "remove it: DDP averages in each backward pass",
}
"""What has no counterpart, and what to do instead."""

NOTES = {
    "SyncBatchNorm": "results differ in the last bits; works only in training on GPUs",
    "allreduce_async": _BY_ORDER,
    "allreduce_async_": _BY_ORDER,
    "broadcast_async_": _BY_ORDER,
    "broadcast_optimizer_state": "Horovod creates a missing state with a step on zero gradients, "
    "which decays weights and which Adam counts; the converted script makes no such step",
    # Arguments of DistributedOptimizer.
    "backward_passes_per_step": "DDP averages in every backward pass, not only in the last, so "
    "results differ in the last bits; to save time, run the other passes in DDP's no_sync()",
    "gradient_predivide_factor": "DDP divides after the sum, so results differ in the last bits",
    "groups": "DDP chooses its own buckets",
    "num_groups": "DDP chooses its own buckets",
}
"""What changes the last bits of results, or is worth a look."""

OPTIMIZER = (
    "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor "
    "groups num_groups"
).split()
"""The arguments of DistributedOptimizer, in their order."""
NEUTRAL = {"1", "1.0", "None", "0"}
"""Values of those that have a note which change nothing."""

MODULE_METHODS = frozenset(
    "train eval parameters named_parameters buffers named_buffers children named_children modules "
    "named_modules state_dict load_state_dict zero_grad requires_grad_ to to_empty cuda cpu half "
    "float double bfloat16 apply compile type share_memory add_module register_module "
    "register_buffer register_parameter register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook get_submodule get_parameter "
    "get_buffer extra_repr forward".split()
)
"""Methods of torch.nn.Module, which compute nothing."""
