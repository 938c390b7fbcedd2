"""Graphs of cuDNN: built once from a description, kept in a bounded cache, run with the tensors of a call."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from tilewise.kernels.cudnn.description import BORDERS_DTYPE, Borders, Description, Port
from tilewise.kernels.cudnn.direct import direct_run
from tilewise.kernels.cudnn.library import frontend, handle_of

_Value = TypeVar("_Value")
# What the operation calls its arguments and results, where that is not our word.
_ARGUMENTS = {"q": "q", "k": "k", "v": "v", "out": "o", "dout": "dO", "lse": "stats", "bias": "bias",
              "sinks": "sink_token", "dbias": "dBias"}
_DTYPES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT", torch.int32: "INT32",
           torch.int64: "INT64"}


class Graph:
    """A built graph: call it with its tensors by name. It holds no tensor between calls, so that threads may share it.

    Attributes:
        description: what it was built from.
        workspace: bytes that it needs beside its tensors.
    """

    def __init__(self, description: Description, device: torch.device) -> None:
        self.description, self._device = description, device
        self._built, numbers = express(description, frontend(), handle_of(device))
        modes = frontend().heur_mode
        self._built.build([modes.A, modes.FALLBACK])
        self._numbers = numbers
        self._running = threading.Lock()  # the front end fills its graph's own list of addresses
        self.workspace: int = self._built.get_workspace_size()
        self._direct = direct_run(self._built, numbers)

    def __call__(self, tensors: Mapping[str | Borders, torch.Tensor]) -> None:
        """Enqueue it on the current stream of its device, which must be current.

        The workspace is torch's, and of this call alone: the allocator knows the stream, and a CUDA graph's pool.
        """
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=self._device)
        handle = handle_of(self._device)
        if self._direct is not None:
            with self._running:
                self._direct(tensors, workspace, handle)
            return
        pack = {self._numbers[name]: tensor for name, tensor in tensors.items()}
        with self._running:
            self._built.execute(pack, workspace, handle=handle)


def express(description: Description, cudnn: Any, handle: Any) -> tuple[Any, dict[str | Borders, int]]:
    """Say the description in the front end's words; return its graph, unbuilt, and each tensor's number in it."""
    numbers: dict[str | Borders, int] = {}
    types = cudnn.data_type
    graph = cudnn.pygraph(io_data_type=getattr(types, _DTYPES[description.inputs[0].dtype]),
                          intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle)

    def number(key: str | Borders) -> int:
        return numbers.setdefault(key, len(numbers) + 1)

    def index(key: str | Borders, name: str, count: int, dtype: torch.dtype) -> Any:
        return graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1],
                            data_type=getattr(types, _DTYPES[dtype]), uid=number(key))

    borders = {key: index(key, f"borders_{key.side}_{key.stride}", description.lengths + 1, BORDERS_DTYPE)
               for key in description.borders}
    starts = {(key.side, key.stride): tensor for key, tensor in borders.items()}

    def tensor(port: Port) -> Any:
        return graph.tensor(name=port.name, dim=list(port.sizes), stride=list(port.strides),
                            data_type=getattr(types, _DTYPES[port.dtype]), uid=number(port.name),
                            ragged_offset=starts[port.side, port.strides[2]] if port.side else None)

    arguments = {_ARGUMENTS[port.name]: tensor(port) for port in description.inputs}
    arguments |= {_ARGUMENTS[port.name]: tensor(port) for port in description.outputs if port.name in _ARGUMENTS
                  and description.direction == "backward"}
    if description.lengths:
        arguments |= {argument: index(key, key, description.lengths, torch.int32)
                      for argument, key in (("seq_len_q", "seqlens_q"), ("seq_len_kv", "seqlens_k"))}
        arguments["use_padding_mask"] = True
    options = _options(description, cudnn)
    if description.direction == "forward":
        made = graph.sdpa(name="attention", generate_stats=True, **arguments, **options)
    else:
        made = graph.sdpa_backward(name="attention_backward", **arguments, **options)
    for result, port in zip(made, description.outputs, strict=False):  # dbias, the last, is an argument
        result.set_output(True).set_dim(list(port.sizes)).set_stride(list(port.strides))
        result.set_data_type(getattr(types, _DTYPES[port.dtype])).set_uid(number(port.name))
        if port.side:
            result.set_ragged_offset(starts[port.side, port.strides[2]])
    return graph, numbers


def _options(description: Description, cudnn: Any) -> dict[str, Any]:
    """What is not a tensor; the scale is cuDNN's 1 unless it is given."""
    corners = cudnn.diagonal_alignment
    options: dict[str, Any] = {"attn_scale": description.scale}
    if description.left_bound is not None or description.right_bound is not None:
        options |= {"diagonal_alignment": corners.BOTTOM_RIGHT if description.bottom_right else corners.TOP_LEFT}
    options |= {name: bound for name, bound in (("diagonal_band_left_bound", description.left_bound),
                                                ("diagonal_band_right_bound", description.right_bound))
                if bound is not None}
    if description.totals is not None:
        options |= {"max_total_seq_len_q": description.totals[0], "max_total_seq_len_kv": description.totals[1]}
    return options


class Cache(Generic[_Value]):
    """The last so many values by key, each made once: who asks for one that is being made waits for it, and no other.

    functools.lru_cache would let two threads make one value twice; a graph takes cuDNN up to a second.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._values: OrderedDict[Hashable, Future[_Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the value of the key, made by ``make`` where it is not there."""
        with self._lock:
            value = self._values.get(key)
            is_mine = value is None
            if value is None:
                value = self._values[key] = Future()
                if len(self._values) > self._size:
                    self._values.popitem(last=False)
            self._values.move_to_end(key)
        if is_mine:
            try:
                value.set_result(make())
            except BaseException as error:  # whoever waits is to raise it too, and the next one to try again
                with self._lock:
                    if self._values.get(key) is value:
                        del self._values[key]
                value.set_exception(error)
        return value.result()


_graphs: Cache[Graph | str] = Cache(256)
_captured: set[Graph] = set()  # a CUDA graph runs the kernels of these when nobody asks here: they are never let go


def graph_of(description: Description, device: torch.device) -> Graph | str:
    """Return the graph of the description on the device, or the sentence with which cuDNN refuses it.

    cuDNN answers for a graph as a whole, when it is built: asked once, the answer is kept either way.
    """
    return _graphs.get((description, device), lambda: _built(description, device))


def _built(description: Description, device: torch.device) -> Graph | str:
    with torch.cuda.device(device):
        try:
            return Graph(description, device)
        except frontend().cudnnGraphNotSupportedError as refusal:
            return f"is refused by cuDNN itself: {_told(str(refusal))}"


def _told(words: str) -> str:
    """Shorten cuDNN's words: where every engine has some, those that say more than that it declined, each once."""
    reasons = dict.fromkeys(re.findall(r"Reason: (.+?) at: ", words))
    return f"no engine of it takes the graph ({'; '.join(reasons)})" if reasons else " ".join(words.split())
