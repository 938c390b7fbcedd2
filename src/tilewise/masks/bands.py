"""Bands of visible pairs with lengths put in, and their ranges of tiles: what kernels read of a mask."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of indices ``start <= i < stop``; empty when ``start >= stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Band:
    """A mask with its lengths put in: query i sees key j when ``lower <= j - i <= upper``, exceptions aside.

    ``None`` leaves a side unbounded, or an exception out. ``offset`` matters to chunks alone: query i stands on key
    i + offset. The reference's tile ranges come from here; kernels compute
    the same ones (kernels/triton/mask_ranges.py, kernels/hopper/mask_ranges.py), and tests hold them to these.
    """

    lower: int | None
    upper: int | None
    prefix: int | None = None
    sink_tokens: int | None = None
    chunk: int | None = None
    offset: int = 0

    def keys_of(self, queries: Span, key_length: int) -> Span:
        """Keys from the first to the last that a query of the span sees (maths.md, eq. 13)."""
        spans = self.key_spans(queries, key_length)
        return Span(spans[0].start, spans[-1].stop)

    def key_spans(self, queries: Span, key_length: int) -> tuple[Span, ...]:
        """Keys that at least one query of the span sees: one span, or that of the sink tokens and another (eq. 24)."""
        if queries.start >= queries.stop:
            return (Span(0, 0),)
        first, last = queries.start, queries.stop - 1
        start = 0 if self.lower is None else max(0, first + self.lower)
        stop = min(key_length, self._stop(last, key_length))
        chunk_start = max(0, self._chunk_start(first + self.offset))
        start = max(start, chunk_start)
        sinks = Span(chunk_start, min(self.sink_tokens or 0, stop))
        if not len(sinks):
            return (Span(start, stop),)
        if start <= sinks.stop:
            return (Span(chunk_start, stop),)
        return (sinks, Span(start, stop)) if start < stop else (sinks,)

    def shared_keys_of(self, queries: Span, key_length: int) -> Span:
        """Keys that every query of the span sees, sink tokens apart from the rest left out (maths.md, eq. 14)."""
        if queries.start >= queries.stop:
            return Span(0, 0)
        first, last = queries.start, queries.stop - 1
        start = 0 if self.lower is None or last + self.lower <= (self.sink_tokens or 0) else last + self.lower
        start = max(start, self._chunk_start(last + self.offset), 0)
        return Span(start, min(key_length, self._stop(first, key_length)))

    def queries_of(self, keys: Span, query_length: int) -> Span:
        """Queries from the first to the last that sees a key of the span (maths.md, eq. 15 and 25)."""
        if keys.start >= keys.stop:
            return Span(0, 0)
        first, last = keys.start, keys.stop - 1
        start = 0 if self.upper is None or first < (self.prefix or 0) else max(0, first - self.upper)
        stop = query_length if self.lower is None else last + 1 - self.lower
        if self.chunk is not None:
            start = max(start, self._chunk_start(first) - self.offset)
            stop = min(stop, self._chunk_start(last) + self.chunk - self.offset)
        if first < (self.sink_tokens or 0):
            last_sink = min(last, (self.sink_tokens or 0) - 1)
            stop = max(stop, query_length if self.chunk is None
                       else self._chunk_start(last_sink) + self.chunk - self.offset)
        return Span(start, min(query_length, stop))

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which pairs take part, bool, for positions of queries and keys that broadcast (maths.md, eq. 12)."""
        visible = torch.ones_like(queries - keys, dtype=torch.bool)
        if self.lower is not None:
            visible &= (keys - queries >= self.lower) | (keys < (self.sink_tokens or 0))
        if self.upper is not None:
            visible &= (keys - queries <= self.upper) | (keys < (self.prefix or 0))
        if self.chunk is not None:
            visible &= (queries + self.offset) // self.chunk == keys // self.chunk
        return visible

    def visible_pairs(self, query_length: int, key_length: int) -> int:
        """Number of (query, key) pairs that are visible; what a FLOP count multiplies.

        Takes the same time for any lengths where the band has no exceptions, else a time linear in the queries.
        """
        if self.prefix is None and self.sink_tokens is None and self.chunk is None:
            stops = query_length * key_length if self.upper is None else _sum_clamped(
                self.upper + 1, query_length, key_length)
            starts = 0 if self.lower is None else _sum_clamped(self.lower, query_length, key_length)
            return max(0, stops - starts)
        return sum(len(span) for i in range(query_length) for span in self.key_spans(Span(i, i + 1), key_length))

    def _stop(self, query: int, key_length: int) -> int:
        """Where the keys of a query stop, if there are enough of them."""
        stop = key_length if self.upper is None else max(query + self.upper + 1, self.prefix or 0)
        if self.chunk is None:
            return stop
        return min(stop, self._chunk_start(query + self.offset) + self.chunk)

    def _chunk_start(self, position: int) -> int:
        return 0 if self.chunk is None else position // self.chunk * self.chunk


def _sum_clamped(first: int, count: int, most: int) -> int:
    """Return the sum of ``min(max(first + i, 0), most)`` for the first ``count`` integers i from 0 on."""
    below = min(count, max(0, -first))
    inside = min(count, max(below, most - first)) - below
    return inside * (first + below) + inside * (inside - 1) // 2 + (count - below - inside) * most
