"""Named problems, shared by the tests, ``tilewise check`` and the benchmark's check before timing."""

from dataclasses import dataclass
from typing import Literal, get_args

from tilewise.errors import InvalidInput
from tilewise.masks import Mask, causal, window

Layout = Literal["bhsd", "bshd", "bhds", "packed_qkv", "packed_kv", "expanded", "moat"]


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem by name, without tensors, dtype or device.

    Attributes:
        name: what ``str(case)`` gives and a test's id shows.
        b, hq, hk, sq, sk, d, dv: sizes, with the letters of problem.py.
        mask: who sees whom.
        scale: factor of the scores; None = 1/sqrt(d).
        layout: how q, k, v and dout lie in memory; see inputs.py.
    """

    name: str
    b: int = 1
    hq: int = 2
    hk: int = 2
    sq: int = 64
    sk: int = 64
    d: int = 64
    dv: int = 64
    mask: Mask = Mask()  # noqa: RUF009 - a frozen value, safe to share
    scale: float | None = None
    layout: Layout = "bhsd"

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise InvalidInput(f"case {self.name}: layout is {self.layout!r}; allowed are {get_args(Layout)}.")
        if self.layout.startswith("packed") and self.d != self.dv:
            raise InvalidInput(f"case {self.name}: layout {self.layout!r} needs d == dv, got {self.d} and {self.dv}.")
        if self.layout == "packed_qkv" and self.sq != self.sk:
            raise InvalidInput(f"case {self.name}: layout 'packed_qkv' needs sq == sk, got {self.sq} and {self.sk}.")
        self.mask.band(self.sq, self.sk)  # raises where lengths differ and no alignment is named

    def __str__(self) -> str:
        return self.name


_TOP, _BOTTOM = causal("top_left"), causal("bottom_right")

_HEADS = (
    Case("mha", b=2, hq=3, hk=3, sq=128, sk=128),
    Case("mha_odd_lengths", b=2, sq=113, sk=113, d=40, dv=40),
    Case("gqa", hq=4, hk=2, sq=97, sk=97),
    Case("mqa", b=2, hq=4, hk=1, sq=65, sk=65, d=32, dv=32),
    Case("mha_causal", sq=128, sk=128, mask=causal()),
    Case("mha_causal_odd_lengths", b=2, sq=131, sk=131, mask=causal()),
    Case("gqa_causal_odd_lengths", hq=6, hk=2, sq=77, sk=77, mask=causal(), layout="bshd"),
    Case("mqa_causal", hq=4, hk=1, sq=100, sk=100, d=128, dv=128, mask=causal()),
)

_LENGTHS = (
    Case("more_keys", sq=33, sk=129),
    Case("more_queries", sq=129, sk=33),
    Case("causal_top_left_more_keys", sq=70, sk=133, mask=_TOP),
    Case("causal_bottom_right_more_keys", sq=70, sk=133, mask=_BOTTOM),
    Case("causal_top_left_more_queries", sq=133, sk=70, mask=_TOP),
    Case("causal_bottom_right_more_queries", hq=4, sq=133, sk=70, mask=_BOTTOM),  # 63 queries see nothing
    Case("one_query_causal", b=2, hq=4, hk=1, sq=1, sk=130, mask=_BOTTOM),
    Case("one_query", b=2, sq=1, sk=67, d=80, dv=80),
    Case("one_key", b=2, sq=67, sk=1),
    Case("one_query_one_key", b=2, hq=3, hk=3, sq=1, sk=1, d=16, dv=16),
    Case("no_queries", sq=0, sk=17, mask=_BOTTOM),
    Case("no_keys", sq=17, sk=0, mask=_TOP),
    Case("no_queries_no_keys", sq=0, sk=0),
    Case("no_batch", b=0, sq=5, sk=5, mask=causal()),
)

_WINDOWS = (
    Case("window_both_sides", sq=140, sk=140, mask=window(17, 9)),
    Case("window_left", sq=140, sk=140, d=32, dv=32, mask=window(31, None)),
    Case("window_right", sq=100, sk=100, mask=window(None, 5)),
    Case("window_causal", hq=4, sq=140, sk=140, mask=causal() & window(40, 0)),
    Case("window_diagonal_only", sq=70, sk=70, d=32, dv=32, mask=window(0, 0)),
    Case("window_hides_whole_tiles", hq=1, hk=1, sq=300, sk=300, d=32, dv=32, mask=window(20, 20)),
    Case("window_causal_top_left_more_keys", sq=70, sk=133, mask=_TOP & window(40, 0)),
    Case("window_bottom_right_blind_queries", sq=140, sk=60, mask=window(10, 10, "bottom_right")),
    Case("window_top_left_blind_queries", hq=4, sq=140, sk=50, mask=_TOP & window(20, 0)),
    Case("window_top_left_unseen_keys", sq=50, sk=140, mask=window(10, 10, "top_left")),
    Case("window_bottom_right_unseen_keys", hq=4, hk=2, sq=50, sk=140, mask=_BOTTOM & window(10, 0)),
)

_HEAD_DIMS = (
    Case("head_dim_1", b=2, sq=66, sk=66, d=1, dv=1),
    Case("head_dim_16", b=2, sq=66, sk=66, d=16, dv=16, mask=causal()),
    Case("head_dim_72", sq=70, sk=70, d=72, dv=72),
    Case("head_dim_80", sq=70, sk=70, d=80, dv=80, mask=causal()),
    Case("head_dim_96", sq=66, sk=66, d=96, dv=96),
    Case("head_dim_128", sq=130, sk=130, d=128, dv=128),
    Case("head_dim_192", sq=66, sk=66, d=192, dv=192, mask=causal()),
    Case("head_dim_256", sq=66, sk=66, d=256, dv=256),
    Case("value_dim_smaller", hq=4, hk=2, sq=66, sk=90, d=192, dv=128, mask=_BOTTOM),
    Case("value_dim_larger", sq=66, sk=66, d=64, dv=128),
    Case("value_dim_odd", sq=66, sk=66, d=48, dv=33, mask=causal(), layout="bshd"),
)

_LAYOUTS = (
    Case("scale_given", sq=66, sk=66, scale=0.3),
    Case("storage_bshd", b=2, hq=4, hk=2, sq=66, sk=90, layout="bshd"),
    Case("storage_bhds", sq=66, sk=66, d=32, dv=32, mask=causal(), layout="bhds"),
    Case("packed_qkv_causal", b=2, sq=70, sk=70, mask=causal(), layout="packed_qkv"),
    Case("packed_qkv_gqa", hq=4, hk=2, sq=70, sk=70, d=40, dv=40, layout="packed_qkv"),
    Case("packed_kv", b=2, sq=34, sk=70, layout="packed_kv"),
    Case("expanded_heads_and_batch", b=2, hq=4, hk=4, sq=66, sk=66, d=32, dv=32, mask=causal(), layout="expanded"),
    Case("moat", b=2, hq=2, sq=66, sk=70, d=33, dv=33, layout="moat"),
    Case("moat_window", hq=4, hk=2, sq=70, sk=99, d=40, dv=24, mask=_BOTTOM & window(20, 0), layout="moat"),
)

CASES: tuple[Case, ...] = _HEADS + _LENGTHS + _WINDOWS + _HEAD_DIMS + _LAYOUTS
_BY_NAME = {case.name: case for case in CASES}


def case_named(name: str) -> Case:
    """Return the case of that name.

    Raises:
        InvalidInput: there is none; the message lists them all.

    >>> case_named("gqa").hk
    2
    """
    if name not in _BY_NAME:
        raise InvalidInput(f"no case is named {name!r}; allowed are {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]
