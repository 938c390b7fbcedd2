"""Train a small character model with each sequence cut over several processes, and beside it whole: one loss.

Usage: ``torchrun --nproc-per-node 2 examples/train_gpt_context_parallel.py --steps 50``

On GPUs ranks speak NCCL, on CPUs gloo. Each rank holds its tokens of every sequence, from the embedding to the loss;
attention alone speaks to the others. Its mask is causal, within a window, with sink tokens in sight, and each head has
a sink. The first rank then trains the same model on whole sequences by itself, and prints how far the curves are apart.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

import tilewise as tw
from tilewise.distributed import context_parallel_attention, positions, shard

CONTEXT, WIDTH, HEADS, KV_HEADS, LAYERS, BATCH = 96, 32, 4, 2, 2, 4
MASK = tw.causal("top_left") & tw.window(23, 0) & tw.sink_tokens(2)
LAYOUT = "zigzag"
TOLERANCE = 1e-4  # nats, the largest difference of two losses in float32

Attend = Callable[..., torch.Tensor]


class Block(nn.Module):
    """One layer: attention with a sink for each head, then a two-layer perceptron, each with a residual connection."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend, self.head_dim = attend, WIDTH // HEADS
        self.norm_in, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        """Map (b, s of this rank, width) to the same shape."""
        packed = self.qkv(self.norm_in(x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        x = x + self.project(self.attend(q, k, v, mask=MASK, sinks=self.sinks).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norm_out(x))


class TinyGPT(nn.Module):
    """Characters in, logits of the next character out; places of characters are those in the whole sequence."""

    def __init__(self, vocabulary: int, attend: Attend):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, characters, places):
        """Map (b, s of this rank) integers to (b, s of this rank, vocabulary) logits."""
        return self.head(self.blocks(self.tokens(characters) + self.places(places)))


def read_text():
    """Return the language reference as integers, and the number of different characters."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    return torch.tensor([index[character] for character in text]), len(characters)


def train(attend: Attend, cut: Callable[[torch.Tensor], torch.Tensor], places, group, options, device):
    """Return the loss of each step; ``cut`` takes this rank's tokens of a batch, ``group`` sums gradients."""
    text, vocabulary = read_text()
    torch.manual_seed(0)
    model = TinyGPT(vocabulary, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
        batch = text[starts + torch.arange(CONTEXT + 1)].to(device)
        logits = model(cut(batch[:, :-1]), places)
        # Divided by all tokens, not by this rank's: the ranks' losses add up, and so do their gradients.
        loss = F.cross_entropy(logits.flatten(0, 1), cut(batch[:, 1:]).flatten(), reduction="sum") / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            for tensor in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor, group=group)  # of the sinks' gradients too: each rank has its queries' part
        optimizer.step()
        losses.append(total)
    return torch.stack(losses).tolist()


def main(arguments=None):
    """Train over all ranks, then on the first one alone. Returns the exit code: 0 when the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", help="ring, all_gather or ulysses; default: the cost model chooses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if options.device == "cuda" else None)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))

    def attend(q, k, v, **others):
        return context_parallel_attention(q, k, v, mesh=mesh, layout=LAYOUT, schedule=options.schedule,
                                          lengths=(CONTEXT, CONTEXT), **others)

    places = positions(mesh, length=CONTEXT, layout=LAYOUT, device=device)
    losses = train(attend, lambda batch: shard(batch, mesh, dim=1, layout=LAYOUT), places, mesh.get_group(), options,
                   device)
    agree = True
    if dist.get_rank() == 0:
        whole = train(tw.attention, lambda batch: batch, torch.arange(CONTEXT, device=device), None, options, device)
        difference = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
        agree = difference <= TOLERANCE
        print(f"{mesh.size()} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}; one rank: {whole[0]:.4f} -> "
              f"{whole[-1]:.4f}")
        print(f"largest difference {difference:.1e}, allowed {TOLERANCE:.0e}: the losses "
              f"{'agree' if agree else 'DIFFER'}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
