"""The operations, one file per kind. `hvdtrain.hvd.mpi_ops` exports them all."""
