"""Which pairs dropout keeps: a function of the seed and the pair's place, so that no pass and no tile has to store it.

The bits are those of Philox4x32-7 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011), a random
number generator without a state: it turns a counter and a key into four words, here the draws of eight neighbouring
keys.
"""

import torch

from tilewise.masks import Span
from tilewise.scores import DRAWS

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
    groups = torch.arange(keys.start // 8, -(-keys.stop // 8), device=seed.device)
    heads = torch.arange(first_row, first_row + batch_heads, device=seed.device)
    counter = (groups, torch.arange(queries.start, queries.stop, device=seed.device)[:, None], heads[:, None, None],
               torch.zeros_like(seed))
    words = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    by_key = torch.stack(halves, -1).flatten(-2)                            # [batch_heads, BLOCK, 8·len(groups)]
    first = keys.start % 8
    return by_key[..., first:first + len(keys)] >= int(dropout_p * DRAWS)


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
