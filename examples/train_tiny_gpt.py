"""Train a small character model twice from one seed, with tilewise and with torch's attention: the curves coincide.

Usage: ``python examples/train_tiny_gpt.py --steps 200 --out curves.svg``

The text is the language reference that ships with Python (what ``help("CLASSES")`` prints). tilewise runs its own
kernels here, on a CPU the tiled reference: left to choose, it would hand so plain a call to torch's operator there.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

import tilewise as tw

CONTEXT, WIDTH, HEADS, KV_HEADS, LAYERS, BATCH = 128, 64, 4, 2, 2, 8
# Largest difference between the curves, in nats. Rounding differs from the first step on and training amplifies it:
# over 200 steps on a CPU to 5e-7 in float32 and 1e-3 in bfloat16. A k without a gradient is at 5e-2 after 20 steps.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_by_tilewise(q, k, v):
    """Causal attention; q has more heads than k and v."""
    return tw.attention(q, k, v, mask=tw.causal())


def attend_by_torch(q, k, v):
    """The same through torch's own operator."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    """One layer: attention, then a two-layer perceptron, each with a residual connection."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend, self.head_dim = attend, WIDTH // HEADS
        self.norm_in, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        """Map (b, s, width) to the same shape."""
        packed = self.qkv(self.norm_in(x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        # Views of one packed tensor: tilewise takes any strides, nothing is copied.
        q, k, v = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        x = x + self.project(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norm_out(x))


class TinyGPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, attend: Attend):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, characters):
        """Map (b, s) integers to (b, s, vocabulary) logits."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.blocks(self.tokens(characters) + self.positions(positions)))


def read_text():
    """Return the text as integers, and the number of different characters."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    return torch.tensor([index[character] for character in text]), len(characters)


def train(attend: Attend, text, vocabulary, options):
    """Return the loss of each step; everything but ``attend`` is the same in every run."""
    torch.manual_seed(options.seed)
    model = TinyGPT(vocabulary, attend).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(options.seed)
    offsets = torch.arange(CONTEXT + 1)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
        batch = text[starts + offsets].to(options.device)
        with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def plot(curves, path):
    """Draw both curves, one thin on one wide so that neither hides the other."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for (name, losses), style in zip(curves.items(), ({"lw": 5, "alpha": 0.35}, {"lw": 1.2}), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axes.set(xlabel="training step", ylabel="loss (nats per character)", title="One model, one seed, two attentions")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main(arguments=None):
    """Train twice, compare, plot. Returns the exit code: 0 when the curves coincide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="tilewise's backend; default: triton on a GPU, else reference")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="tiny_gpt_loss.svg", help="where the plot goes (SVG)")
    options = parser.parse_args(arguments)

    text, vocabulary = read_text()
    curves = {}
    backend = options.backend or ("reference" if options.device == "cpu" else "triton")
    for name, attend in (("torch", attend_by_torch), ("tilewise", attend_by_tilewise)):
        with tw.use_backend(backend):
            curves[name] = train(attend, text, vocabulary, options)
        print(f"{name:<9} loss {curves[name][0]:.4f} -> {curves[name][-1]:.4f}")
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        plot(curves, options.out)

    difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    coincide = all(math.isfinite(loss) for curve in curves.values() for loss in curve)
    coincide = coincide and difference <= TOLERANCE[options.dtype]
    print(f"largest difference {difference:.1e}, allowed {TOLERANCE[options.dtype]:.0e}: "
          f"the curves {'coincide' if coincide else 'DIFFER'}")
    print(f"plot: {options.out}" if has_plot else
          "no plot: matplotlib is not installed; pip install 'tilewise[bench]' brings it")
    return 0 if coincide else 1


if __name__ == "__main__":
    sys.exit(main())
