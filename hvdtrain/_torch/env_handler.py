"""torch's handler of `env://`, the default of `init_process_group`. Used by `transports`.

Relies on the table `torch.distributed.rendezvous._rendezvous_handlers`, because the public
`register_rendezvous_handler` refuses a scheme that is taken. Without the table
`replace_env_handler` raises BackendUnavailable; `init_process_group(..., store=...)` still works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.errors import BackendUnavailable

Handler = Callable[..., Iterator[Any]]


def replace_env_handler(replacement: Callable[[Handler], Handler]) -> None:
    """Replace the handler of `env://` with `replacement(handler)`. A second call does nothing."""
    # In torch.distributed a function `rendezvous` hides the module of that name.
    module = sys.modules[f"{dist.__name__}.rendezvous"]
    handlers: dict[str, Handler] = getattr(module, "_rendezvous_handlers", {})
    if "env" not in handlers:
        raise BackendUnavailable(
            f"torch {torch.__version__} has no table of rendezvous handlers; give "
            "init_process_group a store, such as one from hvdtrain.job.rendezvous.open_store"
        )
    if not getattr(handlers["env"], "is_replaced", False):
        handlers["env"] = replacement(handlers["env"])
        handlers["env"].is_replaced = True  # type: ignore[attr-defined]
