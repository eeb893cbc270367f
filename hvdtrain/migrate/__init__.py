"""Rewrite a Horovod script: for `hvdtrain.hvd`, or for native DDP under torchrun.

    to_hvd    `import horovod.torch as hvd` becomes `import hvdtrain.hvd as hvd`
    to_ddp    each call of Horovod's API becomes one of torch.distributed, or is listed

`hvdtrain migrate` prints the difference. Comments and formatting stay (LibCST). Imports no torch.
"""
