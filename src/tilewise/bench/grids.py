"""Named grids of problems, and the problem that flags describe."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from tilewise.bench.families import FAMILIES, family_of
from tilewise.bench.roofline import DIRECTIONS, Direction
from tilewise.bench.shapes import CAUSAL, FULL, packed_case, packed_kv_cases, priced, shape_case, square_case
from tilewise.masks import causal, chunk, prefix, sink_tokens, window
from tilewise.problem import AttentionProblem
from tilewise.problem.decode import DecodeOptions, DecodeProblem, decode_problem, specs_of_inputs
from tilewise.support.names import DTYPES
from tilewise.testing.cases import Case, Layout
from tilewise.testing.inputs import lay_out, make_operands
from tilewise.validate.choices import check_choice

DTYPE_NAMES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_PAPER_TOKENS, _PAPER_HIDDEN = 16384, 2048
# 32768 tokens in 16 documents of mixed lengths; drawn once, log-normally (the logarithm's deviation is 1).
_PACKED_LENGTHS = (1140, 1415, 2756, 1244, 5632, 295, 1796, 410, 1299, 1025, 1022, 166, 1491, 2565, 7348, 3164)


@dataclass(frozen=True)
class Cell:
    """One problem of a grid: what all providers are timed on side by side.

    Attributes:
        learned: the operands, by their names in problem/options.py, that get a gradient; q, k and v always do.
        cached: whether keys and values are a full cache, as decoding reads it: a forward pass alone, without gradients.
        directions: the passes that are timed of it, of those that a run times.
        on_host: whether it is the host's time that is measured, as host.py does.
    """

    grid: str
    case: Case
    dtype: torch.dtype
    learned: tuple[str, ...] = ()
    cached: bool = False
    directions: tuple[Direction, ...] = DIRECTIONS
    on_host: bool = False

    @property
    def family(self) -> str:
        """That of the grid families which the cell is of; "" in another grid."""
        return family_of(self.case.name)

    def problem(self, device: torch.device) -> AttentionProblem:
        """Describe the call without allocating its tensors."""
        case = self.case
        operands = make_operands(case, self.dtype, "meta")
        problem = AttentionProblem.from_tensors(*self._inputs(), operands, mask=case.mask, scale=case.scale,
                                                settings=case.settings)
        return replace(problem, device=device)

    def decode_problem(self, device: torch.device) -> DecodeProblem:
        """Describe the call of a cached cell without allocating its tensors; its lengths are the whole cache's."""
        options = DecodeOptions(self.case.mask, self.case.scale)
        return replace(decode_problem(specs_of_inputs(*self._inputs()), (), options), device=device)

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v without memory, laid out as the case says."""
        case = self.case
        (b, sq), (_, sk) = case.stored("q"), case.stored("k")
        layout: Layout = "bshd" if case.layout == "packed_kv" else case.layout
        q, k, v = (lay_out(torch.empty((b, h, s, d), dtype=self.dtype, device="meta"), layout)
                   for h, s, d in ((case.hq, sq, case.d), (case.hk, sk, case.d), (case.hk, sk, case.dv)))
        if case.layout == "packed_kv":
            k, v = k.new_empty(b, sk, 2, case.hk, case.d).permute(2, 0, 3, 1, 4)
        return q, k, v

    def __str__(self) -> str:
        return f"{self.case} {dtype_name(self.dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Read a dtype's name. Raises :class:`InvalidInput` for an unknown one."""
    check_choice("dtype", name, DTYPES)
    return DTYPE_NAMES[name]


def grid_cells(names: Iterable[str]) -> list[Cell]:
    """Return the cells of the named grids. Raises :class:`InvalidInput` for an unknown grid."""
    cells: list[Cell] = []
    for name in names:
        check_choice("grid", name, GRIDS)
        cells += [Cell(name, *entry) for entry in GRIDS[name]()]
    return cells


def filtered(cells: Iterable[Cell], lengths: Sequence[int] = (), dims: Sequence[int] = (),
             families: Sequence[str] = (), directions: Sequence[Direction] = DIRECTIONS) -> list[Cell]:
    """Keep the cells whose query length (of packed sequences, together) and head dim are listed; [] keeps all.

    Of cached cells the length of the cache counts. Cells of families are kept if theirs is listed, and cells of any
    grid if one of the directions is timed of them.
    """
    return [cell for cell in cells
            if (not lengths or cell.case.stored("k" if cell.cached else "q")[1] in lengths)
            and (not dims or cell.case.d in dims) and (not families or cell.family in ("", *families))
            and any(direction in directions for direction in cell.directions)]


# The GPU grids store (b, s, h, d): the one layout that every peer reads without a copy.
def _paper() -> list[tuple[Case, torch.dtype]]:
    return [(square_case(_PAPER_TOKENS // s, _PAPER_HIDDEN // d, s, d, mask, "bshd"), torch.bfloat16)
            for d in (64, 128, 256) for mask in (FULL, CAUSAL) for s in (512, 1024, 2048, 4096, 8192, 16384)]


def _seeds() -> list[tuple[Case, torch.dtype]]:
    return [(square_case(4, 48, s, 64, CAUSAL, "bshd"), torch.float16) for s in (1024, 2048, 4096, 8192, 16384, 32768)]


def _gqa() -> list[tuple[Case, torch.dtype]]:
    return [(square_case(2, (32, 8), s, 128, mask, "bshd"), torch.bfloat16)
            for mask in (FULL, CAUSAL) for s in (4096, 8192)]


def _fp32() -> list[tuple[Case, torch.dtype]]:
    # Of llm.c's layer, 12 heads of 64 on 768 channels; and heads of 128.
    return [(square_case(b, 12, s, d, CAUSAL, "bshd"), torch.float32)
            for d in (64, 128) for b, s in ((8, 1024), (6, 4096), (1, 8192))]


def _options() -> list[tuple[Case, torch.dtype, tuple[str, ...]]]:
    return [(case, torch.bfloat16, learned) for b, s in ((4, 4096), (2, 8192))
            for case, learned in priced(square_case(b, 16, s, 128, CAUSAL, "bshd"))]


def _masks() -> list[tuple[Case, torch.dtype]]:
    # The prefix, a chunk and the window are a quarter of the sequence long; the boolean tensor hides no whole tile.
    cells = []
    for b, s in ((4, 4096), (2, 8192)):
        kinds = (CAUSAL, prefix(s // 4), CAUSAL & chunk(s // 4), CAUSAL & window(s // 4 - 1, 0) & sink_tokens(4))
        cells += [square_case(b, 16, s, 128, mask, "bshd") for mask in kinds]
        cells.append(replace(cells[-4], name=f"{cells[-4].name}_mask_tensor", mask_tensor="11qk"))
    return [(case, torch.bfloat16) for case in cells]


def _packed() -> list[tuple[Case, torch.dtype]]:
    return [(packed_case(heads, _PACKED_LENGTHS, d, mask), torch.bfloat16)
            for heads, d in (((16, 16), 128), ((32, 8), 128), ((32, 32), 64)) for mask in (FULL, causal("top_left"))]


def _packed_kv() -> list[tuple[Case, torch.dtype]]:
    # Keys and values in one (b, s, 2, h, d) tensor: the call that cudnn-frontend#98 asks about.
    return [(case, torch.bfloat16) for d in (64, 128) for s in (512, 1024, 2048, 4096) for b in (1, 2, 4, 6)
            for case in packed_kv_cases(b, 16, s, d)]


def _decode() -> list[tuple[Case, torch.dtype, tuple[str, ...], bool]]:
    # One query of each sequence and a cache of 8192 or 65536 keys: the heads of a Llama of 8 billion weights.
    return [(shape_case(b, (32, 8), (1, s), (128, 128), FULL, "bshd"), torch.bfloat16, (), True)
            for s, batches in ((8192, (1, 4, 8, 16, 32, 64)), (65536, (1, 4, 8, 16))) for b in batches]


def _cpu() -> list[tuple[Case, torch.dtype]]:
    # From short to long, so that a run whose time is up has every series begun. Together under five minutes on two
    # idle cores, most of it in dense attention; that is why bfloat16 has two lengths alone.
    series = ((512, CAUSAL, torch.float32), (512, FULL, torch.float32), (512, CAUSAL, torch.bfloat16),
              (1024, CAUSAL, torch.float32), (1024, FULL, torch.float32),
              (2048, CAUSAL, torch.float32), (2048, FULL, torch.float32), (2048, CAUSAL, torch.bfloat16),
              (4096, CAUSAL, torch.float32), (4096, FULL, torch.float32))
    return [(square_case(1, 8, s, 64, mask, "bhsd"), dtype) for s, mask, dtype in series]


def _families() -> list[tuple[Case, torch.dtype, tuple[str, ...], bool, tuple[Direction, ...], bool]]:
    return [(case, dtype, (), False, family.directions, family.on_host) for family in FAMILIES.values()
            for dtype in (torch.bfloat16, torch.float16) for case in family.cases]


_Entry = (tuple[Case, torch.dtype] | tuple[Case, torch.dtype, tuple[str, ...]]
          | tuple[Case, torch.dtype, tuple[str, ...], bool]
          | tuple[Case, torch.dtype, tuple[str, ...], bool, tuple[Direction, ...], bool])
GRIDS: dict[str, Callable[[], Sequence[_Entry]]] = {
    "cpu": _cpu, "paper": _paper, "seeds": _seeds, "gqa": _gqa, "fp32": _fp32, "options": _options, "packed": _packed,
    "packed-kv": _packed_kv, "masks": _masks, "decode": _decode, "families": _families,
}
