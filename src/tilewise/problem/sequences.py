"""Where the sequences of a call lie in its tensors: lengths that are data, and stay on the device.

Two layouts, in both of which query i and key j are positions inside their sequence:

* padded: tensors (b, h, s, d); of batch entry ``n`` the first ``seqlens_q[n]`` queries and ``seqlens_k[n]`` keys take
  part.
* packed: all sequences one behind the other, seen as (1, h, total, d); sequence ``n`` begins at ``cu_seqlens_q[n]`` and
  ends before ``cu_seqlens_q[n + 1]``; of these the first ``seqlens_q[n]`` take part, or all.

What takes no part is padding: it is not read; out and every gradient are 0 there, lse is -inf. The offset of a mask's
diagonal is each sequence's own (maths.md, eq. 26).
"""

from typing import NamedTuple

from tilewise.problem.options import OperandSpec


class Sequences(NamedTuple):
    """The layout, without the lengths themselves; the default is that of a call whose lengths are its shapes.

    Attributes:
        packed: how many sequences are packed; None where each batch entry is one.
        cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k: spec of the operand, or None.
        max_seqlen_q, max_seqlen_k: packed: sizes of the operands that have a query or a key dim; None where none has.
    """

    packed: int | None = None
    cu_seqlens_q: OperandSpec | None = None
    cu_seqlens_k: OperandSpec | None = None
    seqlens_q: OperandSpec | None = None
    seqlens_k: OperandSpec | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @property
    def are_data(self) -> bool:
        """Whether some length is known to the device alone."""
        return not (self.cu_seqlens_q is None and self.seqlens_q is None and self.seqlens_k is None)

    def slots(self, length: int, rows: int) -> int:
        """Tiles of ``rows`` that cover a length; packed, without knowing where in it sequences begin.

        Sequence n has the tiles from cu_seqlens[n] div rows + n on, which are enough: ceil((b - a) / rows) is at most
        b div rows - a div rows + 1.
        """
        return -(-length // rows) if self.packed is None else length // rows + self.packed + 1

    def __str__(self) -> str:
        if self.packed is not None:
            return f"{self.packed} packed sequences"
        return "padded sequences" if self.are_data else ""


DENSE = Sequences()
