# ruff: noqa: T201 (it is no part of a package)
"""Attention over a sequence that is spread over 4 processes.

    torchrun --nproc-per-node 4 docs/ring.py

Each process keeps its rows of q, k and v. Keys and values go round in a ring; results
and gradients are those of one process, and under a causal mask all have the same work.
"""

import torch
import torch.distributed as dist

import regard
from regard.engine import ring

N = 1001  # tokens: no need to be a multiple of anything


def main() -> None:
    """Compare the ring with one process, and count the work of each rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    places = ring.zigzag(N, world)  # the positions of every rank
    mine = ring.list_positions(places[rank])  # those of this one

    torch.manual_seed(0)  # here all draw the same sequence, and keep their rows of it
    whole = torch.randn(3, 1, 4, N, 32, dtype=torch.float64)  # q, k, v: (B, H, N, D)
    shard = whole[..., mine, :].requires_grad_()
    mask = regard.causal() & regard.same(torch.arange(N) // 400)  # packed documents

    seen = ring.attend(*shard, mask, places=places)
    seen.out.square().sum().backward()  # on every rank: the gradients go round as well

    whole.requires_grad_()
    expected = regard.attention(*whole, mask)  # what one process does
    expected.out.square().sum().backward()
    errors = torch.stack(
        [
            (seen.out - expected.out[..., mine, :]).abs().max(),
            (shard.grad - whole.grad[..., mine, :]).abs().max(),
        ]
    )
    errors = errors.detach()
    dist.all_reduce(errors, dist.ReduceOp.MAX)

    cells = [torch.tensor(0) for _ in range(world)]
    dist.all_gather(cells, (mine + 1).sum())  # causal: position p sees p + 1 keys
    if rank == 0:
        print(
            f"largest error: {errors[0]:.1e} in out, {errors[1]:.1e} in the gradients"
        )
        print(f"causal cells of each rank: {', '.join(str(int(n)) for n in cells)}")
        print(f"most / least: {max(cells) / min(cells):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
