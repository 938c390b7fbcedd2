"""Layers of the shapes of Llama's, in torch alone, whose attention is any function of q, k and v."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (b, h, s, d) each; k and v of hk heads


class Layer(torch.nn.Module):
    """A layer as Llama has it."""

    def __init__(self, hidden: int, heads: Sequence[int], d: int, mlp: int) -> None:
        super().__init__()
        hq, hk = heads
        self.d = d
        self.norm_attention, self.norm_mlp = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.q, self.k, self.v = (torch.nn.Linear(hidden, count * d, bias=False) for count in (hq, hk, hk))
        self.o = torch.nn.Linear(hq * d, hidden, bias=False)
        self.gate, self.up = (torch.nn.Linear(hidden, mlp, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return (b, s, hidden) of the same."""
        y = self.norm_attention(x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.d)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = (tensor * cos + rotated_half(tensor) * sin for tensor in (q, k))
        x = x + self.o(attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated_half(tensor: torch.Tensor) -> torch.Tensor:
    """Return the second half of the last dim, negated, and the first."""
    first, second = tensor.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Layers(torch.nn.Module):
    """Some layers and the rotary embedding that they share."""

    def __init__(self, count: int, hidden: int, heads: Sequence[int], d: int, mlp: int) -> None:
        super().__init__()
        self.d = d
        self.layers = torch.nn.ModuleList(Layer(hidden, heads, d, mlp) for _ in range(count))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return (b, s, hidden) of the same."""
        frequencies = 1e4 ** -(torch.arange(0, self.d, 2, device=x.device) / self.d)
        angles = (positions[..., None] * frequencies).repeat(1, 1, 2)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x
