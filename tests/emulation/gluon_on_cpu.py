"""A warp-specialised Gluon kernel on the CPU: its source as plain Python, a thread for each partition of its warps.

Gluon has no interpreter. Here a tensor is torch's, shared memory is memory, and a barrier counts arrivals and bytes as
Hopper's do. What is asynchronous happens as early or as late as it can: a copy lands when it is asked for or when its
barrier is waited for, and a product reads its operands when it is waited for, so that a slot that is filled anew too
early, or read too early, gives wrong numbers, and a barrier that nobody completes ends the test. Nor may a sum be read
that the last wait has not waited for.

Threads reach shared memory through PTX's generic proxy, the copy engine and products through its async proxy. What a
partition has read or written must be fenced by it before the copy engine writes there, and what it has written before
the copy engine or a product reads it: a barrier alone does not order the two proxies.
"""

import random
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from emulation.gluon_values import Dtype, Tensor, whole

PATIENCE = 20.0  # seconds after which a wait is a deadlock


class Pointer:
    """What a kernel reads and writes a tensor by, element after element of its memory."""

    def __init__(self, values, at=0):
        self.values, self.at, self.dtype = values, at, SimpleNamespace(element_ty=Dtype(values.dtype))

    def __add__(self, step):
        return Pointer(self.values, self.at + step)

    def __getitem__(self, index):
        return Pointer(self.values, self.at[index])

    def places(self, mask):
        at, mask = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(mask))
        assert torch.all((at >= 0) & (at < self.values.numel()) | ~mask), "an address outside of the tensor"
        return at, mask


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, values):
        self.values, self.dtype, self.shape = values, values.dtype, values.shape

    def index(self, place):
        return Shared(self.values[int(place)])

    def reshape(self, shape):
        return Shared(self.values.view(shape))

    def permute(self, order):
        return Shared(self.values.permute(order))

    def reinterpret(self, dtype, shape):
        return Shared(self.values.view(dtype).view(shape))

    def slice(self, start, length, dim=0):
        return Shared(self.values.narrow(dim, start, length))

    def store(self, values):
        _own.program.accesses.write(self.values, values)

    def load(self, layout):
        _own.program.accesses.read(self.values)
        return self.values.clone().as_subclass(Tensor)


class Accesses:
    """What the partitions of a program have read and written of shared memory since each one's last fence.

    Two partitions may write the same to one place, each for itself: the fence of the one that came last is that of
    both, and a write that changes nothing needs none. A range is all from a view's first to its last address.
    """

    def __init__(self):
        self.changing = threading.Lock()
        self.unfenced, self.written = {}, {}  # by thread: ranges of addresses and whether changed; those written

    def read(self, values):
        with self.changing:
            self.unfenced.setdefault(threading.current_thread(), set()).add((*_addresses(values), False))

    def write(self, values, new):
        own, written = threading.current_thread(), (*_addresses(values), True)
        with self.changing:
            before = values.clone()
            values.copy_(new)
            self.written.setdefault(own, set()).add(written)
            if not torch.allclose(before, values, 0, 0, equal_nan=True):
                self.unfenced.setdefault(own, set()).add(written)
                for thread, ranges in self.written.items():
                    if thread is not own:
                        ranges.discard(written)

    def fence(self):
        with self.changing:
            self.unfenced.pop(threading.current_thread(), None)
            written = self.written.pop(threading.current_thread(), set())
            for ranges in self.unfenced.values():
                ranges -= written

    def check(self, values, *, writes):
        """Let the copy engine or a product read, or the former write."""
        start, stop = _addresses(values)
        with self.changing:
            assert not any(first < stop and start < last and (writes or was_changed)
                           for ranges in self.unfenced.values() for first, last, was_changed in ranges), (
                "no fence between threads that read or wrote shared memory and the copy engine or product behind them")


def _addresses(values):
    """Return the addresses of a view from its first to behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return values.data_ptr(), values.data_ptr() + (last + 1) * values.itemsize


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that are expected are there."""

    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.bytes, self.phase, self.changed = 0, 0, threading.Condition()
        self.copies = []  # that land when somebody waits

    def change(self, arrivals, size):
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "one arrives who is not waited for"
            if not self.missing and not self.bytes:
                self.missing, self.phase = self.arrivals, self.phase ^ 1
                self.changed.notify_all()

    def land_late(self, copy):
        with self.changed:
            self.copies.append(copy)
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            while self.phase == parity:
                if self.copies:
                    self.copies.pop(random.randrange(len(self.copies)))()
                else:
                    assert self.changed.wait(PATIENCE), "a deadlock"


class Descriptor:
    """What the copy engine reads a tensor by, zeros outside, and writes it by, nothing there."""

    def __init__(self, tensor, block):
        self.tensor, self.block, self.dtype, self.layout = tensor, block, tensor.dtype, None
        self.block_shape, self.shape, self.strides = block, tensor.shape, tensor.stride()
        self.block_type = SimpleNamespace(nbytes=tensor.itemsize * torch.Size(block).numel(), shape=block)

    def part(self, place):
        """What of the tensor a block at a place covers, and which part of the block that is."""
        sides = [(int(first), min(int(first) + size, end)) for first, size, end in
                 zip(place, self.block, self.tensor.shape, strict=True)]
        covered = self.tensor[tuple(slice(max(0, first), max(0, stop)) for first, stop in sides)]
        return covered, tuple(slice(max(0, -first), max(0, -first) + size) for (first, _), size in
                              zip(sides, covered.shape, strict=True))

    def read(self, place):
        found, (part, inside) = torch.zeros(self.block, dtype=self.dtype), self.part(place)
        found[inside] = part
        return found

    def write(self, place, values):
        assert all(first >= 0 for first in place), "a copy to before a tensor's beginning, which a GPU stops at"
        part, inside = self.part(place)
        part.copy_(values[inside])


def _copy(desc, place, barrier, target):
    _own.program.accesses.check(target.values, writes=True)

    def land():
        target.values.copy_(desc.read(place))
        barrier.change(0, -desc.block_type.nbytes)

    if random.random() < 0.5:
        land()
    else:
        barrier.land_late(land)


class _Leaving(threading.local):
    """Of a partition: what the copy engine has yet to read of shared memory, and what has yet to arrive in global.

    Tiles are read in the order of their copies. What has been read may arrive at any time, and in any order, unless
    somebody waits for it: a sum may be added to before it was set.
    """

    def __init__(self):
        self.unread, self.under_way = [], []

    def read(self, number):
        self.under_way += [read() for read in self.unread[:number]]
        del self.unread[:number]
        random.shuffle(early := [place for place, arrive in enumerate(self.under_way) if random.random() < 0.5])
        for place in early:
            self.under_way[place]()
            self.under_way[place] = _nothing  # its place counts until somebody has waited for it

    def arrive(self, number):
        self.read(max(0, number - len(self.under_way)))
        random.shuffle(waited_for := self.under_way[:number])
        for arrive in waited_for:
            arrive()
        del self.under_way[:number]


def _nothing():
    """What has arrived before it was waited for does not arrive again."""


_leaving = _Leaving()


def _copy_out(desc, place, source):
    _own.program.accesses.check(source.values, writes=False)
    _leaving.unread.append(lambda: partial(desc.write, place, source.values.clone()))


def _add_out(desc, place, source):
    def add(values):
        with _adding:
            part, inside = desc.part(place)
            part.add_(values[inside])

    _own.program.accesses.check(source.values, writes=False)
    _leaving.unread.append(lambda: partial(add, source.values.clone()))


def _wait_for_copies_out(left):
    """Let all copies of this partition but the last ``left`` read their tiles, in order."""
    _leaving.read(max(0, len(_leaving.unread) - left))


def _wait_for_arrivals(left):
    """Let all copies of this partition but the last ``left`` arrive."""
    _leaving.arrive(max(0, len(_leaving.under_way) + len(_leaving.unread) - left))


def _await_semaphore(semaphore, rank):
    """Wait for programs that run beside this one; those of lower numbers are done."""
    with _semaphores:
        assert _semaphores.wait_for(lambda: semaphore.values[semaphore.at] == rank,
                                    PATIENCE * (_own.program.beside > 0)), "nobody would ever come before"


def _release_semaphore(semaphore, tiles):
    _wait_for_arrivals(0)
    with _semaphores:
        semaphore.values[semaphore.at] = tiles
        _semaphores.notify_all()


_semaphores = threading.Condition()


def _discard(pointer, count):
    pointer.values[pointer.at:pointer.at + count] = float("nan")


def _add(pointer, values, sem):
    assert sem == "relaxed"
    at, mask = pointer.places(True)
    assert mask.all()
    values = torch.as_tensor(values, dtype=pointer.values.dtype).broadcast_to(at.shape)
    with _adding:
        before = pointer.values[at].clone().as_subclass(Tensor)
        pointer.values.index_add_(0, at.flatten(), values.as_subclass(torch.Tensor).flatten())
    return whole(before)


_adding = threading.Lock()


def _load(pointer, mask=True, other=0.0, cache_modifier=""):
    at, mask = pointer.places(mask)
    found = pointer.values[torch.where(mask, at, 0)]
    return whole(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)).as_subclass(Tensor))


def _store(pointer, values, mask=True):
    at, mask = pointer.places(mask)
    values = torch.as_tensor(values, dtype=pointer.values.dtype)
    pointer.values[at[mask]] = values.broadcast_to(at.shape)[mask].as_subclass(torch.Tensor)


def _multiple_of(pointer, numbers):
    """Hold a promise to the compiler against numbers, or against addresses as if the tensor began at a multiple."""
    if not isinstance(pointer, Pointer):
        assert not torch.any(torch.as_tensor(pointer % numbers))
        return pointer
    assert not torch.any(pointer.at[..., 0] * pointer.values.itemsize % numbers[-1])
    return pointer


def _max_contiguous(pointer, numbers):
    vectors = pointer.at.unflatten(-1, (-1, numbers[-1]))
    assert torch.equal(vectors - vectors[..., :1], torch.arange(numbers[-1]).expand(vectors.shape))
    return pointer


class Product:
    """A product that has been asked for: it reads its operands, and what it is added to, when it is waited for."""

    type = Tensor.type

    def __init__(self, left, right, total):
        self.operands, self.total, self.sums = (left, right), total, None

    def finish(self):
        left, right = (operand.values if isinstance(operand, Shared) else operand for operand in self.operands)
        total = self.total.sums if isinstance(self.total, Product) else self.total
        self.sums = (left.float() @ right.float() + total).as_subclass(Tensor)


_under_way = threading.local()


def _multiply(left, right, total, *, is_async, use_acc=True):
    """Ask for a product; a total that is itself a product is waited for with this one, or before."""
    assert is_async
    for operand in (left, right):
        if isinstance(operand, Shared):
            _own.program.accesses.check(operand.values, writes=False)
    product = Product(left, right, total if use_acc else torch.zeros(()))
    _under_way.products = [*getattr(_under_way, "products", ()), product]
    return product


def wait_for_products(left, deps):
    """Finish all products of this partition but the last ``left``, in order."""
    products = _under_way.products
    done = products[:len(products) - left]
    _under_way.products = products[len(done):]
    for product in done:
        product.finish()
    assert all(product.sums is not None for product in deps), "a sum is read that is not waited for"
    return deps[0].sums if len(deps) == 1 else tuple(product.sums for product in deps)


def _where(test, yes, no):
    return torch.where(test, yes, no) if isinstance(test, torch.Tensor) else whole(yes if test else no)


def _of_either(scalars, tensors):
    def call(*numbers):
        is_scalar = not any(isinstance(number, torch.Tensor) for number in numbers)
        return whole(scalars(*numbers) if is_scalar else tensors(*map(torch.as_tensor, numbers)))

    return call


def _over(reduce):
    return lambda values, *axis: whole(reduce(values, *axis))


_own = threading.local()  # the program that a thread is of


class _Program:
    """A program, how many run beside it, and the failures of all, the first one first."""

    def __init__(self, number, beside, failures):
        self.failures = failures
        self.number, self.beside, self.turns, self.meetings = number, beside, _Turns(), {}
        self.accesses = Accesses()

    def meet(self, number):
        """Let as many of the program's warpgroups meet."""
        self.meetings.setdefault(number, threading.Barrier(number)).wait(PATIENCE)


def _side_by_side(calls):
    """Call each of (program, function, arguments) in a thread of its own; raise the run's first failure if any."""
    failed = []

    def run(program, function, arguments):
        _own.program = program
        try:
            function(*arguments)
            assert not _leaving.unread, "a program ends whose results the copy engine has yet to read"
            _wait_for_arrivals(0)
        except BaseException as failure:
            failed.append(failure)
            program.failures.append(failure)

    threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise calls[0][0].failures[0]


def _specialize(partitions, _warps, _registers):
    _side_by_side([(_own.program, *partition) for partition in partitions])


class _Turns:
    """Named barriers of two warpgroups, one that passes a turn on and one that waits for it."""

    def __init__(self):
        self.passed = {}

    def __call__(self, verb, number, threads):
        assert threads == 256, "two warpgroups"
        turn = self.passed.setdefault(number, threading.Semaphore(0))
        if verb == "arrive":
            turn.release()
        else:
            assert turn.acquire(timeout=PATIENCE), "a deadlock"

    def end(self):
        assert not any(turn.acquire(blocking=False) for turn in self.passed.values()), "a turn that nobody took"


def _allocate(dtype, shape, _layout):
    dtype = getattr(dtype, "torch", dtype)
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype))


def _full(shape, value, dtype, layout):
    return torch.full(shape, value, dtype=getattr(dtype, "torch", dtype)).as_subclass(Tensor)


def language(programs):
    """What a kernel finds under the name gl."""
    return SimpleNamespace(
        program_id=lambda axis: whole(_own.program.number), num_programs=lambda axis: whole(programs),
        static_range=range,
        arange=lambda first, last, layout: torch.arange(first, last).as_subclass(Tensor), full=_full, where=_where,
        minimum=_of_either(min, torch.fmin), maximum=_of_either(max, torch.fmax), exp2=torch.exp2,
        abs=torch.abs, multiple_of=_multiple_of, max_contiguous=_max_contiguous,
        load=_load, store=_store, atomic_add=_add, convert_layout=lambda values, *_, **__: values,
        sum=_over(torch.sum), max=_over(torch.amax), log2=torch.log2,
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
        bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32,
        int8=torch.int8, int32=torch.int32, int64=torch.int64, uint32=torch.int64,  # which holds any word
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
        NVMMADistributedLayout=lambda *_: None,
        SwizzledSharedLayout=lambda *_: None, DistributedLinearLayout=lambda *_: None,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None))


def run(kernel, modules, grid, arguments, constants, together=1):
    """Run a kernel, its programs one after another, or so many at a time.

    kernel: a jit function. modules: those that it is made of. constants: (module, name) -> a plain number in the place
    of a constexpr.
    """
    with pytest.MonkeyPatch.context() as patch:
        fakes = {
            "gl": language(grid), "tma_load": _copy, "tma_store": _copy_out,
            "tma_add": _add_out, "tma_store_wait": _wait_for_copies_out,
            "fence_async_shared": lambda: _own.program.accesses.fence(),
            "reinterpret": lambda tiles, dtype, shape, layout: tiles.reinterpret(dtype, shape),
            "await_accum": lambda: _wait_for_arrivals(0), "await_results": lambda: _wait_for_arrivals(0),
            "await_accum_but_last": lambda: _wait_for_arrivals(1),
            "semaphore_wait": _await_semaphore,
            "_semaphore_release": _release_semaphore, "discard_from_l2": _discard,
            "coalesced_layout": lambda *_: None, "named_barrier_sync": lambda number: _own.program.meet(number),
            "_named_barrier": lambda *turn: _own.program.turns(*turn),
            "warpgroup_mma": _multiply, "warpgroup_mma_wait": wait_for_products,
            "optimization_barrier": lambda number: number,
            "make_barriers": lambda number, arrivals: SimpleNamespace(
                index=[Barrier(arrivals) for _ in range(number)].__getitem__),
            "mbarrier": SimpleNamespace(
                wait=lambda barrier, parity: barrier.wait(int(parity)),
                arrive=lambda barrier, count: barrier.change(count, 0),
                expect=lambda barrier, size: barrier.change(1, size))}
        for module in modules:
            for name, value in list(vars(module).items()):
                if name in fakes:
                    patch.setattr(module, name, fakes[name])
                elif isinstance(value, JITFunction):
                    patch.setattr(module, name, value.fn)
        for (module, name), value in constants.items():
            patch.setattr(module, name, value)
        for first in range(0, grid, together):
            failures, numbers = [], range(first, min(first + together, grid))
            programs = [_Program(number, together - 1, failures) for number in numbers]
            _side_by_side([(program, kernel.fn, arguments) for program in programs])
            for program in programs:
                program.turns.end()
