"""The operations, one file per kind. `hvdtrain.hvd.mpi_ops` has all their names."""
