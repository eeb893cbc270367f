"""Every operation and query, under the names of `horovod.torch.mpi_ops`. For scripts."""

from hvdtrain.hvd.basics import basics as _basics
from hvdtrain.hvd.compression import Compression as Compression
from hvdtrain.hvd.exceptions import HorovodInternalError as HorovodInternalError
from hvdtrain.hvd.ops.allgather import allgather_async as allgather_async
from hvdtrain.hvd.ops.allgather import grouped_allgather_async as grouped_allgather_async
from hvdtrain.hvd.ops.allreduce import allreduce_ as allreduce_
from hvdtrain.hvd.ops.allreduce import allreduce_async as allreduce_async
from hvdtrain.hvd.ops.allreduce import allreduce_async_ as allreduce_async_
from hvdtrain.hvd.ops.allreduce import grouped_allreduce_ as grouped_allreduce_
from hvdtrain.hvd.ops.allreduce import grouped_allreduce_async as grouped_allreduce_async
from hvdtrain.hvd.ops.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from hvdtrain.hvd.ops.allreduce import sparse_allreduce_async as sparse_allreduce_async
from hvdtrain.hvd.ops.alltoall import alltoall_async as alltoall_async
from hvdtrain.hvd.ops.broadcast import broadcast_ as broadcast_
from hvdtrain.hvd.ops.broadcast import broadcast_async as broadcast_async
from hvdtrain.hvd.ops.broadcast import broadcast_async_ as broadcast_async_
from hvdtrain.hvd.ops.differentiable import allgather as allgather
from hvdtrain.hvd.ops.differentiable import allreduce as allreduce
from hvdtrain.hvd.ops.differentiable import alltoall as alltoall
from hvdtrain.hvd.ops.differentiable import broadcast as broadcast
from hvdtrain.hvd.ops.differentiable import grouped_allgather as grouped_allgather
from hvdtrain.hvd.ops.differentiable import grouped_allreduce as grouped_allreduce
from hvdtrain.hvd.ops.differentiable import grouped_reducescatter as grouped_reducescatter
from hvdtrain.hvd.ops.differentiable import reducescatter as reducescatter
from hvdtrain.hvd.ops.handles import poll as poll
from hvdtrain.hvd.ops.handles import synchronize as synchronize
from hvdtrain.hvd.ops.reducescatter import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from hvdtrain.hvd.ops.reducescatter import reducescatter_async as reducescatter_async
from hvdtrain.hvd.ops.sync import barrier as barrier
from hvdtrain.hvd.ops.sync import join as join
from hvdtrain.hvd.process_sets import ProcessSet as ProcessSet
from hvdtrain.hvd.process_sets import add_process_set as add_process_set
from hvdtrain.hvd.process_sets import global_process_set as global_process_set
from hvdtrain.hvd.process_sets import remove_process_set as remove_process_set
from hvdtrain.hvd.util import (
    get_average_backwards_compatibility_fun as get_average_backwards_compatibility_fun,
)
from hvdtrain.hvd.util import gpu_available as gpu_available
from hvdtrain.hvd.util import num_rank_is_power_2 as num_rank_is_power_2

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
