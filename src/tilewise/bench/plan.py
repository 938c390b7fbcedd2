"""What a benchmark run does with every cell, and the rows it starts from."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from tilewise.bench.decode import decode_providers
from tilewise.bench.grids import Cell, dtype_name
from tilewise.bench.llmc import llmc_providers
from tilewise.bench.mask_text import format_mask
from tilewise.bench.options import options_text
from tilewise.bench.packed import packed_providers
from tilewise.bench.peers import peer_providers
from tilewise.bench.provenance import Provenance
from tilewise.bench.providers import Provider, own_providers, torch_providers
from tilewise.bench.roofline import DIRECTIONS, Direction, flops, least_bytes
from tilewise.bench.rows import Row
from tilewise.bench.timing import Regime, Timing
from tilewise.validate.choices import check_choice


@dataclass(frozen=True)
class Plan:
    """The choices of a run.

    Attributes:
        providers: those that this machine has.
        origin: the provenance that every row carries.
        budget: seconds; no cell starts that is not expected to end within them. None = no limit.
        graph: time CUDA-graph replays of short calls (``is_short`` in runner.py says which).
        on_step: told in words what happens next.
    """

    device: torch.device
    providers: Sequence[Provider]
    regime: Regime
    origin: Provenance
    directions: Sequence[Direction] = DIRECTIONS
    budget: float | None = None
    graph: bool = False
    on_step: Callable[[str], None] = field(default=lambda text: None)


def available_providers(names: Sequence[str], device: torch.device) -> tuple[list[Provider], dict[str, str]]:
    """Return the providers of those names that run here, and why each other one does not.

    Without names, all but those on request.

    Raises:
        InvalidInput: no provider has that name.
    """
    known = {provider.name: provider
             for make in (own_providers, torch_providers, packed_providers, decode_providers, llmc_providers,
                          peer_providers)
             for provider in make()}
    for name in names:
        check_choice("provider", name, known)
    chosen = names or [name for name, provider in known.items() if not provider.on_request]
    wanted = {name: known[name] for name in chosen}
    absent = {name: reason for name, provider in wanted.items() if (reason := provider.missing(device))}
    return [provider for name, provider in wanted.items() if name not in absent], absent


def takers(providers: Sequence[Provider], cells: Sequence[Cell],
           device: torch.device) -> tuple[list[Provider], dict[str, str]]:
    """Return the providers that take some cell in some direction, and why each other one does not take the last."""
    taking: list[Provider] = []
    absent: dict[str, str] = {}
    asked = [(cell, direction) for cell in cells for direction in cell.directions]
    for provider in providers:
        for cell, direction in asked:
            reason = provider.reason_against(cell, direction, device)
            if reason is None:
                taking.append(provider)
                absent.pop(provider.name, None)
                break
            absent[provider.name] = reason
    return taking, absent


def blank_row(cell: Cell, provider: str, direction: str, regime: str, origin: Provenance) -> Row:
    """Return a row that says what, where and when, with nothing measured yet."""
    case = cell.case
    sizes = {name: getattr(case, name) for name in ("b", "hq", "hk", "sq", "sk", "d", "dv")}
    return Row(grid=cell.grid, case=str(case), provider=provider, direction=direction, **sizes,
               dtype=dtype_name(cell.dtype), mask=format_mask(case.mask), layout=case.layout, regime=regime,
               status="ok", options=options_text(cell), **asdict(origin))


def timed_row(row: Row, cell: Cell, direction: Direction, timing: Timing) -> Row:
    """Return the row with what was timed, and the rates that this is for the cell."""
    seconds = timing.p50 / 1e3
    return replace(
        row, ms_p20=timing.p20, ms_p50=timing.p50, ms_p80=timing.p80, samples=timing.samples,
        tflops=flops(cell.case, direction) / seconds / 1e12,
        gb_per_s=least_bytes(cell.case, cell.dtype, direction) / seconds / 1e9,
        sm_mhz=timing.clocks.sm_mhz, power_w=timing.clocks.power_w,
    )
