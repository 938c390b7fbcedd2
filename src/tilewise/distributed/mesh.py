"""The ranks that share a sequence: checks of the device mesh, and of what ranks have to have alike."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise import settings
from tilewise.distributed.exchange import agree
from tilewise.errors import InvalidInput, TilewiseError
from tilewise.validate.distributed import check_mesh

# What the ranks of a group have agreed on: asked once, for it costs the host a wait.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_FAILED = "\0"  # begins what a rank says whose arguments are wrong


def group_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int, int]:
    """Return a mesh's process group, the own rank in it and the number of ranks.

    Raises:
        InvalidInput: something else than a mesh, one of several dims, or one that this process is no part of.
    """
    check_mesh(mesh, is_mesh=isinstance(mesh, DeviceMesh))
    group = mesh.get_group()
    return group, dist.get_rank(group), dist.get_world_size(group)


def check_ranks_agree(group: dist.ProcessGroup, describe: Callable[[], str],
                      check: Callable[[], None] = lambda: None) -> None:
    """Let all ranks compare what has to be alike, unless they have done so for this description before.

    With ``TILEWISE_CHECK=1`` they do so at every call. A rank that sees a new description while the others see a known
    one waits for them, and they for its messages: then the group's timeout ends all of them.

    Args:
        group: the process group.
        describe: returns the description; raises where this rank's arguments are wrong.
        check: raises where this rank cannot serve such a call; called where the description is new. Behind it messages
            are under way, and an error leaves the other ranks waiting.

    Raises:
        InvalidInput, UnsupportedProblem: this rank's own error.
        InvalidInput: another rank's; or descriptions that differ.
    """
    error: TilewiseError | None = None
    known = _agreed.setdefault(group, set())
    try:
        described = describe()
        if described in known and not settings.checks_lengths():
            return
        check()
    except TilewiseError as own:
        error, described = own, f"{_FAILED}{own}"
    said = agree(group, described)
    if error is not None:
        raise error
    for rank, other in said.items():
        if other.startswith(_FAILED):
            raise InvalidInput(f"rank {rank} of the mesh refused the call: {other.removeprefix(_FAILED)}")
    for rank, other in said.items():
        if other != described:
            raise InvalidInput(f"ranks of the mesh disagree about the call: this one has {described}; rank {rank} has "
                               f"{other}.")
    known.add(described)
