"""Families of calls in which another library was ahead of tilewise on an H200: what the grid families times.

Each at short, middle and long lengths and at several numbers of heads, in bfloat16 and in float16.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tilewise.bench.roofline import DIRECTIONS, Direction
from tilewise.bench.shapes import CAUSAL, FULL, packed_case, shape_case, square_case
from tilewise.masks import Mask, causal, window
from tilewise.testing.cases import Case

_BETWEEN = "/"
FORWARD: tuple[Direction, ...] = ("forward",)
BACKWARD: tuple[Direction, ...] = ("backward",)
_SHORT = tuple(16 + 37 * number % 113 for number in range(128))  # 128 sequences of 16 to 128 tokens


@dataclass(frozen=True)
class Family:
    """Calls of one kind.

    Attributes:
        cases: their names begin with the family's, which is how a row of results holds it.
        directions: the passes in which another library was ahead; no other is timed.
        on_host: whether the calls are so small that they take as long as the host needs to launch them: those are timed
            as in host.py, forward with backward.
    """

    name: str
    cases: tuple[Case, ...]
    directions: tuple[Direction, ...]
    on_host: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        """The directions of the rows that count for the family."""
        return ("forward_backward",) if self.on_host else self.directions


def family_of(case: str) -> str:
    """Return the family that a case's name begins with; "" for a case of another grid."""
    return case.rpartition(_BETWEEN)[0]


# Shapes of models: Gemma 2 (softcap 50, windows of 4096 keys), gpt-oss (windows of 128 keys, sinks, 64 heads on 8, and
# an eighth of them), DeepSeek-V3 (head dims 192 and 128), cross attention to the 77 tokens of CLIP; of grouped heads
# Llama 3 and an eighth of them by tensor parallelism, Qwen 2 (28 on 4, 14 on 2), Gemma 3 (4 on 1).
def _softcap(d: int) -> Iterable[Case]:
    return (square_case(4, (8, 4), 1024, d, CAUSAL, "bshd"), square_case(2, (16, 8), 4096, d, CAUSAL, "bshd"),
            square_case(1, (8, 4), 8192, d, CAUSAL, "bshd"), square_case(1, (16, 8), 8192, d, _window(4096), "bshd"))


def _short_window() -> Iterable[Case]:
    return (square_case(b, heads, s, 64, _window(128), "bshd")
            for b, heads, s in ((4, (64, 8), 1024), (4, (8, 1), 4096), (1, (64, 8), 4096), (1, (64, 8), 16384)))


def _grouped_heads() -> Iterable[Case]:
    return (square_case(b, heads, s, d, mask, "bshd")
            for b, heads, s, d, mask in (
                (4, (32, 8), 1024, 128, CAUSAL), (2, (28, 4), 2048, 128, CAUSAL), (2, (32, 8), 2048, 128, FULL),
                (1, (64, 8), 4096, 128, CAUSAL), (1, (16, 2), 4096, 128, CAUSAL), (2, (14, 2), 2048, 64, CAUSAL),
                (1, (4, 1), 4096, 256, CAUSAL)))


def _odd_lengths() -> Iterable[Case]:
    return (square_case(b, heads, s, d, FULL, "bshd")
            for b, heads, s, d in ((8, 16, 500, 64), (4, 16, 1000, 128), (2, 32, 2050, 64), (1, 24, 4500, 128)))


def _head_dims() -> Iterable[Case]:
    return (square_case(b, heads, s, d, mask, "bshd")
            for d, (b, heads, s, mask) in product((72, 80, 96, 112), ((8, 16, 1024, FULL), (2, 12, 4096, CAUSAL))))


def _unequal_dims() -> Iterable[Case]:
    return (shape_case(b, (heads, heads), (s, s), (192, 128), CAUSAL, "bshd")
            for b, heads, s in ((4, 16, 1024), (2, 16, 4096), (1, 32, 8192)))


def _short_packed() -> Iterable[Case]:
    top = causal("top_left")
    return (packed_case((12, 12), _SHORT, 64, FULL), packed_case((16, 16), (256,) * 64, 64, FULL),
            packed_case((32, 8), _SHORT, 128, top), packed_case((16, 16), (512,) * 32, 128, top))


def _few_keys() -> Iterable[Case]:
    return (shape_case(b, (heads, heads), (sq, sk), (d, d), FULL, "bshd")
            for b, heads, sq, sk, d in ((4, 20, 1024, 77, 64), (2, 10, 4096, 77, 64), (2, 8, 16384, 77, 128),
                                        (4, 16, 1024, 256, 128), (1, 24, 4096, 256, 64)))


def _bias() -> Iterable[Case]:
    return (square_case(b, heads, s, d, FULL, "bshd")
            for b, heads, s, d in ((8, 12, 512, 64), (4, 16, 1024, 128), (1, 16, 4096, 64)))


def _tiny() -> Iterable[Case]:
    return (square_case(b, heads, s, d, mask, "bshd")
            for b, heads, s, d, mask in ((1, 8, 128, 64, FULL), (2, 4, 64, 64, CAUSAL), (1, (16, 4), 256, 128, CAUSAL)))


def _small_batch() -> Iterable[Case]:
    return (square_case(b, heads, s, d, FULL, "bshd")
            for b, heads, s, d in ((1, 16, 1024, 64), (2, 16, 1024, 64), (4, 12, 1024, 64), (6, 16, 512, 64),
                                   (2, 16, 512, 128), (4, 16, 512, 128), (1, 24, 1024, 128), (6, 8, 1024, 128)))


def _window(keys: int) -> Mask:
    """Let a query see itself and what is before it, as many keys in all."""
    return CAUSAL & window(keys - 1, 0)


def _family(name: str, directions: tuple[Direction, ...], cases: Iterable[Case], *, on_host: bool = False,
            **options: Any) -> Family:
    """Name the cases after their family, each with the options that all of it has."""
    named = tuple(replace(case, name=f"{name}{_BETWEEN}{case.name}", **options) for case in cases)
    return Family(name, named, directions, on_host)


FAMILIES = {family.name: family for family in (
    _family("softcap-d128", FORWARD, _softcap(128), softcap=50.0),
    _family("softcap-d256", DIRECTIONS, _softcap(256), softcap=50.0),
    _family("short-window", FORWARD, _short_window(), sinks=True),
    _family("grouped-heads", BACKWARD, _grouped_heads()),
    _family("odd-lengths", BACKWARD, _odd_lengths()),
    _family("head-dims", BACKWARD, _head_dims()),
    _family("d192-dv128", BACKWARD, _unequal_dims()),
    _family("short-packed", DIRECTIONS, _short_packed()),
    _family("few-keys", BACKWARD, _few_keys()),
    _family("bias", BACKWARD, _bias(), bias="1hqk"),
    _family("tiny", BACKWARD, _tiny(), on_host=True),
    _family("small-batch", FORWARD, _small_batch()),
)}
