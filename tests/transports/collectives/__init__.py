"""What every collective of torch.distributed does, whatever the transport: a table of cases."""

from tests.transports.collectives import (  # noqa: F401  each adds its rows
    between_two,
    errors,
    groups,
    in_flight,
    kinds,
    numerics,
    several_hosts,
)
from tests.transports.collectives.table import TABLE, Case

__all__ = ["TABLE", "Case"]
