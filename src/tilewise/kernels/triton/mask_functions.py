"""Masks of the library's own as mask functions: what tilewise.mask_functions hands to a kernel, which inlines it.

Each reads two tensors, dense: a ``table`` (b|1, h|1, …), and ``numbers``, int64: the elements from one batch entry of
the table to the next and from one head to the next, 0 where all share one, and then what else the function is made
with. Where a number meets positions it is taken as 32 bits: positions that have 64 stay so.
"""

import triton
import triton.language as tl


@triton.jit
def table_of(batch, head, table, numbers):
    """Point to the part of a table that belongs to a batch entry and head."""
    return table + (batch * tl.load(numbers) + head * tl.load(numbers + 1))


@triton.jit
def intervals(batch, head, q_idx, k_idx, table, numbers):
    """Hide the queries of two intervals of each key. table: (b|1, h|1, sk, 4), int32: start, stop, start, stop."""
    of_key = table_of(batch, head, table, numbers) + k_idx * 4
    first = (q_idx >= tl.load(of_key)) & (q_idx < tl.load(of_key + 1))
    second = (q_idx >= tl.load(of_key + 2)) & (q_idx < tl.load(of_key + 3))
    return (first | second) == 0


@triton.jit
def tree(batch, head, q_idx, k_idx, table, numbers):
    """Show the keys from the root down to the query. table: (b|1, 1, s, 2), int32: a token's rank, its subtree's end.

    Ranks are in the order of a walk that goes down first: below a token are those with a rank from its own to the end.
    """
    of_entry = table_of(batch, head, table, numbers)
    rank = tl.load(of_entry + q_idx * 2)
    return (rank >= tl.load(of_entry + k_idx * 2)) & (rank < tl.load(of_entry + k_idx * 2 + 1))


@triton.jit
def blocks(batch, head, q_idx, k_idx, table, numbers):
    """Show blocks of pairs. table: (b|1, h|1, blocks of queries, of keys), uint8; numbers: blocks of keys, sides."""
    row = q_idx // tl.load(numbers + 3).to(tl.int32)
    column = k_idx // tl.load(numbers + 4).to(tl.int32)
    return tl.load(table_of(batch, head, table, numbers) + row * tl.load(numbers + 2) + column) != 0


@triton.jit
def prefixes(batch, head, q_idx, k_idx, table, numbers):
    """Mask the future but for a prefix of each batch entry. table: (b|1, 1), int32; numbers: the diagonal's offset."""
    is_past = k_idx <= q_idx + tl.load(numbers + 2).to(tl.int32)
    return is_past | (k_idx < tl.load(table_of(batch, head, table, numbers)))
