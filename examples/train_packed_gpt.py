"""Train a Llama of Transformers on packed documents, with each way to attend from one seed: time, memory, one curve.

Usage: ``python examples/train_packed_gpt.py --size 125m --dtype bfloat16 --steps 40`` (needs tilewise[transformers])

The ways: torch's SDPA as Transformers calls it, which is given a mask of every pair; tilewise by
``attn_implementation="tilewise"``, which makes documents of the positions; tilewise called by a function of one's own,
which knows where documents begin; and flash-attn's packed function, where it is installed. The text is the language
reference that ships with Python, a document the beginning of a topic.
"""

import argparse
import statistics
import sys
import time
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy, pad

import tilewise as tw
from tilewise.integrations.transformers import register

SIZES = {
    "tiny": {"context": 128, "batch": 2, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    "125m": {"context": 4096, "batch": 4, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 32000},
}
# Largest difference between the curves, in nats: rounding differs from the first step on, and training amplifies it.
# Over 6 steps of the tiny size on a CPU it came to 5e-7 in float32 and 3e-4 in bfloat16. Documents that see one another
# are at 3e-2 then.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def attend_by_varlen(module, query, key, value, attention_mask, *, document_ends, scaling=None, **_):
    """Attend inside each document: rows are put end to end, (b·s, h, d), without a copy."""
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = tw.attention_varlen(q, k, v, cu_seqlens_q=document_ends, mask=tw.causal(), scale=scaling)
    return out.unflatten(0, (len(query), -1)), None


def attend_by_flash_attn(module, query, key, value, attention_mask, *, document_ends, scaling=None, **_):
    """Do the same by the real flash-attn."""
    from flash_attn import flash_attn_varlen_func

    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    longest = query.shape[2]
    out = flash_attn_varlen_func(q, k, v, document_ends, document_ends, longest, longest, softmax_scale=scaling,
                                 causal=True)
    return out.unflatten(0, (len(query), -1)), None


def ways(options):
    """Return the names by which Transformers knows the ways to attend."""
    import transformers

    register("tilewise")
    # Looked up at the call; the mask function makes nothing of what these ways do not read.
    transformers.AttentionInterface.register("varlen", lambda *given, **more: attend_by_varlen(*given, **more))
    transformers.AttentionInterface.register("fa2_varlen", attend_by_flash_attn)
    found = ["sdpa", "tilewise", "varlen"]
    try:
        import flash_attn  # noqa: F401

        found += ["fa2_varlen"] if options.dtype == "bfloat16" else []
    except ImportError:
        pass
    return found


def batches(size, options):
    """Yield tokens (b, s), positions inside each document, (b, s), and where documents end in all rows together."""
    documents = [torch.tensor(list(topics[name].encode("ascii", "replace"))) for name in sorted(topics)]
    draw = torch.Generator().manual_seed(options.seed)
    batch, context = size["batch"], size["context"]
    for _ in range(options.steps):
        rows, positions = [], []
        for _ in range(batch):
            row, places = [], []
            while sum(map(len, row)) < context:
                number, length = (int(torch.randint(low, high, (), generator=draw))
                                  for low, high in ((0, len(documents)), (context // 16, context // 2)))
                document = documents[number][:min(length, context - sum(map(len, row)))]
                row.append(document)
                places.append(torch.arange(len(document)))
            rows.append(torch.cat(row))
            positions.append(torch.cat(places))
        place = torch.stack(positions)
        starts = (place.flatten() == 0).nonzero().flatten().int()
        ends = pad(starts, (0, 1), value=batch * context)  # each start ends the document before
        yield tuple(tensor.to(options.device) for tensor in (torch.stack(rows), place, ends))


def train(way, size, options):
    """Return the loss and the seconds of each step, and the peak of memory in GiB."""
    import transformers

    torch.manual_seed(options.seed)
    shape = {name: value for name, value in size.items() if name not in ("context", "batch")}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=size["context"], tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=way).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for tokens, positions, ends in batches(size, options):
        start = time.perf_counter()
        # Ways of Transformers' own take no word that they do not know.
        known = {} if way in ("sdpa", "tilewise") else {"document_ends": ends}
        with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            logits = model(tokens, position_ids=positions, use_cache=False, **known).logits
        # The last token of a document does not tell the first of the next.
        wanted = torch.where(positions[:, 1:] == 0, -100, tokens[:, 1:])
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the step to end
        seconds.append(time.perf_counter() - start)
    return losses, seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main(arguments=None):
    """Train with each way, compare. Returns the exit code: 0 when the curves coincide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    size, curves = SIZES[options.size], {}
    for way in ways(options):
        curves[way], seconds, peak = train(way, size, options)
        step = statistics.median(seconds[len(seconds) // 3:])  # the first ones compile
        print(f"{way:<18} loss {curves[way][0]:.4f} -> {curves[way][-1]:.4f}, {step * 1e3:.1f} ms a step, "
              f"{size['batch'] * size['context'] / step:.0f} tokens/s, peak {peak:.2f} GiB")

    first, *others = curves.values()
    difference = max(abs(a - b) for other in others for a, b in zip(first, other, strict=True))
    coincide = difference <= TOLERANCE[options.dtype]
    print(f"largest difference {difference:.1e}, allowed {TOLERANCE[options.dtype]:.0e}: "
          f"the curves {'coincide' if coincide else 'DIFFER'}")
    return 0 if coincide else 1


if __name__ == "__main__":
    sys.exit(main())
