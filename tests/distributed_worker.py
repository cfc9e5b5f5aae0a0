"""One rank of test_distributed.py:  python distributed_worker.py <rank> <world> <folder>

Runs every way of sharing a model between ranks, without and with a watch, and writes
the outputs, the gradients and the recording of this rank into the folder.
"""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import regard

LAYERS, PATIENCE = 4, 30  # seconds for the other rank to answer
GREEDY = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}


def make_llama():
    """Return a small Llama in float64, the same on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def draw_batch():
    """Return four sequences and their padding; ranks of data take two of them each."""
    tokens = torch.randint(3, 100, (4, 9), generator=torch.Generator().manual_seed(1))
    valid = torch.ones_like(tokens)
    valid[1, :3] = valid[2, :5] = 0
    return tokens, valid


class Block(nn.Module):
    """Causal attention with a residual."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], dtype=x.dtype
        )
        return F.tanh(x + self.attend(x, x, x, attn_mask=causal)[0])


class Stack(nn.Module):
    """Blocks that keep their numbers when a rank has only some of them."""

    def __init__(self, numbers=range(LAYERS)):
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(LAYERS)]
        for block in blocks:
            block.attend.in_proj_weight.data.mul_(4)
        self.layers = nn.ModuleDict({str(i): blocks[i] for i in numbers})
        self.double().eval()

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def draw_states():
    """Return what goes into the first block of a Stack."""
    rng = torch.Generator().manual_seed(2)
    return torch.randn(4, 7, 32, generator=rng, dtype=torch.float64)


def take_part(rank):
    """Return the tokens and the padding of one rank of data."""
    return [x[2 * rank : 2 * rank + 2] for x in draw_batch()]


def run_pass(model, tokens, valid):
    """Return the logits of one pass."""
    with torch.no_grad():
        return model(tokens, attention_mask=valid, use_cache=False).logits


def train(model, tokens, valid):
    """Return logits and gradients of one step."""
    model.zero_grad()
    logits = model(tokens, attention_mask=valid, use_cache=False).logits
    logits.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    return [logits.detach(), *grads]


def share_data(rank, world):
    """DDP: the same model on every rank, other data; with gradients."""
    model = DistributedDataParallel(make_llama())
    return model, lambda: train(model, *take_part(rank))


def share_weights(rank, world):
    """FSDP2: every rank holds a part of every weight."""
    model = make_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, lambda: [run_pass(model, *take_part(rank))]


def share_heads(rank, world):
    """Tensor parallel: every rank computes half of the heads."""
    model, mesh = make_llama(), init_device_mesh("cpu", (world,))
    own, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    plan = {own + name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {mlp + name: ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {own + "o_proj": RowwiseParallel(), mlp + "down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model, lambda: [run_pass(model, *draw_batch())]


def share_heads_in_generation(rank, world):
    """Tensor parallel: a generation."""
    model, _ = share_heads(rank, world)
    tokens, valid = draw_batch()
    return model, lambda: [model.generate(tokens, attention_mask=valid, **GREEDY)]


def share_layers(rank, world):
    """Pipeline: every rank has some of the layers; two microbatches."""
    size = LAYERS // world
    model = Stack(range(rank * size, rank * size + size))
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)

    def run():  # the first step also runs the layers once on zeros, to learn shapes
        with torch.no_grad():
            done = schedule.step(*([draw_states()] if rank == 0 else []))
        return [done] if rank == world - 1 else []

    return model, run


WAYS = {
    "ddp": share_data,
    "fsdp": share_weights,
    "tensor": share_heads,
    "generation": share_heads_in_generation,
    "pipeline": share_layers,
}


def try_way(name, rank, world, folder):
    """Run a model unwatched, watched and unwatched again; write everything down."""
    model, run = WAYS[name](rank, world)
    plain = run()
    with regard.watch(model) as seen:
        watched = run()
    after = run()
    torch.save(
        {"plain": plain, "watched": watched, "after": after},
        folder / f"{name}{rank}.pt",
    )
    seen.save(folder / f"{name}{rank}.regard")


def main():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),
    )
    for name in WAYS:
        try:
            try_way(name, rank, world, folder)
        except Exception:  # noqa: BLE001 (it is written down, and the test fails)
            (folder / f"{name}{rank}.error").write_text(traceback.format_exc())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
