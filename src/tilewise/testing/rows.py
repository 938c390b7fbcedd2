"""Which rows of storage the positions of each sequence lie in, as an index: to gather them, and to put them back."""

from typing import NamedTuple

import torch

from tilewise.problem.options import Operands


class Rows(NamedTuple):
    """Where the queries, or the keys, of all sequences lie.

    Attributes:
        storage: batch entries and positions of the tensors.
        lengths: (n,), int64: how many positions of each sequence take part.
        places: (n, longest), int64: entry · positions + position of each; one past the last where the
            sequence is shorter.
    """

    storage: tuple[int, int]
    lengths: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, side: str, tensor: torch.Tensor, operands: Operands) -> "Rows | None":
        """Read the lengths of a side, "q" or "k", of a call with such tensors; None where no length is data."""
        borders = getattr(operands, f"cu_seqlens_{side}")
        used = getattr(operands, f"seqlens_{side}")
        if borders is None and operands.seqlens_q is None and operands.seqlens_k is None:
            return None
        batch, positions = tensor.shape[0], tensor.shape[2]
        if borders is None:
            starts = torch.arange(batch, device=tensor.device) * positions
            lengths = torch.full_like(starts, positions)
        else:
            starts, lengths = borders[:-1].long(), borders.diff().long()
        lengths = lengths if used is None else torch.minimum(lengths, used.long())
        # A dim of queries or keys says how long the longest may be.
        dim = {"q": 2, "k": 3}[side]
        longest = max([int(lengths.max()) if len(lengths) else 0, *(
            operand.shape[dim] for operand in (operands.bias, operands.mask)
            if operand is not None and operand.shape[dim] != 1)])
        places = starts[:, None] + torch.arange(longest, device=tensor.device)
        rows = cls((batch, positions), lengths, places)
        return rows._replace(places=places.masked_fill(~rows.taking_part, batch * positions))

    @property
    def taking_part(self) -> torch.Tensor:
        """Which positions exist: (n, longest), bool."""
        return torch.arange(self.places.shape[1], device=self.places.device) < self.lengths[:, None]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (b, h, s, ...) as (n, h, longest, ...), with 0 where there is no position, whatever padding holds."""
        flat = tensor.transpose(1, 2).flatten(0, 1)
        return torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))[self.places].transpose(1, 2)

    def put_back(self, tensor: torch.Tensor, elsewhere: float) -> torch.Tensor:
        """Return (n, h, longest, ...) as (b, h, s, ...), with ``elsewhere`` in padding."""
        values = tensor.transpose(1, 2)
        (batch, positions), part = self.storage, self.taking_part
        flat = values.new_full((batch * positions, *values.shape[2:]), elsewhere)
        flat = flat.index_put((self.places[part],), values[part])
        return flat.reshape(batch, positions, *values.shape[2:]).transpose(1, 2)
