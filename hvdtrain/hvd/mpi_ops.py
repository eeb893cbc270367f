"""Every operation and query, under the names of `horovod.torch.mpi_ops`. For scripts."""

# Everything here is for others to import.
# mypy: implicit-reexport
# ruff: noqa: F401

from hvdtrain.hvd.basics import basics as _basics
from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.ops.allgather import allgather_async, grouped_allgather_async
from hvdtrain.hvd.ops.allreduce import (
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from hvdtrain.hvd.ops.alltoall import alltoall_async
from hvdtrain.hvd.ops.broadcast import broadcast_, broadcast_async, broadcast_async_
from hvdtrain.hvd.ops.differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdtrain.hvd.ops.handles import poll, synchronize
from hvdtrain.hvd.ops.reducescatter import (
    grouped_reducescatter_async,
    reducescatter_async,
)
from hvdtrain.hvd.ops.sync import barrier, join
from hvdtrain.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdtrain.hvd.util import (
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built
