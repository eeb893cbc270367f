"""ByName: one allreduce per gradient, matched by the parameter's name, without a plan.

Used by `NamedReducer` in every step, and by `BucketReducer` in its first step and for sparse
gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import AVERAGE, SUM
from hvdtrain.hvd.ops.allreduce import allreduce_async_, sparse_allreduce_async
from hvdtrain.hvd.ops.common import synchronize
from hvdtrain.hvd.reducers.base import Recipe


class ByName:
    """The pending allreduces of gradients. `sent`: by parameter index, functions that wait.

    `divides_first`: an average is scaled by `Recipe.factors`, as in buckets, not after the sum.
    """

    def __init__(
        self,
        recipe: Recipe,
        suffix: str = "",
        divides_first: bool = False,
    ) -> None:
        self._recipe = recipe
        self._suffix = suffix
        self._divides_first = divides_first
        self.sent: dict[int, Callable[[], Tensor]] = {}

    def send(self, i: int, sparse: bool = False) -> None:
        """Start to average the gradient of parameter `i`, or zeros if it has none.

        `sparse`: another rank's gradient is sparse, so this rank must send rows too.
        """
        recipe, p = self._recipe, self._recipe.params[i]
        name = recipe.names[i] + self._suffix
        grad = p.grad
        if sparse or (grad is not None and grad.is_sparse and not recipe.sparse_as_dense):
            rows = _no_rows(p) if grad is None else grad if grad.is_sparse else grad.to_sparse(1)
            self.sent[i] = sparse_allreduce_async(rows, name, recipe.op, recipe.process_set)
            return
        if grad is None:
            grad = p.grad = torch.zeros_like(p)
        assert not grad.requires_grad, "gradients of gradients (create_graph) cannot be averaged"
        was_sparse = grad.is_sparse  # then reduced dense, and made sparse again
        compressed, ctx = recipe.compression.compress(grad.to_dense() if was_sparse else grad)
        op = recipe.op
        # The product of both is 1: an average is divided by the number of ranks in addition.
        before = 1.0 / recipe.predivide if op == AVERAGE else 1.0
        after = 1.0 / before
        if op == AVERAGE and self._divides_first:
            op, (before, after) = SUM, recipe.factors(compressed.dtype)
        handle = allreduce_async_(compressed, None, name, op, before, after, recipe.process_set)

        def wait() -> Tensor:
            result: Tensor = recipe.compression.decompress(synchronize(handle), ctx)
            return result.to_sparse() if was_sparse else result

        self.sent[i] = wait

    def finish(self) -> None:
        """Wait for all allreduces, and install the results as gradients."""
        sent, self.sent = self.sent, {}
        for i, wait in sent.items():
            p, result = self._recipe.params[i], wait()
            with torch.no_grad():
                if result.is_sparse or p.grad is None or p.grad.is_sparse:
                    p.grad = result
                elif p.grad is not result:
                    p.grad.set_(result)  # type: ignore[call-overload]  # it stays the same tensor


def _no_rows(p: Tensor) -> Tensor:
    """Return a sparse gradient of `p` that has no rows."""
    return torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(0, *p.shape[1:], dtype=p.dtype),
        p.shape,
        device=p.device,
        check_invariants=False,
    )
