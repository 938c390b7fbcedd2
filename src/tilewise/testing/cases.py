"""Named problems, shared by the tests, ``tilewise check`` and the benchmark's check before timing."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from tilewise.errors import InvalidInput
from tilewise.masks import Mask, Span, causal, chunk, prefix, sink_tokens, window
from tilewise.problem.options import ScoreSettings, checked_dropout_p
from tilewise.validate.values import checked_softcap

OperandDtype = Literal["same", "float32"]
Slopes = Literal["", "h", "bh"]
Packed = Literal["", "tight", "gaps"]
Documents = Literal["", "runs", "interleaved", "mixed"]
Layout = Literal["bhsd", "bshd", "bhds", "packed_qkv", "packed_kv", "expanded", "moat", "sbhd", "shbd", "hbsd", "hsbd"]
# Of 1000 tokens, those of each of eight documents; drawn once, log-normally, as lengths of documents are.
_SHARES = (128, 68, 238, 192, 49, 235, 30, 60)


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem by name, without tensors, dtype or device.

    Attributes:
        name: what ``str(case)`` gives and a test's id shows.
        b, hq, hk, sq, sk, d, dv: sizes, with the letters of problem/problem.py.
        mask: who sees whom.
        scale: factor of the scores; None = 1/sqrt(d).
        layout: how q, k, v and dout lie in memory, and as far as they can, the operands; see inputs.py.
        bias, mask_tensor: the dims of the operand, 1 where it is broadcast ("bhqk", "1hq1"); "" = none.
        operand_dtype: of bias and sinks: the inputs' own, or float32.
        alibi: the dims of the slopes; "" = none.
        sinks: whether each head has one.
        softcap, dropout_p, max_logit: as in problem/options.py.
        lengths_q, lengths_k: how many of the sq queries and sk keys of each of the b sequences take part; None = all.
        packed: "" = each sequence is a batch entry; "tight" = one behind the other; "gaps" = with unused rows behind
             each of them and behind the last.
        documents: how the ids of queries and keys lie: in runs drawn for each batch entry, interleaved, the same for
             all, or mixed: in eight runs of mixed lengths, as :meth:`document_spans` says; "" = there are none.
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
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    packed: Packed = ""
    documents: Documents = ""

    def __post_init__(self) -> None:
        for field, names in (("layout", Layout), ("operand_dtype", OperandDtype), ("alibi", Slopes),
                             ("packed", Packed), ("documents", Documents)):
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
        if self.has_lengths:
            self._check_lengths()
        else:
            self.mask.band(self.sq, self.sk)  # raises where lengths differ and no alignment is named
        if self.alibi:
            self.mask.offset(self.sq, self.sk)  # as does this: a distance has one too
        if self.documents == "mixed" and self.has_lengths:
            raise InvalidInput(f"case {self.name}: documents are 'mixed' and lengths are data; allowed is one of them.")

    def _check_lengths(self) -> None:
        for field, most in (("lengths_q", self.sq), ("lengths_k", self.sk)):
            lengths = getattr(self, field)
            if lengths is None and self.packed:
                raise InvalidInput(f"case {self.name}: {field} is None; packed sequences need both lengths.")
            if lengths is not None and (len(lengths) != self.b or not all(0 <= length <= most for length in lengths)):
                raise InvalidInput(f"case {self.name}: {field} is {lengths}; allowed are {self.b} lengths of "
                                   f"0 to {most}.")
        if self.packed and self.layout not in ("bhsd", "bshd", "bhds", "moat"):
            raise InvalidInput(f"case {self.name}: layout is {self.layout!r}; packed sequences lie as 'bhsd', 'bshd', "
                               "'bhds' or 'moat'.")
        if self.mask.is_bounded and self.mask.alignment is None:
            raise InvalidInput(f"case {self.name}: mask is {self.mask}; where lengths are data it needs an alignment.")

    @property
    def has_lengths(self) -> bool:
        """Whether some length is data."""
        return bool(self.packed) or self.lengths_q is not None or self.lengths_k is not None

    @property
    def is_padded(self) -> bool:
        """Whether lengths are data and each sequence is a batch entry."""
        return self.has_lengths and not self.packed

    @property
    def dense_pairs(self) -> int:
        """Pairs of one head, hidden ones too: of all sequences, each by itself."""
        return sum(len(queries) * len(keys) for queries, keys in zip(self.spans("q"), self.spans("k"), strict=True))

    def spans(self, side: str) -> list[Span]:
        """Return where in storage each sequence's queries or keys lie that take part; padded, in their entry."""
        length, lengths = (self.sq, self.lengths_q) if side == "q" else (self.sk, self.lengths_k)
        lengths = (length,) * self.b if lengths is None else lengths
        spans, start = [], 0
        for number, own in enumerate(lengths):
            spans.append(Span(start, start + own))
            start = 0 if not self.packed else start + own + (2 + number if self.packed == "gaps" else 0)
        return spans

    def document_spans(self, side: str) -> list[list[Span]]:
        """Return of each batch entry where its mixed documents lie, in their order; the next entry has them shifted.

        Raises:
            InvalidInput: the documents are not mixed.
        """
        if self.documents != "mixed":
            raise InvalidInput(f"case {self.name}: documents are {self.documents!r}; allowed are 'mixed' where their "
                               "lengths are asked for.")
        length, entries = self.sq if side == "q" else self.sk, []
        for entry in range(self.b):
            first = entry % len(_SHARES)
            shares = _SHARES[first:] + _SHARES[:first]
            borders = [length * sum(shares[:count]) // sum(shares) for count in range(len(shares) + 1)]
            entries.append([Span(*ends) for ends in pairwise(borders)])
        return entries

    def stored(self, side: str) -> tuple[int, int]:
        """Return batch entries and positions of the tensors of queries or keys."""
        if not self.packed:
            return self.b, self.sq if side == "q" else self.sk
        end = max((span.stop for span in self.spans(side)), default=0)
        return 1, end + (self.b + 5 if self.packed == "gaps" else 0)

    @property
    def settings(self) -> ScoreSettings:
        """The numbers that change the scores, and whether the largest of them is wanted."""
        longest = (self.sq, self.sk) if self.packed and (self.bias or self.mask_tensor) else (None, None)
        return ScoreSettings(self.softcap, self.dropout_p, self.max_logit, longest)

    @property
    def has_options(self) -> bool:
        """Whether anything beside scale and mask changes the scores, or decides which there are."""
        return bool(self.bias or self.mask_tensor or self.alibi or self.sinks or self.softcap or self.dropout_p
                    or self.documents or self.has_lengths)

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
    Case("storage_sbhd", b=2, hq=4, hk=2, sq=66, sk=70, d=40, dv=24, layout="sbhd"),
    Case("storage_shbd", b=3, hq=4, hk=2, sq=66, sk=66, d=32, dv=32, mask=causal(), layout="shbd"),
    Case("storage_hbsd", b=2, hq=4, hk=2, sq=66, sk=90, d=32, dv=32, layout="hbsd"),
    Case("storage_hsbd", b=3, hq=2, sq=70, sk=40, d=32, dv=64, mask=_BOTTOM & window(20, 0), layout="hsbd"),
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
    Case("softcap_wide_heads", hq=4, hk=2, sq=66, sk=90, d=256, dv=256, mask=_BOTTOM, softcap=3.0),
    Case("softcap_near_its_bound_gqa", hq=4, hk=2, sq=49, sk=70, d=32, dv=32, mask=_BOTTOM, scale=0.5, softcap=2.0),
    Case("sinks", b=2, hq=3, hk=3, sq=66, sk=66, d=16, dv=16, sinks=True),
    Case("sinks_window_causal_gqa", hq=4, hk=2, sq=70, sk=70, d=32, dv=32, mask=causal() & window(20, 0), sinks=True,
         operand_dtype="float32"),
    Case("sinks_blind_queries", b=2, sq=77, sk=33, d=16, dv=16, mask=_BOTTOM, sinks=True, layout="bhds"),
    Case("sinks_no_keys", sq=17, sk=0, d=16, dv=16, sinks=True),
    Case("dropout", sq=66, sk=66, d=32, dv=32, dropout_p=0.25),
    Case("dropout_wide_heads", hq=4, hk=2, sq=66, sk=90, d=256, dv=256, mask=_BOTTOM, dropout_p=0.25),
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

_EXCEPTIONS = (
    Case("prefix", hq=4, hk=2, sq=66, sk=66, d=16, dv=16, mask=prefix(21)),
    Case("prefix_window_more_keys", sq=49, sk=77, d=16, dv=16, mask=prefix(40, "top_left") & window(9, 0)),
    Case("prefix_bottom_right_more_queries", sq=77, sk=33, d=16, dv=16, mask=prefix(5, "bottom_right")),
    # The hole between the first keys and the window is 100 keys and more.
    Case("sink_tokens_far_from_the_window", hq=2, hk=1, sq=200, sk=300, d=16, dv=16,
         mask=_BOTTOM & window(20, 0) & sink_tokens(4)),
    Case("sink_tokens_inside_the_window", sq=66, sk=66, d=16, dv=16, mask=window(30, 7) & sink_tokens(20)),
    Case("sink_tokens_top_left_more_queries", sq=140, sk=33, d=16, dv=16, mask=_TOP & window(9, 0) & sink_tokens(3),
         sinks=True),
    Case("chunk", hq=2, hk=1, sq=77, sk=77, d=16, dv=16, mask=chunk(19)),
    Case("chunk_causal_bottom_right_more_keys", sq=49, sk=77, d=16, dv=16, mask=_BOTTOM & chunk(16)),
    Case("chunk_bottom_right_more_queries", sq=77, sk=49, d=16, dv=16, mask=chunk(16, "bottom_right")),
    Case("chunk_past_every_length_blind_queries", sq=77, sk=49, d=16, dv=16, mask=chunk(2**31 - 1, "bottom_right")),
    Case("chunk_window_top_left_unseen_keys", sq=40, sk=77, d=16, dv=16, mask=chunk(16, "top_left") & window(9, 3)),
    Case("chunk_hides_sink_tokens_from_all", hq=2, hk=1, sq=40, sk=66, d=16, dv=16,
         mask=_BOTTOM & window(20, 0) & chunk(10) & sink_tokens(30)),
    Case("chunk_window_sink_tokens_prefix", sq=70, sk=70, d=16, dv=16,
         mask=prefix(11) & window(4, 0) & chunk(29) & sink_tokens(7), bias="1hqk"),
)

_DOCUMENTS = (
    Case("documents", b=2, hq=4, hk=2, sq=66, sk=66, d=16, dv=16, documents="runs"),
    Case("documents_causal_window_more_keys", b=2, sq=49, sk=77, d=16, dv=16, mask=_BOTTOM & window(20, 0),
         documents="runs", bias="11qk"),
    Case("documents_interleaved", b=2, sq=66, sk=49, d=16, dv=16, documents="interleaved", alibi="bh", mask=_TOP),
    Case("documents_mask_tensor_sinks", sq=66, sk=66, d=16, dv=16, mask=causal() & chunk(30), documents="runs",
         mask_tensor="11qk", sinks=True, layout="moat"),
)

_PADDED = (
    Case("padded", b=3, hq=4, hk=2, sq=49, sk=66, d=16, dv=16, lengths_q=(49, 17, 30), lengths_k=(13, 66, 40),
         layout="moat"),
    Case("padded_keys_causal_bottom_right", b=2, sq=33, sk=66, d=16, dv=16, mask=_BOTTOM, lengths_k=(20, 66)),
    Case("padded_queries_causal_top_left", b=2, sq=66, sk=33, d=16, dv=16, mask=_TOP, lengths_q=(66, 31),
         layout="bshd"),
    Case("padded_zero_lengths", b=4, sq=33, sk=33, d=16, dv=16, mask=_TOP, lengths_q=(0, 33, 0, 7),
         lengths_k=(20, 0, 0, 33), layout="moat", sinks=True),
    Case("padded_sinks_blind_queries_gqa", b=2, hq=4, hk=2, sq=66, sk=66, d=16, dv=16, mask=_BOTTOM, sinks=True,
         lengths_q=(50, 40), lengths_k=(33, 40), layout="moat"),
    Case("padded_window_bias", b=2, sq=40, sk=49, d=16, dv=16, mask=window(9, 4, "bottom_right"), bias="1hqk",
         lengths_q=(40, 21), lengths_k=(31, 49), layout="moat"),
    Case("padded_sink_tokens_past_the_keys", b=2, sq=200, sk=60, d=16, dv=16, mask=_TOP & window(9, 0) & sink_tokens(7),
         lengths_q=(200, 150), lengths_k=(5, 40), layout="moat"),
    Case("padded_everything", b=3, hq=4, hk=2, sq=49, sk=70, d=24, dv=40, layout="moat", bias="bhqk",
         mask=_BOTTOM & window(30, 0) & sink_tokens(3), mask_tensor="1h1k", alibi="bh", sinks=True, softcap=4.0,
         dropout_p=0.2, operand_dtype="float32", documents="runs", lengths_q=(49, 20, 35), lengths_k=(33, 70, 35)),
)

_PACKED = (
    Case("packed", b=3, hq=4, hk=2, sq=49, sk=66, d=16, dv=16, lengths_q=(49, 17, 30), lengths_k=(13, 66, 40),
         packed="tight"),
    Case("packed_causal_top_left", b=3, sq=40, sk=40, d=16, dv=16, mask=_TOP, lengths_q=(40, 17, 30),
         lengths_k=(40, 17, 30), packed="tight", layout="bshd"),
    Case("packed_causal_bottom_right_gaps", b=3, hq=4, hk=2, sq=49, sk=66, d=16, dv=16, mask=_BOTTOM,
         lengths_q=(49, 17, 30), lengths_k=(13, 66, 40), packed="gaps", layout="moat"),
    Case("packed_zero_lengths", b=5, sq=33, sk=40, d=16, dv=16, mask=_BOTTOM, lengths_q=(0, 33, 0, 7, 0),
         lengths_k=(20, 0, 0, 40, 11), packed="gaps", layout="moat"),
    Case("packed_nothing", b=2, sq=0, sk=0, d=16, dv=16, lengths_q=(0, 0), lengths_k=(0, 0), packed="tight"),
    # An operand's dim of 1 is a broadcast one beside another operand's 0.
    Case("packed_no_queries", b=2, sq=0, sk=20, d=16, dv=16, lengths_q=(0, 0), lengths_k=(7, 20), packed="tight",
         bias="bhqk", mask_tensor="bh1k"),
    Case("packed_no_sequences", b=0, sq=0, sk=0, d=16, dv=16, lengths_q=(), lengths_k=(), packed="gaps"),
    Case("packed_window_sinks", b=2, sq=49, sk=49, d=16, dv=16, mask=window(9, 4, "bottom_right"), sinks=True,
         lengths_q=(49, 20), lengths_k=(30, 49), packed="gaps", layout="moat"),
    Case("packed_bias", b=3, sq=33, sk=40, d=16, dv=16, bias="bhqk", lengths_q=(20, 33, 5), lengths_k=(40, 9, 17),
         packed="tight"),
    Case("packed_bias_of_all_sequences", b=3, hq=4, hk=2, sq=33, sk=40, d=16, dv=16, mask=_BOTTOM, bias="1hqk",
         lengths_q=(20, 33, 5), lengths_k=(40, 9, 17), packed="gaps", layout="moat"),
    Case("packed_bias_of_keys", b=2, sq=33, sk=40, d=16, dv=16, bias="b11k", operand_dtype="float32",
         lengths_q=(20, 33), lengths_k=(40, 17), packed="tight"),
    Case("packed_bias_of_queries", b=2, sq=33, sk=40, d=16, dv=16, mask=_TOP, bias="1hq1", mask_tensor="b1qk",
         lengths_q=(20, 33), lengths_k=(40, 17), packed="gaps"),
    Case("packed_group_of_three", b=3, hq=6, hk=2, sq=90, sk=66, d=64, dv=64, mask=_BOTTOM, softcap=4.0,
         lengths_q=(90, 17, 30), lengths_k=(13, 66, 40), packed="gaps", layout="bshd"),
    Case("packed_group_of_eight_window_sinks", b=3, hq=8, hk=1, sq=70, sk=70, d=40, dv=40, sinks=True,
         mask=window(9, 4, "bottom_right"), lengths_q=(70, 0, 33), lengths_k=(66, 70, 40), packed="gaps"),
    Case("packed_wide_heads", b=3, hq=4, hk=2, sq=66, sk=90, d=256, dv=256, mask=_BOTTOM, lengths_q=(66, 0, 35),
         lengths_k=(33, 70, 90), packed="gaps"),
    Case("padded_wide_heads", b=3, hq=2, hk=2, sq=66, sk=90, d=192, dv=128, mask=_TOP, lengths_q=(66, 0, 35),
         lengths_k=(33, 70, 90)),
    Case("packed_alibi_dropout", b=3, hq=2, hk=1, sq=33, sk=40, d=16, dv=16, mask=_BOTTOM, alibi="h", dropout_p=0.3,
         lengths_q=(20, 33, 5), lengths_k=(40, 9, 17), packed="tight"),
    Case("packed_softcap_alibi_of_sequences", b=2, hq=4, hk=2, sq=33, sk=40, d=16, dv=16,
         mask=window(None, None, "top_left"), alibi="bh", softcap=3.0, lengths_q=(20, 33), lengths_k=(40, 9),
         packed="gaps"),
    Case("packed_documents_chunk", b=3, sq=40, sk=40, d=16, dv=16, mask=_TOP & chunk(16), documents="runs",
         lengths_q=(40, 17, 30), lengths_k=(40, 17, 30), packed="gaps"),
    Case("packed_prefix_sink_tokens", b=2, sq=49, sk=66, d=16, dv=16,
         mask=prefix(20, "bottom_right") & window(9, 0) & sink_tokens(3), lengths_q=(49, 30), lengths_k=(66, 33),
         packed="tight"),
    Case("packed_everything", b=3, hq=4, hk=2, sq=49, sk=70, d=24, dv=40, layout="moat", bias="11qk",
         mask=_BOTTOM & window(30, 0) & sink_tokens(3) & chunk(40), mask_tensor="bhqk", alibi="h", sinks=True,
         softcap=4.0, dropout_p=0.2, documents="interleaved", lengths_q=(49, 0, 35), lengths_k=(33, 70, 35),
         packed="gaps"),
)

CASES: tuple[Case, ...] = (_HEADS + _LENGTHS + _WINDOWS + _HEAD_DIMS + _LAYOUTS
                           + _ADDED + _HIDDEN_BY_DATA + _REDUCED + _TOGETHER
                           + _EXCEPTIONS + _DOCUMENTS + _PADDED + _PACKED)
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
