"""A launch past Triton's front end and its encoder: what reaches the launcher in C, and when Triton's own way is taken.

Triton's parts are fakes of 3.6; test_handed_arguments.py holds the real ones against them.
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from tilewise.errors import TilewiseError
from tilewise.kernels.gluon import enqueue as module
from tilewise.kernels.gluon import launch as launching
from tilewise.kernels.gluon.compat import bare_launcher
from tilewise.kernels.gluon.enqueue import Enqueue
from tilewise.masks import Mask, window
from tilewise.problem import AttentionProblem
from tilewise.tuning.configs import HopperForwardConfig

BLOCK = [8, 64]
LAYOUT = {"swizzle": 3, "block_size": BLOCK}
OPTIONS = {"num_warps": 4}


class OneDevice:
    """A driver whose current device is 3; a tensor map is here what it was encoded from."""

    def __init__(self):
        self.encoded, self.stream = [], 77

    def get_current_device(self):
        return 3

    def get_current_stream(self, device):
        assert device == 3
        return self.stream

    def encode(self, descriptor, layout):
        address, block = descriptor.base.data_ptr(), tuple(layout["block_size"])
        self.encoded.append(address)
        encoded = ("map", address, layout["swizzle"], block, descriptor.padding)
        return [encoded, *descriptor.shape, *descriptor.strides]


class Run:
    """What CudaLauncher is to a call: holds ``launch``, the wrapper that encodes, and hands arguments to it."""

    launch_cooperative_grid, launch_pdl, profile_scratch_size = "cooperative", "dependent", 0

    def __init__(self, launcher, tensordesc_meta, scratch=0):
        def inner(*arguments):
            pytest.fail(f"encoded anew: {launcher}, {tensordesc_meta}, {arguments}")

        self.launch, self.global_scratch_size = inner, scratch

    def __call__(self, x, y, z, stream, function, *arguments):
        if not self.global_scratch_size:
            pytest.fail("asked anew what scratch memory there shall be")
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, "scratch", None,
                    *arguments)


class Compiled:
    """A compiled kernel of two descriptors that keeps what its launcher in C is handed."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, layouts=(LAYOUT, LAYOUT), scratch=0):
        self.handed = []
        self.run = Run(lambda *arguments: self.handed.append(arguments), list(layouts), scratch)


class Kernel:
    """A kernel whose front end hands out one compiled for the alignment of the arguments."""

    def __init__(self):
        self.front_end, self.compiled = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.front_end.append((grid, arguments, options))
            self.compiled.append(self.compile())
            return self.compiled[-1]

        return launch

    def compile(self):
        return Compiled()


@pytest.fixture
def device(monkeypatch):
    made = OneDevice()
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", made.encode)
    return made


@pytest.fixture
def enqueue(device):
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


def parts(tensor):
    return ("map", tensor.data_ptr(), 3, (8, 64), "zero"), *tensor.shape, *tensor.stride()


def handed_for(tensors, stream=77, grid=(5, 1, 1), scratch=None):
    q, out, plain = tensors
    begin = (*grid, stream, "function", "cooperative", "dependent", scratch, None, "metadata", None, None, None)
    return (*begin, *parts(q), *parts(out), plain.data_ptr(), None, 128, 0.5)


def test_the_first_call_goes_through_the_front_end_and_later_ones_past_it(enqueue):
    first, second = tensors_of(), tensors_of()
    call(enqueue, first)
    (grid, arguments, options), = enqueue.kernel.front_end
    assert (grid, options, arguments[3:]) == ((5,), OPTIONS, (None, 128, 0.5))
    assert [argument.base for argument in arguments[:2]] == [first[0], first[1]]
    compiled, = enqueue.kernel.compiled
    assert compiled.handed == []
    enqueue(addresses_of(second), lambda: pytest.fail("the front end's arguments are not wanted"))
    assert compiled.handed == [handed_for(second)]
    assert len(enqueue.kernel.front_end) == 1


def test_every_dim_of_the_grid_is_handed(device):
    enqueue, tensors = Enqueue(Kernel(), (5, 7), (128, 0.5), OPTIONS), tensors_of()
    call(enqueue, tensors)
    call(enqueue, tensors)
    assert enqueue.kernel.compiled[0].handed == [handed_for(tensors, grid=(5, 7, 1))]


def test_a_tensor_is_encoded_once_for_an_address(enqueue, device):
    first, second = tensors_of(), tensors_of()
    for tensors in (first, first, second, first, second, (second[0], first[1], first[2])):
        call(enqueue, tensors)
    made = [tensor.data_ptr() for tensor in (*first[:2], *second[:2])]
    assert device.encoded == made
    assert enqueue.kernel.compiled[0].handed[-1] == handed_for((second[0], first[1], first[2]))


def test_so_many_encoded_tensors_are_kept_and_the_least_used_goes(device, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    enqueue, (a, b, c) = Enqueue(Kernel(), (5,), (128, 0.5), OPTIONS), [tensors_of() for _ in range(3)]
    for tensors in (a, a, b, c):
        call(enqueue, tensors)
    device.encoded.clear()
    for tensors in (b, c):
        call(enqueue, tensors)
    assert device.encoded == []
    call(enqueue, a)
    assert device.encoded == [a[0].data_ptr(), a[1].data_ptr()]
    assert enqueue.kernel.compiled[0].handed[-1] == handed_for(a)


def test_calls_that_are_alike_share_a_kernel_whatever_their_alignments_look_like(enqueue):
    q, out, plain = tensors_of()
    for _ in range(3):
        enqueue(addresses_of((q, out, plain)), lambda: (descriptor_of(q), descriptor_of(out), plain, None), alike=True)
    assert len(enqueue.kernel.front_end) == 1
    assert enqueue.kernel.compiled[0].handed == [handed_for((q, out, plain))] * 2


def test_a_launch_goes_to_the_stream_that_is_current_then(enqueue, device):
    tensors = tensors_of()
    call(enqueue, tensors)
    for device.stream in (77, 88):
        call(enqueue, tensors)
    assert enqueue.kernel.compiled[0].handed == [handed_for(tensors, 77), handed_for(tensors, 88)]


def test_another_alignment_gets_the_kernel_compiled_for_it(enqueue):
    aligned, shifted = tensors_of(), tensors_of(shift=4)
    for tensors in (aligned, shifted, shifted, aligned):
        call(enqueue, tensors)
    of_aligned, of_shifted = enqueue.kernel.compiled
    assert (of_aligned.handed, of_shifted.handed) == ([handed_for(aligned)], [handed_for(shifted)])


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hooks_see_every_launch(enqueue, name):
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
    assert len(enqueue.kernel.front_end) == 2
    assert enqueue.kernel.compiled[0].handed == [handed_for(tensors)]
    assert enqueue.kernel.compiled[1].handed == []


def test_nothing_keeps_the_first_calls_tensors_alive(enqueue):
    tensors = tensors_of()
    call(enqueue, tensors)
    enqueue.kernel.front_end.clear()
    left = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert [tensor() for tensor in left] == [None, None, None]


def test_threads_hand_their_own_tensors(enqueue):
    sets = [tensors_of() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: call(enqueue, sets[i % 8]), range(400)))
    handed = [arguments for compiled in enqueue.kernel.compiled for arguments in compiled.handed]
    assert len(handed) + len(enqueue.kernel.front_end) == 400
    assert set(handed) == {handed_for(tensors) for tensors in sets}


def test_an_address_that_is_not_its_arguments_is_told_at_the_first_call(enqueue):
    q, out, plain = tensors_of()
    for i, tensors in ((0, (out, q, plain)), (2, (q, out, plain[4:]))):
        own = (q, out, plain)[i].data_ptr()
        with pytest.raises(ValueError, match=rf"^addresses\[{i}\] is {tensors[i].data_ptr()}, and its argument is "
                                             rf"{own}: give the same in both$"):
            enqueue(addresses_of(tensors), lambda: (descriptor_of(q), descriptor_of(out), plain, None))
    assert enqueue.kernel.front_end == []


def test_a_kernel_without_descriptors_keeps_its_launcher():
    compiled = Compiled(())
    assert bare_launcher(compiled, []) == (compiled.run.launch, ("cooperative", "dependent", None, None), [])


def test_a_kernel_that_wants_scratch_memory_is_given_it_at_every_launch(enqueue, monkeypatch):
    monkeypatch.setattr(Kernel, "compile", lambda self: Compiled(scratch=64))
    tensors = tensors_of()
    for _ in range(3):
        call(enqueue, tensors)
    assert enqueue.kernel.compiled[0].handed == [handed_for(tensors, scratch="scratch")] * 2


@pytest.mark.parametrize(("run", "holds", "layouts"), [
    (Run(print, [LAYOUT]), ["launcher", "tensordesc_meta"], 1),
    (Run(print, [LAYOUT, None]), ["launcher", "tensordesc_meta"], 2),
    (Run(print, None), ["launcher", "tensordesc_meta"], 0),
    (SimpleNamespace(launch=print), [], 0), (SimpleNamespace(), [], 0),
    ((lambda tensordesc_meta: SimpleNamespace(launch=lambda: tensordesc_meta))([LAYOUT] * 2), ["tensordesc_meta"], 2),
])
def test_a_launcher_that_is_not_as_tritons_is_refused(run, holds, layouts):
    with pytest.raises(TilewiseError) as caught:
        bare_launcher(SimpleNamespace(run=run), [descriptor_of(tensor) for tensor in tensors_of()[:2]])
    assert str(caught.value) == (
        f"Triton's launcher of 2 descriptors holds {holds} with {layouts} layouts; a launcher and a layout each is "
        "what Triton 3.6 has. Install that, or call with backend='triton'.")


def test_a_triton_that_encodes_elsewhere_is_refused(monkeypatch):
    monkeypatch.delattr(nvidia, "make_tensordesc_arg")
    with pytest.raises(TilewiseError, match="Triton's launcher of 2 descriptors"):
        bare_launcher(Compiled(), [descriptor_of(tensor) for tensor in tensors_of()[:2]])


@pytest.mark.parametrize("mask", [Mask(), window(100, 0, "bottom_right"), window(0, None, "bottom_right")], ids=str)
def test_the_hopper_forward_passes_the_addresses_of_its_descriptors(monkeypatch, mask):
    """Under a lower bound the keys before the first one that is seen are left out, of views with gaps too."""
    q, out = (torch.zeros(2, 4, 200, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = torch.zeros(2, 900, 2, 2, 64, dtype=torch.bfloat16).transpose(1, 3).unbind(2)
    lse, counter = torch.zeros(2, 4, 200), torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launching, "counter_of", lambda device: counter)
    problem = AttentionProblem.from_tensors(q, k, v, mask=mask)
    bound, seen = launching.HopperForward(problem, HopperForwardConfig(128, 2), multiprocessors=132), []
    bound.enqueue = lambda addresses, arguments, alike: seen.append((addresses, arguments()))
    bound(q, k, v, out, lse, None)
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
    monkeypatch.setattr(launching, "_streams", lambda: lambda index: current.number)
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


def test_streams_are_asked_of_tritons_driver(device):
    launching._streams.cache_clear()
    try:
        assert launching._streams()(3) == 77
    finally:
        launching._streams.cache_clear()
