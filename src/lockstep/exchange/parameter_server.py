"""``ddp_ps``: gradients go to rank 0, are summed there, and come back."""

# No postponed annotations: torch compares those of a hook with its own classes.
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lockstep.strategies.exact_ddp import ExactDDPStrategy
from lockstep.traffic import gradient_bytes

SERVER = 0


def sum_on_server(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook: the mean over W ranks, in the order of the ranks, on each of them.

    With B bytes in the bucket, rank 0 receives (W - 1) B and sends as many; the others send B and
    receive B. Li et al. 2014, https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu
    """
    gradients, world_size = bucket.buffer(), dist.get_world_size()
    if dist.get_rank() == SERVER:
        _serve(gradients, world_size)
    else:
        _wait([dist.isend(gradients, SERVER)])
        _wait([dist.irecv(gradients, SERVER)])
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def _serve(gradients: Tensor, world_size: int) -> None:
    workers = range(1, world_size)
    received = [torch.empty_like(gradients) for _ in workers]
    _wait([dist.irecv(share, rank) for share, rank in zip(received, workers, strict=True)])
    for share in received:
        gradients.add_(share)
    gradients.div_(world_size)
    _wait([dist.isend(gradients, rank) for rank in workers])


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this process is a rank of the group"
        work.wait()


class ParameterServerStrategy(ExactDDPStrategy):
    """ddp whose gradients are summed on rank 0, which trains as well.

    For the comparison with the ring: rank 0's traffic grows with the number of processes.
    """

    def bytes_per_step(self) -> float:
        """That rank 0 receives and sends."""
        assert self.lightning_module is not None
        return 2 * (self.world_size - 1) * gradient_bytes(self.lightning_module)

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, sum_on_server)
