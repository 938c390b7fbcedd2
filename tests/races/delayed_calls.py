"""Make one call with each role of its kernels late in turn, and compare with nobody late: run as a process of its own.

    python tests/races/delayed_calls.py run NAME
    python tests/races/delayed_calls.py compile NAME ...

The first prints a row in JSON, the second, which needs no GPU, one of the kernels of all. The kernels are builds of
races/delays.py, in caches of this process alone. Between two calls that are compared comes one with other inputs, so
that nothing is right by what was left in memory.
"""

import json
import os
import sys
import tempfile
from typing import NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = os.environ["TILEWISE_CACHE"] = tempfile.mkdtemp(prefix="tilewise-delays-")

import torch

from conformance.calls import backpropagate, operands_of, trainable
from races import delays
from tilewise.masks import Mask, causal, window
from tilewise.testing.cases import Case
from tilewise.testing.inputs import call, make_inputs
from tilewise.testing.oracle import Changes, attend, gradients, yardsticks
from tilewise.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

CYCLES = 5000  # of a delay
# Whose delays last: all programs', and every other one's, for what programs tell one another.
PROGRAMS = {"all": 0, "even": 1}
FORWARD, D64, BACKWARD = "hopper_forward_kernel", "hopper_backward_d64_kernel", "hopper_backward_kernel"
D192, D256, DQ_D256 = "hopper_backward_d192_kernel", "hopper_backward_d256_kernel", "hopper_dq_d256_kernel"
DBIAS, COMBINE, DECODE = "hopper_dbias_kernel", "combine_splits_kernel", "attention_decode_kernel"
COMBINE_DECODED = "combine_kernel"
_MASKS = {"full": Mask(), "causal": causal("bottom_right"), "window": window(100, 20, "top_left")}


class Delayed(NamedTuple):
    """A call, the roles of those of its kernels that are built with delays, and its results with one set of bits."""

    case: Case
    roles: dict[str, int]
    backend: str = "gluon"
    deterministic: bool = False
    backward: bool = False
    repeats: tuple[str, ...] = ("out", "lse")


def _case(heads: int, length: int, d: int, mask: str, dv: int | None = None, **others) -> Case:
    sizes = {"b": 1, "hq": heads, "hk": heads, "sq": length, "sk": length} | others
    return Case("delayed", d=d, dv=dv or d, mask=_MASKS[mask], **sizes)


_DATA = {"b": 3, "lengths_q": (300, 1, 129), "lengths_k": (257, 70, 300)}
_GRADIENTS = ("dq", "dk", "dv")


def _calls() -> dict[str, Delayed]:
    found = {}
    for mask in _MASKS:
        found |= {
            f"forward_1_{mask}": Delayed(_case(2, 600, 128, mask), {FORWARD: 2}),
            f"forward_2_{mask}": Delayed(_case(33, 600, 128, mask), {FORWARD: 3}),
            f"forward_256_{mask}": Delayed(_case(2, 600, 256, mask), {FORWARD: 3} | (
                {} if mask == "window" else {COMBINE: 4})),
            f"narrow_in_order_{mask}": _gradients(_case(2, 600, 64, mask), {D64: 6}, deterministic=True),
            f"narrow_alone_{mask}": _gradients(_case(132, 300, 64, mask), {D64: 4}),
            f"narrow_shared_{mask}": _gradients(_case(66, 1000, 64, mask), {D64: 6}),
            f"backward_in_order_{mask}": _gradients(_case(2, 600, 128, mask), {BACKWARD: 5}, deterministic=True),
            f"backward_stays_{mask}": _gradients(_case(33, 600, 128, mask), {BACKWARD: 3}, repeats=("dk", "dv")),
            f"backward_alone_{mask}": _gradients(_case(132, 300, 128, mask), {BACKWARD: 3}),
            f"pieces_{mask}": _gradients(_case(2, 600, 192, mask, 128), {D192: 3}, repeats=("dk", "dv")),
            f"wide_{mask}": _gradients(_case(2, 600, 256, mask), {D256: 3, DQ_D256: 3}),
            f"dbias_{mask}": _gradients(_case(16, 1200, 128, mask, b=4, bias="1hqk"),
                                        {DBIAS: 4 if mask == "full" else 5}, backend="triton",
                                        repeats=(*_GRADIENTS, "dbias")),
        }
    for mask in ("full", "causal"):
        found |= {
            f"narrow_drawn_{mask}": _gradients(_case(33, 600, 64, mask), {D64: 4}, repeats=("dk", "dv")),
            f"narrow_biased_{mask}": _gradients(_case(33, 600, 64, mask, bias="1hqk"), {D64: 4}, repeats=("dk", "dv")),
            f"backward_biased_{mask}": _gradients(_case(33, 600, 128, mask, bias="1hqk"), {BACKWARD: 3},
                                                  repeats=("dk", "dv")),
        }
    for packed in ("", "tight"):
        kind = "packed" if packed else "lengths"
        data = _DATA | {"packed": packed}
        found |= {
            f"forward_{kind}": Delayed(_case(4, 300, 64, "causal", **data), {FORWARD: 3}),
            f"backward_64_{kind}": _gradients(_case(4, 300, 64, "causal", **data), {BACKWARD: 3}, repeats=("dk", "dv")),
            f"backward_128_{kind}": _gradients(_case(4, 300, 128, "full", **data), {BACKWARD: 3},
                                               repeats=("dk", "dv")),
            f"wide_{kind}": _gradients(_case(4, 300, 256, "causal", **data), {D256: 3, DQ_D256: 3}),
        }
    return found | {
        "forward_3_full": Delayed(_case(20, 1100, 64, "full"), {FORWARD: 4}),
        "forward_3_causal": Delayed(_case(132, 2048, 64, "causal"), {FORWARD: 4}),
        "forward_comes_again": Delayed(_case(33, 600, 128, "causal", scale=8.0), {FORWARD: 3}),
        "forward_cut": Delayed(_case(2, 600, 128, "full", sk=8000), {FORWARD: 3, COMBINE: 4}),
        "forward_cut_in_part": Delayed(_case(33, 1100, 256, "full"), {FORWARD: 3, COMBINE: 4}),
        "forward_packed_heads": Delayed(_case(8, 7, 128, "full", hk=2, sk=6000), {FORWARD: 2, COMBINE: 4}),
        "decode": Delayed(_case(8, 1, 128, "full", hk=2, sk=6000), {DECODE: 4, COMBINE_DECODED: 4}, backend="triton"),
    }


def _gradients(case: Case, roles: dict[str, int], **options) -> Delayed:
    return Delayed(case, roles, backward=True, **{"repeats": _GRADIENTS} | options)


CALLS = _calls()


def make_call(delayed: Delayed, device: torch.device | str, seed: int):
    """Return what makes the call anew, as results by name, and its inputs and operands."""
    from tilewise import attention_decode

    case = delayed.case
    inputs = make_inputs(case, torch.bfloat16, device, seed)
    operands = operands_of(case, inputs)
    if DECODE in delayed.roles:
        def decode():
            got = attention_decode(*inputs[:3], return_aux=("lse",), backend=delayed.backend)
            return {"out": got.out, "lse": got.lse}

        return decode, inputs, operands
    leaves = [tensor.detach().requires_grad_(delayed.backward) for tensor in inputs[:3]]
    trained = trainable(operands) if delayed.backward else {}
    operands = operands._replace(**trained)

    def attended():
        got = call(case, leaves, operands, return_aux=("lse",), backend=delayed.backend,
                   deterministic=delayed.deterministic)
        found = {"out": got.out, "lse": got.lse}
        if delayed.backward:
            names = (*_GRADIENTS, *(f"d{name}" for name in trained))
            found |= dict(zip(names, backpropagate(got, [*leaves, *trained.values()], inputs, "out"), strict=True))
        return {name: tensor.detach() for name, tensor in found.items()}

    return attended, inputs, operands


def judge(delayed: Delayed, inputs, operands):
    """Return what tells of results by name which are over their budgets; of many heads the first two are looked at."""
    few = slice(0, 2) if delayed.case.hq == delayed.case.hk else slice(None)
    q, k, v, dout, _ = [tensor[:, few] for tensor in inputs]
    if operands.bias is not None:
        operands = operands._replace(bias=operands.bias[:, few])
    changes, mask, scale = Changes(operands, delayed.case.settings), delayed.case.mask, delayed.case.scale
    exact = dict(zip(("out", "lse"), attend(q, k, v, mask, scale, changes), strict=True))
    if delayed.backward:
        exact |= _named(gradients(q, k, v, dout, None, mask, scale, changes))
    samples = [{"out": sample.out, "lse": sample.lse} | (_named(sample.gradients) if delayed.backward else {})
               for sample in yardsticks(q, k, v, dout, None, mask, scale, changes)]

    def over_budget(found: dict[str, torch.Tensor]) -> list[str]:
        factors = {name: GRADIENT_FACTOR if name.startswith("d") else OUTPUT_FACTOR for name in found}
        reports = [compare(name, result[:, few], exact[name], [sample[name] for sample in samples], factors[name])
                   for name, result in found.items()]
        return [str(report) for report in reports if not report.ok]

    return over_budget


def _named(found) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in found._asdict().items() if tensor is not None}


class Modules:
    """The loaded kernels that were built with delays: their roles, and where each one's words lie on the device."""

    def __init__(self, names) -> None:
        self.names, self.roles, self._handles = names, {}, {}

    def watch(self) -> None:
        """Have all kernels of these names built with delays, and remember what is loaded."""
        from tilewise.kernels import driver

        delays.install(self.names, lambda name, *built: self.roles.update({name: delays.roles_of(*built)}))
        load = driver.load

        def remembering(image, device):
            function = load(image, device)
            if image.name in self.names:
                self._handles.setdefault(image.name, set()).add(function.handle)
            return function

        driver.load = remembering

    def check(self) -> None:
        """Raise if not just these kernels were loaded, each in one build."""
        found = {name: len(handles) for name, handles in self._handles.items()}
        if found != dict.fromkeys(self.names, 1):
            raise RuntimeError(f"loaded were {found}, wanted one each of {self.names}")

    def set(self, name: str, role, programs: int = 0) -> None:
        """Make a role of a kernel late from its next launch on; None: nobody."""
        from tilewise.kernels.driver import bindings, checked

        words = delays.words(role, CYCLES, programs)
        checked(bindings().cuMemcpyHtoD(self._place(name, delays.WORDS, len(words)), words, len(words)), name)

    def taken(self, name: str) -> int:
        """Return how many delays threads of a kernel have taken since this was last asked, modulo 2^32."""
        from tilewise.kernels.driver import bindings, checked

        place, count = self._place(name, delays.COUNT, 4), bytearray(4)
        checked(bindings().cuMemcpyDtoH(count, place, 4), name)
        checked(bindings().cuMemcpyHtoD(place, bytes(4), 4), name)
        return int.from_bytes(count, "little")

    def _place(self, name: str, symbol: str, wanted: int):
        """Return where a kernel's variable lies on the device."""
        from tilewise.kernels.driver import bindings, checked

        cuda = bindings()
        (handle,) = self._handles[name]
        library = checked(cuda.cuKernelGetLibrary(cuda.CUkernel(handle)), name)
        place, size = checked_pair(cuda.cuLibraryGetGlobal(library, symbol.encode()), name)
        if size != wanted:
            raise RuntimeError(f"{name}: {symbol} takes {size} bytes, not {wanted}")
        return place


def checked_pair(result, what):
    """Return both values of a call of the driver."""
    from tilewise.kernels.driver import checked

    status, first, second = result
    checked((status,), what)
    return first, second


def main(name: str) -> dict:
    """Make the call with nobody late and with each role late; return what differed, and how long each took."""
    delayed, device = CALLS[name], torch.device("cuda", 0)
    torch.cuda.set_device(device)
    modules = Modules(tuple(delayed.roles))
    modules.watch()
    run, inputs, operands = make_call(delayed, device, seed=0)
    others, _, _ = make_call(delayed, device, seed=1)

    def fresh():
        others()
        found = run()
        torch.cuda.synchronize()
        return found

    want = fresh()
    modules.check()
    for kernel in delayed.roles:
        modules.set(kernel, None)
    want = fresh()
    over_budget = judge(delayed, inputs, operands)
    found = {"over_budget": over_budget(want), "differing": differing(want, fresh(), delayed.repeats),
             "roles": {kernel: len(roles) for kernel, roles in modules.roles.items()}, "late": []}
    for kernel, roles in modules.roles.items():
        for role in roles:
            for programs, mask in PROGRAMS.items():
                others()
                torch.cuda.synchronize()
                modules.set(kernel, role, mask)
                results = run()
                torch.cuda.synchronize()
                modules.set(kernel, None)
                found["late"].append({
                    "kernel": kernel, "first_warp": role.first, "warps": role.count, "programs": programs,
                    "delays": modules.taken(kernel),
                    "differing": differing(want, results, delayed.repeats),
                    "over_budget": [] if set(results) == set(delayed.repeats) and not differing(
                        want, results, delayed.repeats) else over_budget(results)})
    return found


def differing(want: dict[str, torch.Tensor], results: dict[str, torch.Tensor], names) -> list[str]:
    """Return the names of those that are not the same bits."""
    return [name for name in names if not torch.equal(_bits(want[name]), _bits(results[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def compiled(names: list[str]) -> dict[str, dict]:
    """Compile the kernels of calls for an H200 that need not be here; return what PTX says of each one's build."""
    from tilewise.compile_ahead.gpu import GPUS, Settings, on_fake_gpu, prepare

    prepare(GPUS["h200"], Settings.here())
    found: dict[str, dict] = {}
    for name in names:
        roles, built = CALLS[name].roles, {}

        def note(kernel, ptx, partitions, built=built):
            late = delays.with_delays(ptx)
            built[kernel] = {"roles": delays.roles_of(ptx, partitions), "delays": late.count(delays.DELAY),
                             "in_default": delays.WORDS in ptx,
                             "alike": late.replace(delays.DELAY, "").replace(delays.DECLARED, "") == ptx}

        def take(kernel, compile_kernel, file=None, roles=roles, built=built):
            if kernel in roles:
                made = compile_kernel()
                built[kernel]["in_cubin"] = delays.WORDS.encode() in made.asm["cubin"]

        delays.install(roles, note)
        with on_fake_gpu(take):
            make_call(CALLS[name], "cuda", 0)[0]()
        found[name] = built
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[2:]) if sys.argv[1] == "run" else compiled(sys.argv[2:])))
