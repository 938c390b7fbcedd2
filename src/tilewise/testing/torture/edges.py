"""Lengths, heads and masks at the ends of what there is."""

from collections.abc import Sequence
from typing import Any

import torch

from tilewise.masks import Mask, causal
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, make_operands
from tilewise.testing.torture import issues
from tilewise.testing.torture.checks import Check, Run, held_to_budget
from tilewise.testing.torture.trial import Got, Trial, Wrong, demand_finite, demand_zero

_ALL, _TOP, _BOTTOM = Mask(), causal("top_left"), causal("bottom_right")
_NAN = float("nan")


def _check(name: str, about: str, run: Run | None = None, *, issue: str | None = None, **fields: Any) -> Check:
    return Check(name, "edges", about, Case(name, **fields), run or held_to_budget(), issue)


def _rows_set(tensor: torch.Tensor, rows: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy in which these positions hold the value."""
    changed = tensor.clone()
    changed[:, :, rows] = value
    return changed


def _blind(case: Case, device: torch.device) -> torch.Tensor:
    return ~case.mask.visible(case.sq, case.sk, device).any(-1)


def _zero_where_blind(case: Case, inputs: Inputs, got: Got) -> None:
    """Demand 0 of out and dq in rows that see no key."""
    blind = _blind(case, inputs.q.device)
    if case.mask_tensor:
        mask = make_operands(case, inputs.q.dtype, inputs.q.device).mask
        blind = blind if mask is None else ~mask[0, 0].any(-1)
    demand_zero([(name, tensor[:, :, blind]) for name, tensor in got.items() if name in ("out", "dq")],
                "in a row that sees no key")


def _with_unseen_nan(trial: Trial, case: Case) -> None:
    """Put NaN into keys and values that no query sees by its position."""
    clean = trial.inputs(case)
    unseen = ~case.mask.visible(case.sq, case.sk, trial.device).any(0)
    k, v = (_rows_set(tensor, unseen, _NAN) for tensor in (clean.k, clean.v))
    trial.judge(case, clean, trial.results(case, clean._replace(k=k, v=v)))


def _with_blind_nan(trial: Trial, case: Case) -> None:
    """Put NaN into queries, and their part of dout, that see no key by their position."""
    clean, blind = trial.inputs(case), _blind(case, trial.device)
    q, dout = (_rows_set(tensor, blind, _NAN) for tensor in (clean.q, clean.dout))
    trial.judge(case, clean, trial.results(case, clean._replace(q=q, dout=dout)))


def _hidden_keys(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a boolean mask that hides every seventh key from all, and which these are."""
    hidden = torch.arange(case.sk, device=device) % 7 == 2
    return (~hidden).expand(1, 1, case.sq, -1), hidden


def _masked_keys_hold(value: float, trial: Trial, case: Case) -> None:
    clean = trial.inputs(case)
    mask, hidden = _hidden_keys(case, trial.device)
    planted = clean._replace(k=_rows_set(clean.k, hidden, value))
    trial.judge(case, clean, trial.results(case, planted, backward=False, mask=mask), mask=mask)


def _masked_keys_are_large(trial: Trial, case: Case) -> None:
    clean = trial.inputs(case)
    mask, hidden = _hidden_keys(case, trial.device)
    k, v = (_rows_set(tensor, hidden, 1e4) for tensor in (clean.k, clean.v))
    trial.judge(case, clean, trial.results(case, clean._replace(k=k, v=v), mask=mask), mask=mask)


def _nan_is_shown(trial: Trial, case: Case) -> None:
    """Demand NaN of every row that sees a key of NaN: a maximum or a comparison may swallow it."""
    inputs = trial.inputs(case)
    seeing = case.mask.visible(case.sq, case.sk, trial.device)[:, -1]
    k = inputs.k.clone()
    k[:, :, -1] = _NAN
    rows = trial.results(case, inputs._replace(k=k), backward=False).out[:, :, seeing]
    if not rows.isnan().all():
        raise Wrong(f"out: {int((~rows.isnan()).sum())} of {rows.numel()} elements are a number in rows that see a key "
                    "of NaN")


def _infinity_stays_in_its_row(trial: Trial, case: Case) -> None:
    """Let one query be infinite: its row is lost, and no other row of its tile is."""
    clean = trial.inputs(case)
    q = clean.q.clone()
    q[:, :, case.sq // 2] = float("inf")
    others = torch.arange(case.sq, device=trial.device) != case.sq // 2
    out = trial.results(case, clean._replace(q=q), backward=False).out
    demand_finite([("out", out[:, :, others])])


def _square(name: str, about: str, length: int, *, issue: str | None = None) -> tuple[Check, Check]:
    """Return the check of a length without a mask, and under a causal one."""
    return (_check(name, about, sq=length, sk=length, issue=issue),
            _check(f"{name}_causal", f"{about}, causal", sq=length, sk=length, mask=causal(), issue=issue))


def _packed(name: str, about: str, lengths: Sequence[int], lengths_k: Sequence[int] | None = None, *,
            issue: str | None = None, mask: Mask = _ALL, d: int = 64) -> Check:
    keys = tuple(lengths if lengths_k is None else lengths_k)
    return _check(name, about, b=len(lengths), sq=max(lengths), sk=max(keys), lengths_q=tuple(lengths), lengths_k=keys,
                  packed="tight", d=d, dv=d, mask=mask, issue=issue)


def _masked_nan(value: float) -> Run:
    return lambda trial, case: _masked_keys_hold(value, trial, case)


_LENGTHS = (
    _check("one_query", "one query of 67 keys", b=2, sq=1, sk=67, issue=issues.CUDNN_ONE_QUERY),
    _check("one_key", "67 queries of one key: dq and dk are 0", b=2, sq=67, sk=1),
    _check("one_query_one_key", "one query of one key", b=2, sq=1, sk=1),
    *_square("length_113", "a length that is no multiple of 16", 113),
    *_square("length_192", "64 past whole tiles of 128", 192, issue=issues.PAST_WHOLE_TILES),
    *_square("length_320", "64 past two tiles of 128", 320, issue=issues.PAST_WHOLE_TILES),
    *_square("length_257", "one past whole tiles", 257),
    _check("more_keys", "33 queries of 129 keys", sq=33, sk=129),
    _check("more_queries", "129 queries of 33 keys", sq=129, sk=33),
    _check("no_queries", "no queries: empty out, dk and dv of zeros", sq=0, sk=17),
    _check("no_keys", "no keys: out of zeros", sq=17, sk=0),
    _check("no_batch", "a batch of none", b=0, sq=5, sk=5),
    _check("batch_of_129", "a batch of 129 short sequences", b=129, hq=1, hk=1, sq=16, sk=16, mask=causal()),
)

_ALIGNMENTS = (
    _check("causal_top_left_more_keys", "query i sees keys up to i, of 70 queries and 133 keys", sq=70, sk=133,
           mask=_TOP),
    _check("causal_top_left_more_queries", "the same of 133 queries and 70 keys", sq=133, sk=70, mask=_TOP),
    _check("causal_bottom_right_more_keys", "the last query sees the last key, of 70 queries and 133 keys", sq=70,
           sk=133, mask=_BOTTOM),
    _check("causal_bottom_right_more_queries", "the same of 133 queries and 70 keys: 63 queries see nothing, and their "
           "out and dq are 0", held_to_budget(also=_zero_where_blind), sq=133, sk=70, mask=_BOTTOM),
    _check("causal_bottom_right_one_query", "one query of 130 keys sees all", b=2, sq=1, sk=130, mask=_BOTTOM),
)

_MASKS = (
    _check("rows_without_a_key", "a boolean mask under which every fifth query sees nothing: out and dq of 0, no NaN",
           held_to_budget(also=_zero_where_blind), sq=133, sk=70, mask_tensor="11qk"),
    _check("mask_of_each_head", "a boolean mask for each batch entry and head", b=2, sq=66, sk=66, mask_tensor="bhqk"),
    _check("masked_keys_hold_nan", "NaN in keys that a boolean mask hides from all: the forward pass is right",
           _masked_nan(_NAN), sq=70, sk=133, mask_tensor="11qk"),
    _check("masked_keys_hold_inf", "the same of infinities", _masked_nan(float("inf")), sq=70, sk=133,
           mask_tensor="11qk"),
    _check("masked_keys_are_large", "10⁴ in keys and values that a boolean mask hides from all: both passes are right",
           _masked_keys_are_large, sq=70, sk=133, mask_tensor="11qk"),
    _check("unseen_keys_hold_nan", "NaN in keys and values past the last query of a causal mask reaches nothing",
           _with_unseen_nan, sq=70, sk=133, mask=_TOP),
    _check("blind_queries_hold_nan", "NaN in queries, and their dout, that see no key under a causal mask reaches "
           "nothing", _with_blind_nan, sq=133, sk=70, mask=_BOTTOM),
    _check("nan_is_shown", "NaN in a key makes NaN of the rows that see it", _nan_is_shown, sq=131, sk=131,
           mask=causal()),
    _check("infinity_stays_in_its_row", "an infinite query loses its own row and no other", _infinity_stays_in_its_row,
           sq=131, sk=131),
)

_PACKED = (
    _packed("packed", "packed sequences of 49, 17, 1 and 130 tokens", (49, 17, 1, 130)),
    _packed("packed_causal", "the same, causal", (49, 17, 1, 130), mask=_BOTTOM),
    _packed("packed_causal_more_keys", "packed sequences with more keys than queries, aligned at the bottom right",
            (49, 17, 1, 30), (66, 17, 40, 130), mask=_BOTTOM),
    _packed("packed_many", "33 packed sequences of mixed lengths", [1 + 7 * number % 33 for number in range(33)],
            mask=_BOTTOM, issue=issues.SEGMENTS),
    _packed("packed_zero_lengths", "packed sequences, some of no tokens, the first and the last among them",
            (0, 33, 0, 7, 0), mask=_BOTTOM),
    _packed("packed_zero_lengths_head_dim_256", "the same at head dim 256", (0, 33, 0, 7, 0), mask=_BOTTOM, d=256,
            issue=issues.ZERO_LENGTH),
)

_HEADS = (
    _check("grouped_heads", "8 query heads of 2 key heads", hq=8, hk=2, sq=97, sk=97, mask=causal(),
           issue=issues.FEW_KEY_HEADS),
    _check("groups_of_three", "6 query heads of 2 key heads", hq=6, hk=2, sq=77, sk=77, mask=causal()),
    _check("one_key_head", "8 query heads of one key head", b=2, hq=8, hk=1, sq=65, sk=65,
           issue=issues.FEW_KEY_HEADS),
    *(_check(f"head_dim_{d}", f"head dim {d}", d=d, dv=d, sq=130, sk=130, mask=causal())
      for d in (8, 32, 33, 40, 72, 80, 96, 128, 192, 256)),
    _check("value_dim_smaller", "head dim 192, of v 128", d=192, dv=128, sq=66, sk=90),
)

CHECKS: tuple[Check, ...] = _LENGTHS + _ALIGNMENTS + _MASKS + _PACKED + _HEADS
