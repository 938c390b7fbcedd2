"""The ranks that share a sequence: checks of the device mesh, and of what ranks have to have alike."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise import settings
from tilewise.distributed.exchange import agree
from tilewise.errors import InvalidInput, TilewiseError
from tilewise.validate.distributed import check_mesh

# What the ranks of a group have agreed on: asked once, for it costs the host a wait.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
# A group's size and the own rank in it: to ask torch three times took 0.37 ms of a call, under a profiler
# (benchmarks/journal/context-parallel.md).
_sizes: WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = WeakKeyDictionary()
_FAILED = "\0"  # begins what a rank says whose arguments are wrong


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence: those of a mesh of one dim, or of two, row by row.

    Attributes:
        group: of the only dim, or of the first one: keys travel between its ranks.
        heads: of the second dim, the own row: its ranks exchange heads; or None.
        shape: sizes of the mesh.
        count: how many ranks there are.
        rank: the own one among all.
    """

    group: dist.ProcessGroup
    heads: dist.ProcessGroup | None
    shape: tuple[int, ...]
    count: int
    rank: int


def _size_and_rank(group: dist.ProcessGroup) -> tuple[int, int]:
    found = _sizes.get(group)
    if found is None:
        found = _sizes[group] = dist.get_world_size(group), dist.get_rank(group)
    return found


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Return the ranks of a mesh.

    Raises:
        InvalidInput: something else than a mesh, one of more than two dims, or one that this process is no part of.
    """
    check_mesh(mesh, is_mesh=isinstance(mesh, DeviceMesh))
    group = mesh.get_group(0)
    count, rank = _size_and_rank(group)
    if mesh.ndim == 1:
        return Ranks(group, None, (count,), count, rank)
    heads = mesh.get_group(1)
    size, within = _size_and_rank(heads)
    return Ranks(group, heads, (count, size), count * size, rank * size + within)


def check_ranks_agree(ranks: Ranks, describe: Callable[[], str], check: Callable[[], None] = lambda: None) -> None:
    """Let all ranks compare what has to be alike, unless they have done so for this description before.

    With ``TILEWISE_CHECK=1`` they do so at every call. A rank that sees a new description while the others see a known
    one waits for them, and they for its messages: then the group's timeout ends all of them.

    Args:
        ranks: all of them.
        describe: returns the description; raises where this rank's arguments are wrong.
        check: raises where this rank cannot serve such a call; called where the description is new. Behind it messages
            are under way, and an error leaves the other ranks waiting.

    Raises:
        InvalidInput, UnsupportedProblem: this rank's own error.
        InvalidInput: another rank's; or descriptions that differ.
    """
    error: TilewiseError | None = None
    known = _agreed.setdefault(ranks.group, set())
    try:
        described = describe() if ranks.heads is None else f"mesh {ranks.shape}, {describe()}"
        if described in known and not settings.checks_lengths():
            return
        check()
    except TilewiseError as own:
        error, described = own, f"{_FAILED}{own}"
    said = _said_by_all(ranks, described)
    if error is not None:
        raise error
    for rank, other in enumerate(said):
        if other.startswith(_FAILED):
            raise InvalidInput(f"rank {rank} of the mesh refused the call: {other.removeprefix(_FAILED)}")
    for rank, other in enumerate(said):
        if other != described:
            raise InvalidInput(f"ranks of the mesh disagree about the call: this one has {described}; rank {rank} has "
                               f"{other}.")
    known.add(described)


def _said_by_all(ranks: Ranks, described: str) -> list[str]:
    if ranks.heads is None:
        return agree(ranks.group, described)
    rows = agree(ranks.group, agree(ranks.heads, described))
    return [own for row in rows for own in row]
