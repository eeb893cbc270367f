"""Rewrite a Horovod script: for `hvdtrain.hvd`, or for native DDP under torchrun.

    find         where a script names Horovod, by its scopes
    idioms       the table: what each name becomes, or why it has no counterpart
    rewrite      to_ddp: each use becomes what its row says, or is listed
    list_lines   lines to convert by hand; names of Horovod that are left and not listed
    to_hvd       `import horovod.torch as hvd` becomes `import hvdtrain.hvd as hvd`

`hvdtrain migrate` prints the difference. Names are followed, not text; the rest is listed.
Comments and formatting stay (LibCST). Imports no torch.
"""
