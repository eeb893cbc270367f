"""Allreduces of single gradients, matched by the parameter's name, without a plan.

`NamedReducer` sends every gradient of every step so, for the user's own compressors;
`BucketReducer` those of its first step, and sparse ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvdtrain.hvd.engine.operation import AVERAGE, SUM
from hvdtrain.hvd.gradients.bucket import has_changed, overlaps_itself
from hvdtrain.hvd.gradients.reducer import AveragingSpec, Reducer
from hvdtrain.hvd.ops.allreduce import allreduce_async_, sparse_allreduce_async
from hvdtrain.hvd.ops.handles import synchronize


class NamedAllreduces:
    """The pending allreduces of gradients. `sent`: by parameter index, functions that wait.

    `suffix` is part of every name. `divides_first`: an average is scaled by
    `AveragingSpec.factors`, as in buckets, not after the sum.
    """

    def __init__(self, spec: AveragingSpec, suffix: str = "", divides_first: bool = False) -> None:
        self._spec = spec
        self._suffix = suffix
        self._divides_first = divides_first
        self.sent: dict[int, Callable[[], Tensor]] = {}
        self._taken: dict[int, tuple[Tensor, int]] = {}  # what was sent, and its version

    def send(self, i: int, sparse: bool = False) -> None:
        """Start to average the gradient of parameter `i`, or zeros if it has none.

        `sparse`: another rank's gradient is sparse, so this rank must send rows too.
        """
        spec, p = self._spec, self._spec.params[i]
        name = spec.names[i] + self._suffix
        grad = p.grad
        if sparse or (grad is not None and grad.is_sparse and not spec.sparse_as_dense):
            rows = _no_rows(p) if grad is None else grad if grad.is_sparse else grad.to_sparse(1)
            self.sent[i] = sparse_allreduce_async(rows, name, spec.op, spec.process_set)
            if grad is not None:
                self._taken[i] = grad, grad._version
            return
        if grad is None:
            grad = p.grad = torch.zeros_like(p)
        assert not grad.requires_grad, "gradients of gradients (create_graph) cannot be averaged"
        if not grad.is_sparse and overlaps_itself(grad):
            grad = p.grad = grad.contiguous()
        was_sparse = grad.is_sparse  # then reduced dense, and made sparse again
        compressed, ctx = spec.compression.compress(grad.to_dense() if was_sparse else grad)
        op, last = spec.op, 1.0
        # The product of both is 1: an average is divided by the number of ranks in addition.
        before = 1.0 / spec.predivide if op == AVERAGE else 1.0
        after = 1.0 / before
        if op == AVERAGE and self._divides_first:
            # As in a bucket, the sum is rounded to the dtype that is sent before it is divided.
            op, after, (before, last) = SUM, 1.0, spec.factors(compressed.dtype)
        self._taken[i] = grad, grad._version
        # `data`: the reduction in place must not count as a change of the gradient.
        handle = allreduce_async_(compressed.data, None, name, op, before, after, spec.process_set)

        def wait() -> Tensor:
            total = synchronize(handle)
            result: Tensor = spec.compression.decompress(
                total.mul_(last) if last != 1.0 else total, ctx
            )
            return result.to_sparse() if was_sparse else result

        self.sent[i] = wait

    def clear(self) -> None:
        """Forget the allreduces that were sent."""
        self.sent.clear()
        self._taken.clear()

    def finish(self) -> list[str]:
        """Wait for all allreduces, and write the results into the gradients.

        Return the parameters whose gradients were written to or replaced after they were sent.
        """
        sent, self.sent = self.sent, {}
        taken, self._taken = self._taken, {}
        changed = []
        for i, wait in sent.items():
            p = self._spec.params[i]
            if i in taken and has_changed(p.grad, *taken[i]):
                changed.append(self._spec.names[i])
            result = wait()
            with torch.no_grad():
                if p.grad is None or p.grad.is_sparse != result.is_sparse:
                    p.grad = result
                elif p.grad.is_sparse:
                    p.grad.zero_().add_(result)  # there is no copy_ from other numbers of rows
                elif overlaps_itself(p.grad):
                    p.grad = result
                elif p.grad.data_ptr() != result.data_ptr():
                    p.grad.copy_(result)
        return changed


def _no_rows(p: Tensor) -> Tensor:
    """Return a sparse gradient of `p` that has no rows."""
    return torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64, device=p.device),
        torch.zeros(0, *p.shape[1:], dtype=p.dtype, device=p.device),
        p.shape,
        device=p.device,
        check_invariants=False,
    )


class NamedReducer(Reducer):
    """Sends each gradient by name as soon as it is ready.

    The user's compressor may return any tensor, so the ranks cannot agree on buckets in advance.
    """

    def __init__(self, spec: AveragingSpec) -> None:
        super().__init__(spec)
        self._named = NamedAllreduces(spec)

    def reset(self) -> None:
        """Discard the backward passes since the last step, and the pending allreduces."""
        super().reset()
        self._named.clear()

    def _handle_ready(self, i: int) -> None:
        self._named.send(i)

    def synchronize(self) -> None:
        """Average all gradients, zeros where there are none. Collective."""
        self.register_hooks()
        self.flush()
        for i, p in enumerate(self.spec.params):
            if i not in self._named.sent and p in self.spec.updated:
                self._named.send(i)
        changed = self._named.finish()
        self.reset()
        self._check_unchanged(changed)
