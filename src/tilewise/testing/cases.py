"""Named problems, shared by the tests, ``tilewise check`` and the benchmark's check before timing."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tilewise.errors import InvalidInput
from tilewise.masks import Mask, causal, window
from tilewise.scores import ScoreSettings, checked_dropout_p, checked_softcap

OperandDtype = Literal["same", "float32"]
Slopes = Literal["", "h", "bh"]
Layout = Literal["bhsd", "bshd", "bhds", "packed_qkv", "packed_kv", "expanded", "moat"]


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem by name, without tensors, dtype or device.

    Attributes:
        name: what ``str(case)`` gives and a test's id shows.
        b, hq, hk, sq, sk, d, dv: sizes, with the letters of problem.py.
        mask: who sees whom.
        scale: factor of the scores; None = 1/sqrt(d).
        layout: how q, k, v and dout lie in memory, and as far as they can, the operands; see inputs.py.
        bias, mask_tensor: the dims of the operand, 1 where it is broadcast ("bhqk", "1hq1"); "" = none.
        operand_dtype: of bias and sinks: the inputs' own, or float32.
        alibi: the dims of the slopes; "" = none.
        sinks: whether each head has one.
        softcap, dropout_p, max_logit: as in scores.py.
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
    bias: str = ""
    mask_tensor: str = ""
    operand_dtype: OperandDtype = "same"
    alibi: Slopes = ""
    sinks: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    max_logit: bool = False

    def __post_init__(self) -> None:
        for field, names in (("layout", Layout), ("operand_dtype", OperandDtype), ("alibi", Slopes)):
            if getattr(self, field) not in get_args(names):
                raise InvalidInput(
                    f"case {self.name}: {field} is {getattr(self, field)!r}; allowed are {get_args(names)}.")
        for field in ("bias", "mask_tensor"):
            if not re.fullmatch(r"([b1][h1][q1][k1])?", getattr(self, field)):
                raise InvalidInput(f"case {self.name}: {field} is {getattr(self, field)!r}; allowed is 'bhqk', with 1 "
                                   "in place of a letter, or '' for none.")
        if self.layout.startswith("packed") and self.d != self.dv:
            raise InvalidInput(f"case {self.name}: layout {self.layout!r} needs d == dv, got {self.d} and {self.dv}.")
        if self.layout == "packed_qkv" and self.sq != self.sk:
            raise InvalidInput(f"case {self.name}: layout 'packed_qkv' needs sq == sk, got {self.sq} and {self.sk}.")
        checked_softcap(self.softcap)
        checked_dropout_p(self.dropout_p)
        self.mask.band(self.sq, self.sk)  # raises where lengths differ and no alignment is named
        if self.alibi:
            self.mask.offset(self.sq, self.sk)  # as does this: a distance has one too

    @property
    def settings(self) -> ScoreSettings:
        """The numbers that change the scores, and whether the largest of them is wanted."""
        return ScoreSettings(self.softcap, self.dropout_p, self.max_logit)

    @property
    def has_options(self) -> bool:
        """Whether anything beside scale and mask changes the scores."""
        return bool(self.bias or self.mask_tensor or self.alibi or self.sinks or self.softcap or self.dropout_p)

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
    Case("head_dim_288", sq=34, sk=34, d=288, dv=288, mask=causal()),
    Case("head_dim_512", hq=1, hk=1, sq=34, sk=40, d=512, dv=512),
    # Past 512 q and k have a second tile.
    Case("head_dim_576_latent_gqa", hq=4, hk=1, sq=20, sk=37, d=576, dv=512, mask=_BOTTOM),
    Case("head_dim_odd_moat", sq=33, sk=40, d=575, dv=257, mask=window(12, 3, "top_left"), layout="moat"),
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

# Small, since every backend computes each of them thrice and the interpreter takes its time.
_ADDED = (
    Case("bias", hq=2, sq=66, sk=66, d=32, dv=32, bias="bhqk"),
    Case("bias_shared_by_batch_causal", b=2, hq=4, hk=2, sq=49, sk=49, d=32, dv=32, mask=causal(), bias="1hqk",
         operand_dtype="float32"),
    Case("bias_shared_by_batch_and_heads", b=2, sq=33, sk=70, d=16, dv=16, mask=_BOTTOM, bias="11qk"),
    Case("bias_of_keys", b=2, sq=65, sk=40, d=16, dv=16, bias="b11k"),
    Case("bias_of_queries", b=2, hq=2, hk=1, sq=40, sk=33, d=16, dv=16, bias="1hq1"),
    Case("bias_of_batches", b=2, sq=33, sk=33, d=16, dv=16, bias="b111"),
    Case("bias_blind_queries", sq=70, sk=33, d=32, dv=32, mask=_BOTTOM, bias="bhqk", layout="bhds"),
    Case("bias_window_moat", hq=4, hk=2, sq=70, sk=70, d=24, dv=40, mask=window(9, 5), bias="1hqk", layout="moat"),
    Case("bias_expanded", b=2, sq=35, sk=35, d=16, dv=16, bias="bhqk", layout="expanded"),
    Case("alibi_causal", hq=4, hk=4, sq=70, sk=70, d=32, dv=32, mask=causal(), alibi="h"),
    Case("alibi_of_batches_gqa", b=2, hq=4, hk=2, sq=40, sk=77, d=16, dv=16, mask=_BOTTOM, alibi="bh", layout="bshd"),
    Case("alibi_no_mask_more_queries", sq=77, sk=40, d=16, dv=16, mask=window(None, None, "top_left"), alibi="h"),
    Case("alibi_window_blind_queries", sq=77, sk=33, d=16, dv=16, mask=window(10, 10, "bottom_right"), alibi="bh",
         layout="bhds"),
)

_HIDDEN_BY_DATA = (
    Case("mask_tensor", hq=2, sq=66, sk=66, d=32, dv=32, mask_tensor="bhqk"),
    Case("mask_tensor_causal_gqa", b=2, hq=4, hk=2, sq=49, sk=70, d=16, dv=16, mask=_BOTTOM, mask_tensor="11qk"),
    Case("mask_tensor_of_keys", b=2, hq=2, hk=1, sq=40, sk=66, d=16, dv=16, mask_tensor="b11k", layout="bshd"),
    Case("mask_tensor_of_queries_moat", sq=66, sk=33, d=16, dv=16, mask=_TOP, mask_tensor="1hq1", layout="moat"),
)

_REDUCED = (
    Case("softcap", sq=66, sk=66, d=32, dv=32, softcap=30.0),
    Case("softcap_near_its_bound_gqa", hq=4, hk=2, sq=49, sk=70, d=32, dv=32, mask=_BOTTOM, scale=0.5, softcap=2.0),
    Case("sinks", b=2, hq=3, hk=3, sq=66, sk=66, d=16, dv=16, sinks=True),
    Case("sinks_window_causal_gqa", hq=4, hk=2, sq=70, sk=70, d=32, dv=32, mask=causal() & window(20, 0), sinks=True,
         operand_dtype="float32"),
    Case("sinks_blind_queries", b=2, sq=77, sk=33, d=16, dv=16, mask=_BOTTOM, sinks=True, layout="bhds"),
    Case("sinks_no_keys", sq=17, sk=0, d=16, dv=16, sinks=True),
    Case("dropout", sq=66, sk=66, d=32, dv=32, dropout_p=0.25),
    Case("dropout_causal_gqa", b=2, hq=4, hk=2, sq=49, sk=70, d=16, dv=16, mask=_BOTTOM, dropout_p=0.5),
)

_TOGETHER = (
    Case("softcap_bias", sq=49, sk=66, d=16, dv=16, mask=_BOTTOM, softcap=5.0, bias="11qk"),
    Case("softcap_alibi_window", hq=4, hk=2, sq=66, sk=66, d=16, dv=16, mask=window(20, 3), softcap=3.0, alibi="h"),
    Case("bias_mask_tensor_dropout", b=2, sq=40, sk=49, d=16, dv=16, bias="b11k", mask_tensor="b1qk", dropout_p=0.1),
    Case("sinks_mask_tensor_blind_queries", hq=4, hk=2, sq=66, sk=40, d=16, dv=16, mask_tensor="1hqk", sinks=True),
    Case("sinks_dropout_alibi", b=2, sq=40, sk=66, d=16, dv=16, mask=_TOP, sinks=True, dropout_p=0.3, alibi="bh"),
    Case("everything", b=2, hq=4, hk=2, sq=49, sk=70, d=32, dv=32, mask=_BOTTOM & window(30, 0), bias="1hqk",
         mask_tensor="b1qk", alibi="h", sinks=True, softcap=4.0, dropout_p=0.2),
    # A tile of keys that starts at no multiple of 8, where the draws of dropout start.
    Case("dropout_window_unseen_keys", hq=2, hk=1, sq=50, sk=140, d=16, dv=16, mask=window(13, 10, "bottom_right"),
         dropout_p=0.2),
    Case("everything_moat_blind_queries", hq=4, hk=1, sq=70, sk=40, d=24, dv=40, mask=_BOTTOM, bias="bhq1",
         mask_tensor="1h1k", alibi="bh", sinks=True, softcap=4.0, dropout_p=0.2, operand_dtype="float32",
         layout="moat"),
    # Wide heads: dK and dV are made by a launch each on a GPU.
    Case("everything_wide_heads", hq=2, hk=1, sq=49, sk=70, d=192, dv=192, mask=_BOTTOM, bias="b11k", alibi="h",
         sinks=True, softcap=4.0, dropout_p=0.2),
    Case("bias_of_keys_wide_heads", sq=66, sk=66, d=256, dv=256, bias="1h1k", mask_tensor="11qk"),
    Case("bias_sinks_dropout_head_dim_512", hq=2, hk=1, sq=20, sk=35, d=512, dv=512, mask=_BOTTOM, bias="1hqk",
         sinks=True, dropout_p=0.2),
    Case("everything_head_dim_544", hq=2, hk=1, sq=20, sk=35, d=544, dv=512, mask=_BOTTOM & window(20, 0), bias="11qk",
         mask_tensor="b1qk", alibi="h", sinks=True, softcap=4.0, dropout_p=0.2, layout="bshd"),
    Case("everything_expanded", b=2, hq=2, sq=35, sk=35, d=16, dv=16, bias="b11k", mask_tensor="bhqk", alibi="bh",
         sinks=True, softcap=4.0, dropout_p=0.2, layout="expanded"),
)

CASES: tuple[Case, ...] = (_HEADS + _LENGTHS + _WINDOWS + _HEAD_DIMS + _LAYOUTS
                           + _ADDED + _HIDDEN_BY_DATA + _REDUCED + _TOGETHER)
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
