"""A double of cuDNN's front end, for machines without a GPU: it takes the calls that our code makes, and computes.

It knows tensors as a graph does, by sizes, strides and a first address, and reads nothing else of what it is handed.
Where cuDNN promises nothing, in rows that see nothing, it writes NaN.
"""

from types import SimpleNamespace

import torch

NAN = float("nan")
TYPES = {name: name for name in ("HALF", "BFLOAT16", "FLOAT", "INT32", "INT64")}
DTYPES = {"HALF": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32, "INT32": torch.int32,
          "INT64": torch.int64}


class GraphNotSupportedError(Exception):
    """What a refused graph raises."""


class Tensor:
    """A tensor of a graph."""

    def __init__(self, dim=None, stride=None, data_type=None, uid=None, name="", ragged_offset=None):
        self.dim, self.stride, self.data_type, self.uid = dim, stride, data_type, uid
        self.name, self.ragged_offset, self.is_output = name, ragged_offset, False

    def _set(self, **fields):
        self.__dict__.update(fields)
        return self

    def set_output(self, value):
        return self._set(is_output=value)

    def set_dim(self, dim):
        return self._set(dim=dim)

    def set_stride(self, stride):
        return self._set(stride=stride)

    def set_data_type(self, data_type):
        return self._set(data_type=data_type)

    def set_uid(self, uid):
        return self._set(uid=uid)

    def set_ragged_offset(self, tensor):
        return self._set(ragged_offset=tensor)


class Graph:
    """A graph with one operation."""

    def __init__(self, double, **options):
        self.double, self.options, self.arguments, self.results = double, options, {}, []
        double.graphs.append(self)

    def tensor(self, **fields):
        return Tensor(**fields)

    def sdpa(self, **arguments):
        return self._operation(arguments, 2)

    def sdpa_backward(self, **arguments):
        return self._operation(arguments, 3)

    def _operation(self, arguments, count):
        self.arguments, self.results = arguments, [Tensor() for _ in range(count)]
        return self.results

    def build(self, modes):
        if self.double.refusal is not None:
            raise GraphNotSupportedError(self.double.refusal)
        self.double.while_building()

    def get_workspace_size(self):
        return 64

    def execute(self, pack, workspace, handle):
        assert workspace.numel() == 64
        self.double.while_running()
        self.double.runs.append((self, {**pack}))
        compute = _forward if "stats" not in self.arguments else _backward
        ports = {**{name: tensor for name, tensor in self.arguments.items() if isinstance(tensor, Tensor)},
                 **dict(zip(("o", "stats") if compute is _forward else ("dQ", "dK", "dV"), self.results, strict=True))}
        for tensor in ports.values():
            given = pack[tensor.uid]
            assert given.dtype is DTYPES[tensor.data_type], tensor.name
            assert given.data_ptr() % 16 == 0, tensor.name
        count = ports["q"].dim[0]
        for n in range(count):
            parts = {name: _part(pack, tensor, n) for name, tensor in ports.items() if not name.startswith("seq_len")}
            lengths = [int(pack[ports[name].uid].flatten()[n]) if name in ports else ports[like].dim[2]
                       for name, like in (("seq_len_q", "q"), ("seq_len_kv", "k"))]
            compute(self.arguments, parts, lengths)


def _part(pack, tensor, n):
    """The n-th entry of a tensor, (h, s, d), by what the graph says of it."""
    given = pack[tensor.uid]
    start = given.storage_offset()
    if tensor.ragged_offset is not None:
        start += int(pack[tensor.ragged_offset.uid].flatten()[n])
        following = int(pack[tensor.ragged_offset.uid].flatten()[n + 1])
        rows = (following + given.storage_offset() - start) // tensor.stride[2]
    else:
        start += n * tensor.stride[0] if tensor.dim[0] > 1 else 0
        rows = tensor.dim[2]
    return torch.as_strided(given, (tensor.dim[1], rows, tensor.dim[3]), tensor.stride[1:], start)


def _scores(arguments, parts, lengths):
    """(hq, sq, sk) of what takes part, −inf where hidden; of cuDNN's own conventions."""
    sq, sk = lengths
    q, k = parts["q"][:, :sq].float(), parts["k"][:, :sk].float()
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * arguments.get("attn_scale", 1.0)
    if "bias" in parts:
        scores = scores + parts["bias"][:, :sq, :sk].float()
    rows, columns = torch.arange(sq)[:, None], torch.arange(sk)
    if arguments.get("diagonal_alignment") == "BOTTOM_RIGHT":
        rows = rows + sk - sq
    left, right = (arguments.get(f"diagonal_band_{side}_bound") for side in ("left", "right"))
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if left is not None:
        assert left > 0
        assert arguments.get("use_padding_mask") or parts["q"].shape[1] <= parts["k"].shape[1]
        hidden |= columns <= rows - left
    if right is not None:
        assert right >= 0
        hidden |= columns > rows + right
    return scores.masked_fill(hidden, float("-inf"))


def _forward(arguments, parts, lengths):
    scores = _scores(arguments, parts, lengths)
    columns = scores
    if "sink_token" in parts:
        columns = torch.cat([scores, parts["sink_token"].expand(len(scores), scores.shape[1], 1)], -1)
    lse = columns.logsumexp(-1)
    v = parts["v"][:, :lengths[1]].float()
    out = (scores - lse[..., None]).exp() @ v.repeat_interleave(len(scores) // len(v), 0)
    blind = (scores == float("-inf")).all(-1)
    hidden_by_bias = blind & ("bias" in parts)
    sq = lengths[0]
    if "ragged" not in parts:
        for port in ("o", "stats"):
            parts[port].fill_(NAN)
    parts["o"][:, :sq] = torch.where(blind[..., None], NAN, out).to(parts["o"].dtype)
    lse = torch.where(blind & ~hidden_by_bias & ("sink_token" not in parts), NAN, lse)
    parts["stats"][:, :sq] = lse[..., None]


def _backward(arguments, parts, lengths):
    sq, sk = lengths
    scores = _scores(arguments, parts, lengths)
    probs = (scores - parts["stats"][:, :sq]).exp()
    q, o, dout = (parts[name][:, :sq].float() for name in ("q", "o", "dO"))
    k, v = (parts[name][:, :sk].float() for name in ("k", "v"))
    group = len(q) // len(k)
    delta = torch.where((scores == float("-inf")).all(-1), 0.0, (o * dout).sum(-1))
    dscores = torch.where(probs == 0, 0.0, probs * (dout @ v.repeat_interleave(group, 0).mT - delta[..., None]))
    scale = arguments.get("attn_scale", 1.0)
    blind = (scores == float("-inf")).all(-1)[..., None]
    unseen = (scores == float("-inf")).all(1).unflatten(0, (len(k), group)).all(1)[..., None]
    clean = torch.where(blind, 0.0, dout)
    made = {"dQ": torch.where(blind, NAN, dscores @ k.repeat_interleave(group, 0) * scale),
            "dK": torch.where(unseen, NAN, (dscores.mT @ q * scale).unflatten(0, (len(k), group)).sum(1)),
            "dV": torch.where(unseen, NAN, (probs.mT @ clean).unflatten(0, (len(k), group)).sum(1))}
    for name, length in (("dQ", sq), ("dK", sk), ("dV", sk)):
        parts[name].fill_(NAN)
        parts[name][:, :length] = made[name].to(parts[name].dtype)
    if "dBias" in parts:
        target = parts["dBias"]
        assert target.dtype is parts["q"].dtype
        once = [dim for dim in range(3) if target.shape[dim] == 1 and dscores.shape[dim] > 1]
        target += (dscores.sum(once, keepdim=True) if once else dscores).to(target.dtype)


class Double:
    """The module, with what was asked of it.

    Attributes:
        graphs: every graph that was begun.
        runs: the graph and the tensors, by their numbers, of every run.
        refusal: what the next graphs are refused with; None = nothing.
        while_building, while_running: called in every build and in every run.
    """

    cudnnGraphNotSupportedError = GraphNotSupportedError  # noqa: N815 - its name there
    data_type = SimpleNamespace(**TYPES)
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")

    def __init__(self):
        self.graphs, self.runs, self.handles, self.streams, self.refusal = [], [], [], [], None
        self.while_building = self.while_running = lambda: None

    def pygraph(self, **options):
        return Graph(self, **options)

    def create_handle(self):
        self.handles.append(f"handle {len(self.handles)}")
        return self.handles[-1]

    def set_stream(self, handle, stream):
        self.streams.append((handle, stream))
