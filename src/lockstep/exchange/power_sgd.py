"""PowerSGD whose state belongs to parameters, so that it can be saved.

torch keeps errors and factors by bucket, and DDP makes its buckets anew after the first step: a
resumed run could not take them up (Vogels et al. 2019, https://arxiv.org/abs/1905.13727).
"""

# No postponed annotations: torch compares those of a hook with its own classes.
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


class PowerSGD:
    """torch's hook around a store of one error and one factor per parameter.

    Args:
        matrix_approximation_rank: r; a gradient (n, m) is sent as (n + m) r numbers.
        start_powerSGD_iter: steps before that send gradients as they are; at least 2.
        min_compression_rate: what shrinks by less than this is sent as it is.
        orthogonalization_epsilon: above 0, or a gradient that is all zero yields NaN.
        random_seed: of the first factors.
    """

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 10,  # noqa: N803  # torch's name
        min_compression_rate: float = 2,
        orthogonalization_epsilon: float = 1e-8,
        random_seed: int = 0,
    ) -> None:
        self.torch_state = PowerSGDState(
            None,
            matrix_approximation_rank=matrix_approximation_rank,
            start_powerSGD_iter=start_powerSGD_iter,
            min_compression_rate=min_compression_rate,
            orthogonalization_epsilon=orthogonalization_epsilon,
            random_seed=random_seed,
        )
        self.errors: dict[Tensor, Tensor] = {}
        """Of this rank: what compression left out, as long as the parameter is."""
        self.factors: dict[Tensor, Tensor] = {}
        """The right factor, shape (m r,), the same on all ranks."""

    def payload(self, parameters: list[Tensor]) -> int:
        """Bytes of both factors, and of what is sent as it is."""
        thin = {item: (n + m) * rank for item, n, m, rank in self._compressed(parameters)}
        return sum(thin.get(item, item.numel()) * item.element_size() for item in parameters)

    def before(self, bucket: GradBucket) -> None:
        """Lay the store out as torch's hook expects it for this bucket."""
        state, index, parameters = self.torch_state, bucket.index(), bucket.parameters()
        if not all(item in self.errors for item in parameters):
            return
        state.error_dict[index] = torch.cat([self.errors[item] for item in parameters])
        packed = [self.factors[item] for item, *_ in self._compressed(parameters)]
        state.q_memory_dict[index] = torch.cat(packed) if packed else state.error_dict[index][:0]
        left = sum(rows * rank for _, rows, _, rank in self._compressed(parameters))
        state.p_memory_dict[index] = state.error_dict[index].new_empty(left)

    def after(self, bucket: GradBucket) -> None:
        """Take from torch's hook what it has kept of this bucket."""
        state, index, parameters = self.torch_state, bucket.index(), bucket.parameters()
        if index not in state.error_dict:
            return
        sizes = [item.numel() for item in parameters]
        parts = torch.split(state.error_dict.pop(index), sizes)
        self.errors.update(zip(parameters, parts, strict=True))
        compressed = list(self._compressed(parameters))
        factors = state.q_memory_dict.pop(index)
        packed = torch.split(factors, [m * rank for *_, m, rank in compressed])
        self.factors.update(zip([item for item, *_ in compressed], packed, strict=True))
        state.p_memory_dict.pop(index)

    def _compressed(self, parameters: list[Tensor]) -> Iterator[tuple[Tensor, int, int, int]]:
        """What is compressed, in the order of torch's hook (by shape): parameter, n, m, r."""
        state, shapes = self.torch_state, dict[tuple[int, int], list[Tensor]]()
        for item in parameters:
            n = item.shape[0] if item.ndim else 1
            shapes.setdefault((n, item.numel() // n), []).append(item)
        for (n, m), items in shapes.items():
            rank = min(n, m, state.matrix_approximation_rank)
            if (n + m) * rank * state.min_compression_rate < n * m:
                yield from ((item, n, m, rank) for item in items)


def power_sgd_hook(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of gradients over ranks, from low-rank factors, with error feedback."""
    state.before(bucket)
    result: torch.futures.Future[Tensor] = powerSGD_hook(state.torch_state, bucket)

    def keep(done: torch.futures.Future[Tensor]) -> Tensor:
        state.after(bucket)
        return done.value()

    return result.then(keep)
