"""Train a small Llama of Transformers with FSDP2 over all processes and each sequence cut over some: one loss.

Usage: ``torchrun --nproc-per-node 4 examples/train_llama_context_parallel.py --context-ranks 2 --steps 20``

The processes are a mesh of two dims, ("dp", "cp"). Ranks of a row hold the tokens of the same sequences, each its part,
and attend to all of them; rows have sequences of their own. Parameters are sharded over all ranks, since all of them
have a part of every gradient. On GPUs ranks speak NCCL, on CPUs gloo. The first rank then trains the same model on all
sequences by itself, and prints how far the curves are apart.
"""

import argparse
import os
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from tilewise.distributed import positions, shard
from tilewise.integrations import transformers_context_parallel

CONTEXT, BATCH, LAYOUT = 96, 4, "zigzag"  # tokens of a sequence; sequences of all rows
TOLERANCE = 1e-4  # nats, the largest difference of two losses in float32
SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}


def make_model(device):
    """Return a Llama of random weights, the same on every rank."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError as missing:
        raise SystemExit("This example trains a model of Transformers: pip install 'tilewise[transformers]'."
                         ) from missing
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="eager").to(device)


def read_batches(steps):
    """Yield sequences of bytes of the language reference, (BATCH, CONTEXT + 1), the same on every rank."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode("latin-1", "replace")))
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=draw)
        yield text[starts + torch.arange(CONTEXT + 1)]


def train(model, cut, places, group, options, device):
    """Return the loss of each step.

    Args:
        model: called with this rank's tokens.
        cut: returns this rank's part of (BATCH, CONTEXT) tokens.
        places: positions of its tokens in a sequence, (1, tokens).
        group: all ranks; None = one alone.
        options, device: of the command line.
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    ranks = 1 if group is None else dist.get_world_size(group)
    for batch in read_batches(options.steps):
        tokens, labels = (cut(one.to(device)) for one in (batch[:, :-1], batch[:, 1:]))
        logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
        # Divided by the tokens of all ranks, so that the ranks' losses add up.
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * CONTEXT)
        (loss * ranks).backward()  # FSDP averages gradients over the ranks, whose sum is wanted
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        losses.append(total)
    return torch.stack(losses).tolist()


def train_on_all_ranks(mesh, options, device):
    """Train with sharded parameters, sequences and tokens; return the loss of each step."""
    context, row = mesh["cp"], mesh["dp"].get_local_rank()
    transformers_context_parallel.register(context, LAYOUT)
    model, everyone = make_model(device), init_device_mesh(options.device, (mesh.size(),), mesh_dim_names=("all",))
    model.set_attn_implementation("tilewise_context_parallel")
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)

    def cut(batch):
        sequences = batch.chunk(mesh["dp"].size())[row]
        return shard(sequences, context, dim=1, layout=LAYOUT).contiguous()

    places = positions(context, length=CONTEXT, layout=LAYOUT, device=device)[None]
    return train(model, cut, places, everyone.get_group(), options, device)


def main(arguments=None):
    """Train over all ranks, then on the first one alone. Returns the exit code: 0 when the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--context-ranks", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if options.device == "cuda" else None)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rows = dist.get_world_size() // options.context_ranks
    mesh = init_device_mesh(options.device, (rows, options.context_ranks), mesh_dim_names=("dp", "cp"))
    losses = train_on_all_ranks(mesh, options, device)
    agree = True
    if dist.get_rank() == 0:
        whole = train(make_model(device), lambda batch: batch, torch.arange(CONTEXT, device=device)[None], None,
                      options, device)
        difference = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
        agree = difference <= TOLERANCE
        print(f"{rows} x {options.context_ranks} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}; one rank: "
              f"{whole[0]:.4f} -> {whole[-1]:.4f}")
        print(f"largest difference {difference:.1e}, allowed {TOLERANCE:.0e}: the losses "
              f"{'agree' if agree else 'DIFFER'}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
