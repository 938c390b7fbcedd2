"""Which pairs dropout keeps: a function of the seed and the pair's place, so that no pass and no tile has to store it.

The bits are those of Philox4x32-7 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011), a random
number generator without a state: it turns a counter and a key into four words, here the draws of eight pairs.
"""

import torch

from tilewise.masks import Span
from tilewise.problem.options import DRAW_SPAN, DRAWS

_ROUNDS = 7  # the fewest that passed the authors' batteries of tests
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def keep_tile(seed: torch.Tensor, batch_heads: int, queries: Span, keys: Span, dropout_p: float,
              first_row: int = 0) -> torch.Tensor:
    """Return which pairs of a tile are kept, (batch_heads, len(queries), len(keys)), bool (maths.md, eq. 19).

    Args:
        seed: (1,), int64; read on its device, without a wait for it.
        batch_heads: b · hq; head h of batch b is row b·hq + h of the result.
        queries, keys: positions of the tile; a pair's answer does not depend on the tile it is asked in.
        dropout_p: probability to drop a pair, a multiple of 2^-16.
        first_row: sequences in front of the first batch, times hq: what the rows' numbers start from.
    """
    first_query, first_key = (span.start // DRAW_SPAN for span in (queries, keys))
    spans_q, spans_k = (-(-span.stop // DRAW_SPAN) - span.start // DRAW_SPAN for span in (queries, keys))
    query, key = (torch.arange(first * per_span, (first + spans) * per_span, device=seed.device)
                  for first, spans, per_span in ((first_query, spans_q, 8), (first_key, spans_k, 4)))
    heads = torch.arange(first_row, first_row + batch_heads, device=seed.device)
    counter = (key, query[:, None], heads[:, None, None], torch.zeros_like(seed))
    words = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    # A half's number is 4·(bit 0 of the key) + 2·(bit 3 of the query) + (bit 3 of the key).
    draws = halves.view(batch_heads, spans_q, 8, spans_k, 4, 2, 2, 2).permute(0, 1, 6, 2, 3, 7, 4, 5)
    draws = draws.reshape(batch_heads, DRAW_SPAN * spans_q, DRAW_SPAN * spans_k)
    rows, columns = (slice(span.start % DRAW_SPAN, span.start % DRAW_SPAN + len(span)) for span in (queries, keys))
    return draws[:, rows, columns] >= int(dropout_p * DRAWS)


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return the four words of Philox4x32-7 for each counter: 32 bits each, in int64.

    The words of counter and key broadcast against one another; after four rounds each depends on all of them.
    """
    a, b, c, d = counter
    for step in range(_ROUNDS):
        key_a, key_b = ((word + step * weyl) & _WORD for word, weyl in zip(key, _KEY_STEPS, strict=True))
        # The product's 64 bits are right whatever its sign; the shift copies the sign, and the mask takes it off.
        from_a, from_c = a * _FACTORS[0], c * _FACTORS[1]
        a, b = ((from_c >> 32) & _WORD) ^ b ^ key_a, from_c & _WORD
        c, d = ((from_a >> 32) & _WORD) ^ d ^ key_b, from_a & _WORD
    return a, b, c, d
