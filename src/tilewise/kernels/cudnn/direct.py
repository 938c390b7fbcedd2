"""Running a built graph by addresses, past the front end's reading of every tensor at every call.

``pygraph.execute`` asks each tensor for its shape, strides and dtype, for engines of the front end's own, and hands
cuDNN's plan the addresses alone: those go there at once here. For this, names inside of the front end are needed, which
no promise covers: only versions that have been read are taken, and only a graph that has all of them.
"""

from array import array
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from tilewise.kernels.cudnn.library import frontend_version

READ_VERSIONS = ((1, 28), (1, 32))
DirectRun = Callable[[Mapping[Any, torch.Tensor], torch.Tensor, Any], None]


def direct_run(built: Any, numbers: Mapping[Any, int]) -> DirectRun | None:
    """Return what runs a built graph, given its tensors by name, a workspace and a handle; None = by execute alone.

    Args:
        built: the front end's graph.
        numbers: of each tensor's name.
    """
    if frontend_version() not in READ_VERSIONS:
        return None
    lowered: Any = getattr(built, "_lowered_graph", None)
    lacking = [name for name in ("_execute_with_raw_ptrs", "_prepare_variant_pack_template",
                                 "_get_variant_pack_uids_sorted") if not hasattr(lowered, name)]
    if lacking or built.selected_engine is not None:  # an engine of the front end's own reads the tensors
        return None
    lowered._prepare_variant_pack_template()
    names: dict[int, Hashable] = {number: name for name, number in numbers.items()}
    order = [names.get(number) for number in lowered._get_variant_pack_uids_sorted()]
    if not order or None in order:
        return None
    plan = built._plans[built._plan_index].cpp_index if built._plans else None
    return _bound(lowered._execute_with_raw_ptrs, order, -1 if plan is None else plan)


def _bound(execute: Callable[..., None], order: list[Any], plan: int) -> DirectRun:
    count = len(order)

    def run(tensors: Mapping[Any, torch.Tensor], workspace: torch.Tensor, handle: Any) -> None:
        addresses = array("Q", [tensors[name].data_ptr() for name in order])
        execute(addresses.buffer_info()[0], count, workspace.data_ptr(), handle.backend_handle, plan)

    return run
