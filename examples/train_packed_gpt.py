"""Train a Llama of Transformers on packed documents, a copy with each way to attend: step time, memory, one curve.

Usage: ``python examples/train_packed_gpt.py --size 125m --dtype bfloat16 --steps 40`` (needs tilewise[transformers])

``sdpa`` and ``tilewise`` are what a model is told by ``attn_implementation=``: torch's operator, to which Transformers
gives a mask of every pair, and tilewise, which makes documents of the positions. The other ways are functions below.
All copies begin with the same weights and take turns at each batch. The text is the language reference that ships with
Python, a document some stretch of it. ``--documents 1`` makes each row one document: plain causal attention.
"""

import argparse
import copy
import math
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pydoc_data.topics import topics

import torch
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

import tilewise as tw
from tilewise.integrations.transformers import register

SIZES = {
    "tiny": {"context": 128, "batch": 2, "documents": 4, "rate": 1e-3, "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    "125m": {"context": 4096, "batch": 4, "documents": 16, "rate": 3e-4, "hidden_size": 768, "intermediate_size": 2560,
             "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 32000},
}
CONTROL = "torch_reversed"
# Largest difference between the curves, in nats, that is allowed anyhow. Rounding differs from the first step on, and
# training amplifies it: where that takes torch's operator with its keys reversed further, twice as far is allowed.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass
class Batch:
    """Packed rows, and what ways to attend make of them: once, at the first layer that asks.

    Attributes:
        tokens: (b, s) integers.
        positions: (b, s): of each token inside its document.
        ends: (documents + 1,), int32: 0, then where each document ends in all rows put end to end.
        longest: document's length.
        dtype: in which attention computes.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    longest: int
    dtype: torch.dtype

    @property
    def is_whole(self):
        """Whether each row is one document."""
        return len(self.ends) == len(self.tokens) + 1

    @cached_property
    def mask(self):
        """Who sees whom, for tilewise."""
        return tw.causal() if self.is_whole else tw.causal() & tw.documents((self.positions == 0).cumsum(1))

    @cached_property
    def dense_mask(self):
        """The same as torch adds it to the scores: (b, 1, s, s), 0 or -inf."""
        number = (self.positions == 0).cumsum(1)
        visible = (number[:, :, None] == number[:, None]).tril()
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, -torch.inf)[:, None]

    @property
    def wanted(self):
        """The token after each; the last of a document does not tell the first of the next."""
        return torch.where(self.positions == 0, -100, self.tokens).roll(-1, 1)


# The ways map q (b, hq, s, d), k and v (b, hk, s, d) to (b, s, hq, d), as Transformers wants it.
def by_attention(batch, q, k, v, scale):
    """tilewise, told of documents by an id a token."""
    return tw.attention(q, k, v, mask=batch.mask, scale=scale).transpose(1, 2)


def by_varlen(batch, q, k, v, scale):
    """tilewise, told where documents end."""
    out = tw.attention_varlen(*end_to_end(q, k, v), cu_seqlens_q=batch.ends, mask=tw.causal(), scale=scale)
    return out.unflatten(0, (len(q), -1))


def by_torch(batch, q, k, v, scale):
    """SDPA of torch, with a mask of every pair where a row has several documents."""
    mask = None if batch.is_whole else batch.dense_mask
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=batch.is_whole, scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def by_torch_reversed(batch, q, k, v, scale):
    """SDPA of torch once more, keys from last to first: the same terms in another order, hence other rounding."""
    return F.scaled_dot_product_attention(q, k.flip(2), v.flip(2), batch.dense_mask.flip(3), scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def by_torch_varlen(batch, q, k, v, scale):
    """FlashAttention-2 on packed sequences, as torch has it; versions differ in how they are told of fewer kv heads."""
    from torch.nn.attention.varlen import varlen_attn

    k, v = (tensor[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for tensor in (k, v))
    out = varlen_attn(*end_to_end(q, k, v), batch.ends, batch.ends, batch.longest, batch.longest, scale=scale,
                      window_size=(-1, 0))
    return out.unflatten(0, (len(q), -1))


def by_flash_attn(batch, q, k, v, scale):
    """FlashAttention-2 on packed sequences, of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    out = flash_attn_varlen_func(*end_to_end(q, k, v), batch.ends, batch.ends, batch.longest, batch.longest,
                                 softmax_scale=scale, causal=True)
    return out.unflatten(0, (len(q), -1))


def end_to_end(*tensors):
    """Put the rows of (b, h, s, d) tensors end to end, (b·s, h, d): views here, where heads of a token lie together."""
    return [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]


FUNCTIONS = {"tw_attention": by_attention, "tw_varlen": by_varlen, "torch_sdpa": by_torch, CONTROL: by_torch_reversed,
             "torch_varlen": by_torch_varlen, "fa2_varlen": by_flash_attn}


def attend(module, query, key, value, attention_mask, *, function, scaling=None, **_):
    """Call a way's function, as an attention function of Transformers; rotary embeddings leave q and k in float32."""
    return function(query.to(value.dtype), key.to(value.dtype), value, scaling), None


def ways(options):
    """Enter the ways into Transformers. Returns the names of those that can run here, torch's first."""
    try:
        import transformers
    except ImportError:
        sys.exit("this example trains a model of Transformers, which is not installed: pip install "
                 "'tilewise[transformers]'")

    register("tilewise")
    transformers.AttentionInterface.register("function", attend)  # without a mask function: no masks are made for it
    missing = set()
    if torch.device(options.device).type != "cuda" or options.dtype != "bfloat16":
        missing |= {"torch_varlen", "fa2_varlen"}
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        missing.add("fa2_varlen")
    return [way for way in ("sdpa", "tilewise", *FUNCTIONS) if way not in missing]


def document_lengths(context, documents, draw):
    """Draw the lengths of a row's documents: log-normal, so that most are short and a few are long."""
    lengths = [context] if documents == 1 else []
    while (rest := context - sum(lengths)) > 0:
        spread = torch.randn((), generator=draw) - 0.5  # the mean of its exponential is 1
        lengths.append(min(int(context / documents * spread.exp()) + 1, rest))
    return lengths


def batches(size, options):
    """Yield as many batches as there are steps, the same for the same seed."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")))
    draw = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        lengths = [length for _ in range(size["batch"])
                   for length in document_lengths(size["context"], size["documents"], draw)]
        starts = torch.randint(len(text) - size["context"], (len(lengths),), generator=draw).tolist()
        tokens = torch.cat([text[start:start + length] for start, length in zip(starts, lengths, strict=True)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        shape = (size["batch"], size["context"])
        yield Batch(tokens.view(shape).to(options.device), positions.view(shape).to(options.device),
                    ends.to(options.device), max(lengths), getattr(torch, options.dtype))


@dataclass
class Run:
    """A model that attends one way, and what was measured of each of its steps.

    Attributes:
        gib: most memory that a step held above what lies between steps, weights and optimizer of all runs; empty on
            a CPU, whose memory torch does not count.
    """

    way: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gib: list[float] = field(default_factory=list)

    def step(self, batch):
        """Train on one batch."""
        kind = batch.tokens.device.type
        if kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        batch = replace(batch)  # without the masks that another way made
        more = {"function": partial(FUNCTIONS[self.way], batch)} if self.way in FUNCTIONS else {}
        with torch.autocast(kind, torch.bfloat16, enabled=batch.dtype is torch.bfloat16):
            logits = self.model(batch.tokens, position_ids=batch.positions, use_cache=False, **more).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.wanted.flatten(), ignore_index=-100)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the step to end
        self.seconds.append(time.perf_counter() - start)
        if kind == "cuda":
            self.gib.append((torch.cuda.max_memory_allocated() - before) / 2**30)

    def measured(self):
        """Return the median of the milliseconds a step and the peak, in GiB; the first third compiles and warms up.

        The peak is None where memory was not counted.
        """
        first = len(self.seconds) // 3
        return statistics.median(self.seconds[first:]) * 1e3, max(self.gib[first:], default=None)


def make_runs(names, size, options):
    """Make a run for each way, all with the same weights."""
    import transformers

    torch.manual_seed(options.seed)
    shape = {name: value for name, value in size.items() if name not in ("context", "batch", "documents", "rate")}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=size["context"], tie_word_embeddings=True)
    first = transformers.AutoModelForCausalLM.from_config(config).to(options.device)
    runs = []
    for way in names:
        model = copy.deepcopy(first)
        model.set_attn_implementation("function" if way in FUNCTIONS else way)
        runs.append(Run(way, model, torch.optim.AdamW(model.parameters(), lr=size["rate"], fused=True)))
    return runs


def difference(a, b):
    """Return the largest difference between the curves of two runs; infinity where a loss is not finite."""
    if not all(map(math.isfinite, a.losses + b.losses)):
        return math.inf
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def main(arguments=None):
    """Train with each way, compare. Returns the exit code: 0 when the curves coincide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--documents", type=int, help="how many a row, about; default: 4 or, with 125m, 16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    size = SIZES[options.size] | ({"documents": options.documents} if options.documents else {})
    runs = make_runs(ways(options), size, options)
    for batch in batches(size, options):
        for run in runs:
            run.step(batch)

    first, control = runs[0], next(run for run in runs if run.way == CONTROL)
    bound = max(TOLERANCE[options.dtype], 2 * difference(first, control))
    for run in runs:
        ms, gib = run.measured()
        parts = [f"{run.way:<14} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}", f"{ms:.1f} ms a step",
                 f"{size['batch'] * size['context'] / ms * 1e3:.0f} tokens/s"]
        parts += [] if gib is None else [f"{gib:.2f} GiB above weights and optimizer"]
        parts += [] if run is first else [f"{difference(first, run):.1e} from {first.way}"]
        print(", ".join(parts))
    largest = max(difference(first, run) for run in runs if run is not control)
    coincide = math.isfinite(largest) and largest <= bound
    print(f"largest difference {largest:.1e}, allowed {bound:.0e}: the curves {'coincide' if coincide else 'DIFFER'}")
    return 0 if coincide else 1


if __name__ == "__main__":
    sys.exit(main())
