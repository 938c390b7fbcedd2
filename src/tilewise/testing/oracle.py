"""The truth: dense attention by definition in float64, and the same in the inputs' own dtype as a yardstick.

Nothing is tiled, recomputed or rescaled here. The float64 gradients come from automatic differentiation of the
definition (the steps in the order of options.py), the yardstick's from the written-out formulas, so that each can be
tested against the other. Sequences whose lengths are data are gathered by an index into tensors of one sequence a
batch entry, and results put back; where that entry is longer than its sequence, pairs are hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tilewise.backends.base import Gradients
from tilewise.functions import pair_indices
from tilewise.masks import Mask
from tilewise.problem.options import NO_OPERANDS, NO_SETTINGS, Operands, ScoreSettings, checked_dropout_p
from tilewise.testing.rows import Rows

_FEW_SCORES = 2**20  # for which a pass over them a head dim costs little
_LOW_16, _LOW_32 = 0xFFFF, 0xFFFFFFFF


class Changes(NamedTuple):
    """What changes the scores of a call beside mask and scale; the default changes nothing.

    Attributes:
        operands: the tensors, shaped as problem/options.py says.
        settings: the numbers.
    """

    operands: Operands = NO_OPERANDS
    settings: ScoreSettings = NO_SETTINGS


NO_CHANGES = Changes()


class Results(NamedTuple):
    """Everything an attention call computes in both directions; None for what it lacks or was not asked for."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dalibi_slopes: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    max_logit: torch.Tensor | None = None

    @property
    def gradients(self) -> Gradients:
        """The results that are gradients."""
        return Gradients(self.dq, self.dk, self.dv, self.dbias, self.dalibi_slopes, self.dsinks)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float | None,
           changes: Changes = NO_CHANGES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in float64, from dense scores: O(sq x sk) memory.

    Args:
        q: (b, hq, sq, d), any float dtype; k: (b, hk, sk, d); v: (b, hk, sk, dv). All finite, but for padding.
        mask: who sees whom.
        scale: factor of the scores; None = 1/sqrt(d).
        changes: bias, slopes, boolean mask, sinks, softcap and dropout.
    """
    terms = _Terms.of(q, k, mask, scale, changes)
    q, k, v = terms.gathered(q.double(), "q"), terms.gathered(k.double(), "k"), terms.gathered(v.double(), "k")
    out, lse = _reduce(_visible_scores(_capped_scores(q, k, terms), terms), v, terms)
    return terms.put_back(out, "q"), terms.put_back(lse, "q", float("-inf"))


def max_logit(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float | None,
              changes: Changes = NO_CHANGES) -> torch.Tensor:
    """Return the largest visible score of each row in float64, (b, hq, sq); -inf where a query sees no key."""
    terms = _Terms.of(q, k, mask, scale, changes)
    q, k = terms.gathered(q.double(), "q"), terms.gathered(k.double(), "k")
    return terms.put_back(_largest(_visible_scores(_capped_scores(q, k, terms), terms), terms), "q", float("-inf"))


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
              mask: Mask, scale: float | None, changes: Changes = NO_CHANGES) -> Gradients:
    """Return every gradient in float64, given those of out and, unless None, of lse."""
    given = {name: operand for name in ("bias", "alibi_slopes", "sinks")
             if (operand := getattr(changes.operands, name)) is not None}
    with torch.enable_grad():
        leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, *given.values())]
        operands = changes.operands._replace(**dict(zip(given, leaves[3:], strict=True)))
        out, lse = attend(leaves[0], leaves[1], leaves[2], mask, scale, changes._replace(operands=operands))
        if dlse is None:
            dlse = torch.zeros_like(lse)
        dq, dk, dv, *others = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()))
    return Gradients(dq, dk, dv, **{f"d{name}": gradient for name, gradient in zip(given, others, strict=True)})


def yardsticks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
               mask: Mask, scale: float | None, changes: Changes = NO_CHANGES) -> tuple[Results, ...]:
    """Return :func:`dense` in eight orders of summation.

    One order is one throw of the rounding errors. In float32, where a kernel is no more precise than the yardstick,
    the largest error of a small tensor is decided by a few elements, and two equally good results were seen to
    differ there more than threefold; the worst of eight orders says what the dtype costs.
    """
    return tuple(_in_orders(range(8), (q, k, v, dout), dlse, _Terms.of(q, k, mask, scale, changes)))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
          mask: Mask, scale: float | None, changes: Changes = NO_CHANGES) -> Results:
    """Return all results from dense attention whose every step is rounded to the inputs' own dtype.

    How far this is from the oracle is what the dtype itself costs: the yardstick of tolerance.py.

    Args:
        q, k, v, dout, dlse: as in :func:`gradients`, in the dtype to be judged.
        mask, scale, changes: as in :func:`attend`.
    """
    return next(_in_orders((0,), (q, k, v, dout), dlse, _Terms.of(q, k, mask, scale, changes)))


def dropout_keep(seed: int | torch.Tensor, shape: tuple[int, int, int, int], dropout_p: float,
                 device: torch.device | str) -> torch.Tensor:
    """Return which pairs a dropout of this seed keeps: (b, hq, sq, sk), bool.

    Philox4x32-7 (Salmon et al., 2011) under the key (seed's low word, its high word) turns the counter
    (4·(j // 16) + j % 8 // 2, 8·(i // 16) + i % 8, b·hq + h, 0) into four words. Pair (i, j) takes half j // 8 % 2, 0
    the low one, of word 2·(j % 2) + i // 8 % 2; it is kept where that is at least dropout_p·2¹⁶, rounded as in
    problem/options.py.

    Args:
        seed: any 64-bit integer, or a tensor of one.
        shape: b, hq, sq, sk.
        dropout_p: probability that a pair is dropped.
        device: of the result.
    """
    b, hq, sq, sk = shape
    i, j = torch.arange(sq, device=device)[:, None], torch.arange(sk, device=device)
    places = (-(-sk // 16) * 4, -(-sq // 16) * 8, b * hq)
    key, query, head = torch.meshgrid(*(torch.arange(size, device=device) for size in places), indexing="ij")
    words = torch.stack(philox((key, query, head, torch.zeros_like(head)), int(seed)))
    words = words[2 * (j % 2) + i // 8 % 2, 4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8]  # [sq, sk, b·hq]
    draws = words >> (16 * (j // 8 % 2))[:, None] & 0xFFFF
    return (draws >= 2**16 * checked_dropout_p(dropout_p)).permute(2, 0, 1).reshape(shape)


def philox(counter: tuple[torch.Tensor, ...], seed: int, rounds: int = 7) -> tuple[torch.Tensor, ...]:
    """Return the four words that Philox4x32 makes of a counter of four, each below 2³² and held in int64."""
    c0, c1, c2, c3 = counter
    for done in range(rounds):
        key0, key1 = ((word + done * step) & _LOW_32
                      for word, step in ((seed, 0x9E3779B9), (seed >> 32, 0xBB67AE85)))
        high0, low0 = _wide_product(c0, 0xD2511F53)
        high1, low1 = _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
    return c0, c1, c2, c3


def visible_pairs(q: torch.Tensor, k: torch.Tensor, mask: Mask, operands: Operands) -> torch.Tensor:
    """Return which pairs take part, by position, length, document and boolean mask: (b|1, hq|1, sq, sk), bool.

    Where lengths are data, b is the number of sequences, and i and j are positions in a sequence.
    """
    rows = {"q": Rows.of("q", q, operands), "k": Rows.of("k", k, operands)}
    sizes = tuple(tensor.shape[2] if own is None else own.places.shape[1]
                  for tensor, own in zip((q, k), rows.values(), strict=True))

    def in_the_corner(queries: int, keys: int) -> torch.Tensor:
        whole = torch.zeros(sizes, dtype=torch.bool, device=q.device)
        whole[:queries, :keys] = mask.visible(queries, keys, q.device)
        return whole

    visible = _each(in_the_corner, rows, sizes)
    if operands.documents_q is not None and operands.documents_k is not None:
        ids = []
        for documents, own, tensor in zip((operands.documents_q, operands.documents_k), rows.values(), (q, k),
                                          strict=True):
            numbers = documents[:, :1].expand(len(tensor), -1, -1)
            ids.append(numbers if own is None else own.gather(numbers))
        visible = visible & (ids[0][..., :, None] == ids[1][..., None, :])
    return visible if operands.mask is None else visible & operands.mask


def _each(make: Callable[[int, int], torch.Tensor], rows: Mapping[str, Rows | None],
          lengths: tuple[int, ...]) -> torch.Tensor:
    """Stack what the two lengths of each sequence make, (b, 1, ...); once, (1, 1, ...), where lengths are no data."""
    queries, keys = rows["q"], rows["k"]
    if queries is None or keys is None:
        return make(lengths[0], lengths[1])[None, None]
    own = [make(*pair) for pair in zip(queries.lengths.tolist(), keys.lengths.tolist(), strict=True)]
    return torch.stack(own)[:, None] if own else make(0, 0)[None, None][:0]


def _wide_product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of a product, by halves of the factor: nothing reaches 2⁶³."""
    low, high = word * (factor & _LOW_16), word * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & _LOW_16) << 16) + low) & _LOW_32


class _Terms(NamedTuple):
    """The definition beside q, k and v, dense.

    Attributes:
        scale, settings, operands: of the call; boolean mask and documents are in ``visible`` already.
        visible: (b|1, hq|1, sq, sk), which pairs take part.
        blind: (b|1, hq|1, sq), which queries' softmax is over nothing at all.
        distance: |i + offset − j|, (b|1, 1, sq, sk); None without slopes.
        kept: keep/(1 − dropout_p), (b, hq, sq, sk), float64; None without dropout.
        rows: by "q" and "k", where lengths are data: how to gather b sequences; sq and sk are the longest's.
        places: batch, head, query and key index of the pairs, as the user's functions take them.
    """

    scale: float
    settings: ScoreSettings
    operands: Operands
    visible: torch.Tensor
    blind: torch.Tensor
    distance: torch.Tensor | None
    kept: torch.Tensor | None
    rows: Mapping[str, Rows | None]
    places: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float | None, changes: Changes) -> "_Terms":
        """Write a call's definition out."""
        operands, settings = changes
        rows = {"q": Rows.of("q", q, operands), "k": Rows.of("k", k, operands)}
        visible = visible_pairs(q, k, mask, operands)
        sq, sk = visible.shape[2:]
        sequences = q.shape[0] if rows["q"] is None else len(rows["q"].lengths)
        places = pair_indices((sequences, q.shape[1], sq, sk), q.device)
        if settings.mask_function is not None and settings.mask_function.torch is not None:
            visible = visible & settings.mask_function.torch(*places, *operands.mask_tensors)
        blind = ~visible.any(-1)
        if operands.sinks is not None:
            blind = torch.zeros_like(blind)
        distance = kept = None
        if operands.alibi_slopes is not None:
            standing = torch.arange(sq, device=q.device) + _each(lambda *lengths: torch.tensor(
                mask.offset(*lengths), device=q.device), rows, (sq, sk))[:, :, None]
            distance = (standing[..., None] - torch.arange(sk, device=q.device)).abs()
        if operands.seed is not None:
            keep = dropout_keep(operands.seed, (sequences, q.shape[1], sq, sk), settings.dropout_p, q.device)
            kept = keep.double() / (1.0 - checked_dropout_p(settings.dropout_p))
        scale = float(q.shape[3]) ** -0.5 if scale is None else scale
        return cls(scale, settings, operands, visible, blind, distance, kept, rows, places)

    def gathered(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """Return the sequences of a tensor, one a batch entry."""
        rows = self.rows[side]
        return tensor if rows is None else rows.gather(tensor)

    def put_back(self, tensor: torch.Tensor, side: str, elsewhere: float = 0.0) -> torch.Tensor:
        """Return a tensor of sequences as the call has it."""
        rows = self.rows[side]
        return tensor if rows is None else rows.put_back(tensor, elsewhere)

    def shuffled(self, queries: torch.Tensor, keys: torch.Tensor) -> "_Terms":
        """Put the positions in another order."""
        bias = _picked(self.operands.bias, queries, keys)
        batch, head, on_query, on_key = self.places
        return self._replace(
            operands=self.operands._replace(bias=bias), visible=self.visible[..., queries, :][..., keys],
            blind=self.blind[..., queries], distance=_picked(self.distance, queries, keys),
            kept=_picked(self.kept, queries, keys),
            places=(batch, head, on_query[:, :, queries], on_key[..., keys]))

    def changed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return what the user's function makes of the scores of pairs that take part; whatever elsewhere."""
        code = self.settings.score_function
        if code is None or code.torch is None:
            return scores
        scores = scores.masked_fill(~self.visible, 0.0)  # a function may turn what is hidden to NaN: of 0, no gradient
        changed = code.torch(scores, *self.places, *self.operands.score_tensors).to(scores.dtype)
        return changed.expand_as(scores).masked_fill(~self.visible, 0.0)

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        """Return values · keep/(1 − dropout_p)."""
        return values if self.kept is None else values * self.kept.to(values.dtype)

    def with_sinks(self, scores: torch.Tensor) -> torch.Tensor:
        """Put the sinks beside the scores, as a key more."""
        if self.operands.sinks is None:
            return scores
        column = self.operands.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1)


def _picked(tensor: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """Reorder the last two dims, where the tensor is not broadcast along them."""
    if tensor is None:
        return None
    if tensor.shape[-2] == len(queries):
        tensor = tensor[..., queries, :]
    return tensor[..., keys] if tensor.shape[-1] == len(keys) else tensor


def _in_orders(orders: Iterable[int], tensors: Sequence[torch.Tensor], dlse: torch.Tensor | None,
               terms: _Terms) -> Iterator[Results]:
    """Gather the sequences of q, k, v, dout and dlse, compute, and put results back."""
    q, k, v, dout = (terms.gathered(tensor.detach(), side) for tensor, side in zip(tensors, "qkkq", strict=True))
    dlse = None if dlse is None else terms.gathered(dlse, "q")
    for order in orders:
        got = _in_order(order, q, k, v, dout, dlse, terms)
        yield got._replace(
            out=terms.put_back(got.out, "q"), lse=terms.put_back(got.lse, "q", float("-inf")),
            dq=terms.put_back(got.dq, "q"), dk=terms.put_back(got.dk, "k"), dv=terms.put_back(got.dv, "k"),
            max_logit=None if got.max_logit is None else terms.put_back(got.max_logit, "q", float("-inf")))


def _in_order(order: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
              dlse: torch.Tensor | None, terms: _Terms) -> Results:
    """Return :func:`dense` in one order of summation.

    Order 0 sums as the tensors lie; another number seeds a shuffle of positions and head dims, which changes nothing
    but the rounding. Odd ones also add the scores up one head dim after another, as a tile kernel does (a BLAS may
    split the sum and round less; seen at d 256 in float32: a third); take delta off dout vᵀ before that is rounded,
    as a product does whose sum starts from −delta; and move delta and the saved lse by one unit in the last place, up
    or down at random (Monte Carlo arithmetic; Parker, Pierce, Eggert, 2000): in a row that sees one key the difference
    is 0, and by luck its rounding errors are too, in all the orders of a small sum; lse is the score itself there, and
    their difference 0 too, but not for a kernel that keeps scores in base 2 and rounds both on the way.
    """
    dlse = torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device) if dlse is None else dlse.to(q.dtype)
    # A backward pass in O(s) memory knows a row's softmax by its lse alone, kept in float32: the rounding of lse,
    # eps · |lse|, enters every probability, and so it does here. The order below is that of another kernel's.
    scores = _visible_scores(_capped_scores(q, k, terms), terms)
    saved_lse = torch.logsumexp(terms.with_sinks(scores.to(torch.promote_types(q.dtype, torch.float32))), -1)
    if order == 0:
        return _dense(q, k, v, (dout, dlse, saved_lse), terms, nudge=None)
    generator = torch.Generator().manual_seed(order)
    queries, keys, dims, value_dims = (torch.randperm(size, generator=generator).to(q.device)
                                       for size in (q.shape[2], k.shape[2], q.shape[3], v.shape[3]))
    nudge = None
    if order % 2:
        nudge, lse_nudge = 2 * torch.randint(2, (2, *q.shape[:3]), generator=generator).to(q.device) - 1
        saved_lse = saved_lse * (1.0 + lse_nudge.to(saved_lse.dtype) * torch.finfo(saved_lse.dtype).eps)
    got = _dense(
        q[:, :, queries][..., dims], k[:, :, keys][..., dims], v[:, :, keys][..., value_dims],
        (dout[:, :, queries][..., value_dims], dlse[:, :, queries], saved_lse[:, :, queries]),
        terms.shuffled(queries, keys), nudge)
    queries, keys, dims, value_dims = (shuffled.argsort() for shuffled in (queries, keys, dims, value_dims))
    return got._replace(
        out=got.out[:, :, queries][..., value_dims], lse=got.lse[:, :, queries],
        dq=got.dq[:, :, queries][..., dims], dk=got.dk[:, :, keys][..., dims], dv=got.dv[:, :, keys][..., value_dims],
        dbias=_picked(got.dbias, queries, keys),
        max_logit=None if got.max_logit is None else got.max_logit[:, :, queries])


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, incoming: tuple[torch.Tensor, ...],
           terms: _Terms, nudge: torch.Tensor | None) -> Results:
    """Apply the written-out formulas.

    dscores = probs ∘ (dropped(dout vᵀ) − delta) with delta = Σ dout ∘ out − dlse is the gradient behind softcap; the
    product's is dscores ∘ (1 − (y/softcap)²), with y the capped scores of problem/options.py.

    Args:
        q, k, v, terms: the problem.
        incoming: dout, dlse and the lse that the forward pass saved.
        nudge: None rounds dout vᵀ before delta is taken off; units in the last place, (b, hq, sq), are added to delta
            before it is taken off the unrounded product.
    """
    dout, dlse, saved_lse = incoming
    capped, softcap = _capped_scores(q, k, terms, in_turn=nudge is not None), terms.settings.softcap
    steepness = None if softcap is None else 1.0 - (capped / softcap) ** 2
    scores = _visible_scores(capped, terms)
    out, lse = _reduce(scores, v, terms)
    probs = torch.exp(scores.to(saved_lse.dtype) - saved_lse.unsqueeze(-1))
    probs = probs.masked_fill(terms.blind.unsqueeze(-1), 0.0).to(q.dtype)
    delta = (dout * out).sum(-1) - dlse
    values = _per_query_head(v, q)
    if nudge is None:
        difference = terms.dropped(dout @ values.mT) - delta.unsqueeze(-1)
    else:
        delta = delta.double() * (1.0 + nudge.double() * torch.finfo(q.dtype).eps)
        difference = (terms.dropped(dout.double() @ values.double().mT) - delta.unsqueeze(-1)).to(q.dtype)
    dscores = probs * difference
    dproduct = _through_function(dscores, capped, terms)
    dproduct = dproduct if steepness is None else dproduct * steepness
    dq = dproduct @ _per_query_head(k, q) * terms.scale
    dk = _per_key_head(dproduct.mT @ q * terms.scale, k)
    dv = _per_key_head(terms.dropped(probs).mT @ dout, v)
    return Results(out, lse, dq, dk, dv, *_operand_gradients(dscores, delta, saved_lse, terms),
                   _largest(scores, terms) if terms.settings.max_logit else None)


def _operand_gradients(dscores: torch.Tensor, delta: torch.Tensor, saved_lse: torch.Tensor,
                       terms: _Terms) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dbias and dalibi_slopes, dscores summed as far as they are broadcast, and dsinks."""
    bias, slopes, _, sinks, *_ = terms.operands
    dbias = dslopes = dsinks = None
    if bias is not None:
        dbias = dscores.sum_to_size(bias.shape)
    if slopes is not None and terms.distance is not None:
        dslopes = -(dscores * terms.distance.to(dscores.dtype)).sum((2, 3)).sum_to_size(slopes.shape)
    if sinks is not None:
        probs = torch.exp(sinks.to(saved_lse.dtype)[:, None] - saved_lse).to(dscores.dtype)
        dsinks = -(probs * delta).sum((0, 2)).to(dscores.dtype)
    return dbias, dslopes, dsinks


def _capped_scores(q: torch.Tensor, k: torch.Tensor, terms: _Terms, *, in_turn: bool = False) -> torch.Tensor:
    """Return scale · q kᵀ, bounded where the call has a softcap."""
    keys = _per_query_head(k, q)
    if in_turn:
        scores = (_product_in_turn(q, keys) * terms.scale).to(q.dtype)
    else:
        scores = q @ keys.mT * terms.scale
    softcap = terms.settings.softcap
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _visible_scores(scores: torch.Tensor, terms: _Terms) -> torch.Tensor:
    """Return f(scores) + bias − slope · distance with -inf where hidden; a blind row is 0 all along."""
    bias, slopes = terms.operands.bias, terms.operands.alibi_slopes
    scores = terms.changed(scores)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if slopes is not None and terms.distance is not None:
        scores = scores - slopes.to(scores.dtype)[..., None, None] * terms.distance.to(scores.dtype)
    # A blind row is computed from finite scores and overwritten later: the softmax of nothing has NaN gradients.
    return scores.masked_fill(~terms.visible, float("-inf")).masked_fill(terms.blind.unsqueeze(-1), 0.0)


def _through_function(dscores: torch.Tensor, capped: torch.Tensor, terms: _Terms) -> torch.Tensor:
    """Return the gradient of what the user's function is given, by automatic differentiation of that step alone."""
    if terms.settings.score_function is None:
        return dscores
    with torch.enable_grad():
        capped = capped.detach().requires_grad_()
        changed = terms.changed(capped)
    # Without a graph, the function does not look at its score.
    return torch.autograd.grad(changed, capped, dscores)[0] if changed.requires_grad else torch.zeros_like(dscores)


def _largest(scores: torch.Tensor, terms: _Terms) -> torch.Tensor:
    # One hidden key more, so that there is a largest of none.
    hidden = scores.masked_fill(~terms.visible, float("-inf"))
    return torch.nn.functional.pad(hidden, (0, 1), value=float("-inf")).amax(-1)


def _product_in_turn(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return q keysᵀ, added up in float32 one head dim after another; eight at a time where there are many scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(*q.shape[:3], keys.shape[2], dtype=wide, device=q.device)
    step = 1 if total.numel() <= _FEW_SCORES else 8
    for start in range(0, q.shape[3], step):
        part = slice(start, start + step)
        total += q[..., part].to(wide) @ keys[..., part].to(wide).mT
    return total


def _reduce(scores: torch.Tensor, v: torch.Tensor, terms: _Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out = dropped(softmax(scores)) v and lse = log Σ exp(scores), sinks counted; 0 and -inf in blind rows."""
    with_sinks = terms.with_sinks(scores)
    probs = torch.softmax(with_sinks, -1)[..., :scores.shape[-1]].masked_fill(terms.blind.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(with_sinks, -1).masked_fill(terms.blind, float("-inf"))
    return terms.dropped(probs) @ _per_query_head(v, scores), lse


def _per_query_head(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _per_key_head(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(like.shape[0], like.shape[1], gradient.shape[1] // like.shape[1], *like.shape[2:]).sum(2)
