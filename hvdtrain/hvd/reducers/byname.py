"""One allreduce for each gradient, matched by the parameter's name: no agreement is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import AVERAGE, SUM
from hvdtrain.hvd.ops.allreduce import allreduce_async_, sparse_allreduce_async
from hvdtrain.hvd.ops.common import synchronize
from hvdtrain.hvd.reducers.base import Recipe


class ByName:
    """Gradients on their way, each under its own name. `sent` are their parameters' places.

    `divides_first`: an average is divided before the sum, as in buckets, not after it.
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
        """Begin to average the gradient of parameter `i`; zeros where it has none.

        `sparse`: other ranks send rows, so that this one must, too.
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
        was_sparse = grad.is_sparse
        compressed, ctx = recipe.compression.compress(grad.to_dense() if was_sparse else grad)
        op = recipe.op
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
        """Wait for all, and make the results the gradients."""
        sent, self.sent = self.sent, {}
        for i, wait in sent.items():
            p, result = self._recipe.params[i], wait()
            with torch.no_grad():
                if result.is_sparse or p.grad is None or p.grad.is_sparse:
                    p.grad = result
                elif p.grad is not result:
                    p.grad.set_(result)  # type: ignore[call-overload]  # it stays the same tensor


def _no_rows(p: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(0, *p.shape[1:], dtype=p.dtype),
        p.shape,
        device=p.device,
        check_invariants=False,
    )
