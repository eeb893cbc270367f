"""The API of `horovod.torch` on torch.distributed: `import hvdtrain.hvd as hvd`.

Nothing is compiled, and importing starts nothing. docs/horovod-api.md says, call by call, what
is identical to Horovod 0.28.1, stronger, different or refused.
"""

from __future__ import annotations

from hvdtrain.hvd import elastic as elastic
from hvdtrain.hvd import mpi_ops as mpi_ops
from hvdtrain.hvd.compression import Compression as Compression
from hvdtrain.hvd.functions import allgather_object as allgather_object
from hvdtrain.hvd.functions import broadcast_object as broadcast_object
from hvdtrain.hvd.functions import broadcast_optimizer_state as broadcast_optimizer_state
from hvdtrain.hvd.functions import broadcast_parameters as broadcast_parameters
from hvdtrain.hvd.mpi_ops import *  # noqa: F403
from hvdtrain.hvd.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.hvd.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from hvdtrain.hvd.util import check_extension as check_extension

_MPI_LIB_AVAILABLE = True
