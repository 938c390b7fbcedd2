"""A launch past Triton's front end and its launcher: what the driver is handed, and when Triton launches after all."""

import gc
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from emulation.hopper_calls import bound_forward
from launch.driver_double import DriverDouble, cubin_of
from tilewise.kernels import driver
from tilewise.kernels import enqueue as module
from tilewise.kernels.enqueue import Enqueue, unspecialized
from tilewise.kernels.hooks import compile_only
from tilewise.kernels.hopper import launch as launching
from tilewise.kernels.hopper.forward import launch as forward_launch
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, window
from tilewise.problem import AttentionProblem

BLOCK = [8, 64]
LAYOUT = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": BLOCK, "fp4_padded": False}
SIZES = [*[128, 4, 4, 8, 8] * 2, 8, 4, 4]  # two descriptors, a pointer, an integer, a float
FORMATS = [*["128s", "i", "i", "q", "q"] * 2, "Q", "i", "f", "Q", "Q"]
OPTIONS = {"num_warps": 4}


class Compiled:
    """A compiled kernel of two descriptors and a pointer; ``launched``: by Triton."""

    src = SimpleNamespace(signature={"q": "tensordesc<bf16[8, 64]>", "out": "tensordesc<bf16[8, 64]>", "plain": "*fp32",
                                     "absent": "constexpr", "sq": "i32", "scale": "fp32"})
    asm = {"cubin": cubin_of(SIZES)}  # noqa: RUF012 - never changed

    def __init__(self, **metadata):
        self.launched = []
        self.metadata = SimpleNamespace(**{
            "name": "kernel", "num_warps": 4, "shared": 64, "num_ctas": 1, "global_scratch_size": 0,
            "profile_scratch_size": 0, "launch_cooperative_grid": False, "instrumentation_mode": "",
            "launch_pdl": False, "tensordesc_meta": [LAYOUT, LAYOUT]} | metadata)

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


class Kernel:
    """A kernel whose front end hands out one compiled for the alignment of the arguments."""

    __name__ = "kernel"

    def __init__(self, **metadata):
        self.front_end, self.compiled, self.metadata = [], [], metadata

    def warmup(self, *arguments, grid, **options):
        self.front_end.append((grid, arguments, options))
        self.compiled.append(Compiled(**self.metadata))
        return self.compiled[-1]


class Interpreted:
    """A kernel under Triton's interpreter, which compiles nothing."""

    def __init__(self):
        self.launched = []

    def warmup(self, *arguments, grid, **options):
        return None

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))


@pytest.fixture
def cuda(monkeypatch):
    """A driver whose current device is 3, and its current stream 77."""
    made = DriverDouble()
    monkeypatch.setattr(driver, "bindings", lambda: made)
    monkeypatch.setattr(driver, "raw_stream", lambda: lambda device: 77)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver.load.cache_clear()
    yield made
    driver.load.cache_clear()


@pytest.fixture
def enqueue(cuda):
    return Enqueue(Kernel(), (5,), (128, 0.5), OPTIONS)


def tensors_of(rows=16, shift=0):
    """q and out, which come through descriptors, and a plain one ``shift`` bytes past a multiple of 16."""
    store = torch.zeros(8)
    assert store.data_ptr() % 16 == 0
    return *(torch.zeros(rows, 64, dtype=torch.bfloat16) for _ in range(2)), store[shift // 4:]


def descriptor_of(tensor):
    layout = gl.NVMMASharedLayout.get_default_for(BLOCK, gl.bfloat16)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), BLOCK, layout)


def addresses_of(tensors):
    return (*(tensor.data_ptr() for tensor in tensors), None)


def call(enqueue, tensors):
    q, out, plain = tensors
    enqueue(addresses_of(tensors), lambda: (descriptor_of(q), descriptor_of(out), plain, None))


def handed(cuda):
    """Of each launch through the driver: the addresses, and the other parameters."""
    made = []
    for launch in cuda.launches:
        values = [struct.unpack_from(f"<{kind}", launch.parameters, offset)[0]
                  for kind, offset in zip(FORMATS, launch.offsets, strict=True)]
        (q_map, *q_form), (out_map, *out_form), (plain, *others) = values[:5], values[5:10], values[10:]
        assert others == [128, 0.5, 0, 0]
        assert q_form == out_form == [16, 64, 64, 1]
        made.append((cuda.map_in(q_map, 0)[2], cuda.map_in(out_map, 0)[2], plain, None))
    return made


def test_every_call_goes_past_the_launcher_and_the_first_alone_through_the_front_end(enqueue, cuda):
    first, second = tensors_of(), tensors_of()
    call(enqueue, first)
    (grid, arguments, options), = enqueue.kernel.front_end
    assert (grid, options, arguments[3:]) == ((5,), OPTIONS, (None, 128, 0.5))
    assert [argument.base for argument in arguments[:2]] == [first[0], first[1]]
    enqueue(addresses_of(second), lambda: pytest.fail("the front end's arguments are not wanted"))
    assert handed(cuda) == [addresses_of(first), addresses_of(second)]
    assert [(launch.grid, launch.stream) for launch in cuda.launches] == [((5, 1, 1), 77)] * 2
    assert len(enqueue.kernel.front_end) == 1
    assert enqueue.kernel.compiled[0].launched == []


def test_every_dim_of_the_grid_is_handed(cuda):
    enqueue = Enqueue(Kernel(), (5, 7), (128, 0.5), OPTIONS)
    call(enqueue, tensors_of())
    assert cuda.launches[0].grid == (5, 7, 1)


@pytest.mark.parametrize("grid", [(0,), (0, 7), (5, 0)])
def test_a_grid_without_ctas_enqueues_nothing(cuda, grid):
    enqueue = Enqueue(Kernel(), grid, (128, 0.5), OPTIONS)
    call(enqueue, tensors_of())
    call(enqueue, tensors_of())
    assert cuda.launches == []


def test_so_many_sets_of_arguments_are_kept_and_the_least_used_goes(cuda, monkeypatch):
    monkeypatch.setattr(driver, "KEPT", 2)
    enqueue, (a, b, c) = Enqueue(Kernel(), (5,), (128, 0.5), OPTIONS), [tensors_of() for _ in range(3)]
    for tensors in (a, a, b, c):
        call(enqueue, tensors)
    cuda.encoded.clear()
    for tensors in (b, c):
        call(enqueue, tensors)
    assert cuda.encoded == []
    call(enqueue, a)
    assert [one[2] for one in cuda.encoded] == [a[0].data_ptr(), a[1].data_ptr()]


def test_calls_that_are_alike_share_a_kernel_whatever_their_alignments_look_like(enqueue, cuda):
    q, out, plain = tensors_of()
    for _ in range(3):
        enqueue(addresses_of((q, out, plain)), lambda: (descriptor_of(q), descriptor_of(out), plain, None), alike=True)
    assert len(enqueue.kernel.front_end) == 1
    assert handed(cuda) == [addresses_of((q, out, plain))] * 3


def test_another_alignment_gets_the_kernel_compiled_for_it(enqueue, cuda):
    aligned, shifted = tensors_of(), tensors_of(shift=4)
    for tensors in (aligned, shifted, shifted, aligned):
        call(enqueue, tensors)
    assert len(enqueue.kernel.front_end) == 2
    assert handed(cuda) == [addresses_of(tensors) for tensors in (aligned, shifted, shifted, aligned)]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hooks_see_every_launch(enqueue, cuda, name):
    tensors, hooks = tensors_of(), getattr(knobs.runtime, name)
    call(enqueue, tensors)

    def hook(metadata):
        pass

    hooks.add(hook)
    try:
        call(enqueue, tensors)
    finally:
        hooks.remove(hook)
    call(enqueue, tensors)
    assert len(enqueue.kernel.front_end) == 1
    assert len(cuda.launches) == 2
    ((grid, arguments),) = enqueue.kernel.compiled[0].launched
    assert (grid, arguments[2:]) == ((5, 1, 1), (tensors[2], None, 128, 0.5))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_in_the_place_of_the_chain_is_seen_and_none_is_no_hook(enqueue, cuda, monkeypatch, name):
    tensors = tensors_of()
    call(enqueue, tensors)
    monkeypatch.setattr(knobs.runtime, name, None, raising=False)
    call(enqueue, tensors)
    monkeypatch.setattr(knobs.runtime, name, print, raising=False)
    call(enqueue, tensors)
    assert (len(cuda.launches), len(enqueue.kernel.compiled[0].launched)) == (2, 1)


@pytest.mark.parametrize("metadata", [{"num_ctas": 2}, {"tensordesc_meta": [LAYOUT, LAYOUT | {"swizzles": [3]}]}],
                         ids=["clusters", "another Triton"])
def test_a_kernel_that_the_driver_does_not_know_is_launched_by_triton(cuda, metadata):
    enqueue, tensors = Enqueue(Kernel(**metadata), (5,), (128, 0.5), OPTIONS), tensors_of()
    for _ in range(2):
        call(enqueue, tensors)
    assert len(enqueue.kernel.front_end) == 1
    assert cuda.launches == []
    for grid, arguments in enqueue.kernel.compiled[0].launched:
        assert grid == (5, 1, 1)
        assert [argument.base for argument in arguments[:2]] == [tensors[0], tensors[1]]
        assert arguments[2:] == (tensors[2], None, 128, 0.5)


def test_without_cuda_bindings_triton_launches(cuda, monkeypatch):
    def lacking():
        raise driver.UnknownKernel("the package cuda-bindings is not there")

    monkeypatch.setattr(driver, "bindings", lacking)
    enqueue, tensors = Enqueue(Kernel(), (5,), (128, 0.5), OPTIONS), tensors_of()
    for _ in range(2):
        call(enqueue, tensors)
    assert len(enqueue.kernel.compiled[0].launched) == 2


def test_an_interpreted_kernel_is_called(cuda):
    enqueue, tensors = Enqueue(Interpreted(), (5,), (128, 0.5), OPTIONS), tensors_of()
    for _ in range(2):
        call(enqueue, tensors)
    assert [(grid, options) for grid, _, options in enqueue.kernel.launched] == [((5,), OPTIONS)] * 2


class Numbers(NamedTuple):
    lower: Any
    upper: Any


@pytest.mark.parametrize(("number", "wide"), [(1, False), (16, False), (0, False), (-1, False), (2**31 - 1, False),
                                              (2**31, True)])
def test_a_kernel_is_compiled_for_no_number_of_the_problem_but_for_its_width(number, wide):
    """Triton would make a constant of 1, and compile another kernel for multiples of 16."""
    bounds = Numbers(None, number)
    *seen, flag, block = unspecialized((bounds, (0.5, (number,)), number, True, 16))
    assert (flag, block) == (True, 16)
    stand_in = 2**31 + 7 if wide else 7
    assert seen == [bounds._replace(upper=stand_in), (0.5, (stand_in,)), number]
    assert type(seen[0]) is Numbers


def test_a_kernel_is_compiled_for_a_tensor_of_a_tuple_wherever_it_lies():
    """Triton would compile another kernel for addresses that are multiples of 16."""
    tensor = torch.zeros(8, dtype=torch.int32)
    assert tensor.data_ptr() % 16 == 0
    (seen, nothing), flag = unspecialized(((tensor, None), True))
    assert (seen.dtype, seen.data_ptr() % 2, nothing, flag) == (torch.int32, 1, None, True)
    assert native_specialize_impl(CUDABackend, (seen, 7), False, True, True) == native_specialize_impl(
        CUDABackend, (torch.zeros(8, dtype=torch.int32)[1:], 23), False, True, True)


@pytest.mark.parametrize("metadata", [{}, {"num_ctas": 2}], ids=["driver", "Triton"])
def test_a_kernel_is_compiled_for_what_stands_for_the_scalars_and_launched_with_these(
        cuda, metadata, monkeypatch):
    monkeypatch.setattr(Compiled, "src", SimpleNamespace(signature=Compiled.src.signature | {"sq": ("i32",)}))
    enqueue = Enqueue(Kernel(**metadata), (5,), ((128,), 0.5), OPTIONS, specialized=4)
    tensors = tensors_of()
    call(enqueue, tensors)
    (_, arguments, _), = enqueue.kernel.front_end
    assert arguments[4:] == ((7,), 0.5)
    launched = enqueue.kernel.compiled[0].launched
    if metadata:
        assert [arguments[4:] for _, arguments in launched] == [((128,), 0.5)]
    else:
        assert launched == []
        assert handed(cuda) == [addresses_of(tensors)]  # which looks at the scalars too


def test_an_interpreted_kernel_gets_the_scalars_not_what_stands_for_them(cuda):
    enqueue = Enqueue(Interpreted(), (5,), ((128,), 0.5), OPTIONS, specialized=4)
    call(enqueue, tensors_of())
    (_, arguments, _), = enqueue.kernel.launched
    assert arguments[4:] == ((128,), 0.5)


def test_compiling_ahead_launches_nothing_and_keeps_nothing(enqueue, cuda):
    taken = []
    with compile_only(lambda name, compile_kernel: taken.append((name, compile_kernel()))):
        call(enqueue, tensors_of())
    assert taken == [("kernel", enqueue.kernel.compiled[0])]
    assert cuda.launches == []
    call(enqueue, tensors_of())
    assert len(enqueue.kernel.front_end) == 2


def test_a_kernel_that_was_launched_before_is_taken_too_and_not_launched(enqueue, cuda):
    call(enqueue, tensors_of())
    taken = []
    with compile_only(lambda name, compile_kernel: taken.append(name)):
        call(enqueue, tensors_of())
    assert taken == ["kernel"]
    assert len(cuda.launches) == 1


def test_nothing_keeps_the_first_calls_tensors_alive(enqueue):
    tensors = tensors_of()
    call(enqueue, tensors)
    enqueue.kernel.front_end.clear()
    left = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert [tensor() for tensor in left] == [None, None, None]


def test_threads_hand_their_own_tensors(enqueue, cuda):
    sets = [tensors_of() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: call(enqueue, sets[i % 8]), range(400)))
    made = handed(cuda)
    assert len(made) == 400
    assert set(made) == {addresses_of(tensors) for tensors in sets}


def test_an_address_that_is_not_its_arguments_is_told_at_the_first_call(enqueue, cuda):
    q, out, plain = tensors_of()
    for i, tensors in ((0, (out, q, plain)), (2, (q, out, plain[4:]))):
        own = (q, out, plain)[i].data_ptr()
        with pytest.raises(ValueError, match=rf"^addresses\[{i}\] is {tensors[i].data_ptr()}, and its argument is "
                                             rf"{own}: give the same in both$"):
            enqueue(addresses_of(tensors), lambda: (descriptor_of(q), descriptor_of(out), plain, None))
    assert (enqueue.kernel.front_end, cuda.launches) == ([], [])


@pytest.mark.parametrize("mask", [Mask(), window(100, 0, "bottom_right"), window(0, None, "bottom_right")], ids=str)
def test_the_hopper_forward_passes_the_addresses_of_its_descriptors(monkeypatch, mask):
    """Under a lower bound the keys before the first one that is seen are left out, of views with gaps too."""
    q, out = (torch.zeros(2, 4, 200, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = torch.zeros(2, 900, 2, 2, 64, dtype=torch.bfloat16).transpose(1, 3).unbind(2)
    lse, counter = torch.zeros(2, 4, 200), torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(forward_launch, "counter_of", lambda device: counter)
    problem = AttentionProblem.from_tensors(q, k, v, mask=mask)
    bound, seen = bound_forward(problem, HopperForwardConfig(128, 2)), []
    bound.enqueue = lambda addresses, arguments, alike: seen.append((addresses, arguments()))
    bound(lambda: (q, k, v), (q.data_ptr(), k.data_ptr(), v.data_ptr()), out, lse)
    (addresses, arguments), = seen
    module._compare(addresses, arguments)
    start = problem.seen_keys.start
    assert (start > 0) == (mask != Mask())
    first_pieces = (q, k[:, :, start:], v[:, :, start:], out, lse, counter)
    assert [address for address in addresses if address is not None] == [tensor.data_ptr() for tensor in first_pieces]


@pytest.fixture
def stream(monkeypatch):
    """The current stream and whether it is capturing, as a test sets them; no device has counters for graphs."""
    current = SimpleNamespace(number=7, captures=False)
    monkeypatch.setattr(launching, "raw_stream", lambda: lambda index: current.number)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current.captures)
    monkeypatch.setattr(launching, "_SPARE", {})
    launching._counter_of_stream.cache_clear()
    yield current
    launching._counter_of_stream.cache_clear()


def test_launches_of_a_stream_share_a_counter_and_a_captured_one_has_its_own(stream):
    device = torch.device("cpu")
    shared = launching.counter_of(device)
    assert launching.counter_of(device) is shared
    stream.number = 8
    other = launching.counter_of(device)
    assert other is not shared
    stream.number, stream.captures = 7, True
    counters = [shared, other, *(launching.counter_of(device) for _ in range(3))]
    assert len({counter.data_ptr() for counter in counters}) == 5
    assert all(counter.data_ptr() % 16 == 0 for counter in counters), "one kernel for all"
    assert [(counter.dtype, counter.tolist()) for counter in counters] == [(torch.int32, [0])] * 5


def test_launches_of_the_stream_that_each_thread_has_share_no_counter(stream):
    """Two threads' streams have one handle, cudaStreamPerThread: with one counter they would skip tiles."""
    stream.number = 2
    counters = [launching.counter_of(torch.device("cpu")) for _ in range(2)]
    assert counters[0].data_ptr() != counters[1].data_ptr()
    assert [(counter.dtype, counter.tolist()) for counter in counters] == [(torch.int32, [0])] * 2


def test_a_captured_counter_is_cleared_in_its_graph_only_where_none_is_left_that_was_before(stream, monkeypatch):
    device, made, zeros = torch.device("cpu"), [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: made.append(sizes) or zeros(*sizes, **options))
    monkeypatch.setattr(launching, "_SPARES", 2)
    stream.captures = True
    assert launching.counter_of(device).tolist() == [0]
    assert made == [(1,)], "nothing was launched before"
    stream.captures = False
    launching.counter_of(device)
    assert made[1:] == [(2, 4), (1,)]
    stream.captures = True
    addresses = {launching.counter_of(device).data_ptr() for _ in range(2)}
    assert (len(addresses), made[3:]) == (2, [])
    assert launching.counter_of(device).data_ptr() not in addresses
    assert made[3:] == [(1,)]
