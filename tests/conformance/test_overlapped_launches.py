"""Kernels that are launched before the one in front has ended, behind one that writes what they read, and is slow.

Programmatic dependent launch: such a kernel waits by itself (``gdc_wait``) for what the one in front writes. Two are
launched so, both behind the kernel that makes the parts which they combine. Here the call's inputs are NaN until a
kernel in front, which is waited for by nobody, has slept and others have written them.
"""

import re
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import attention, attention_decode
from tilewise.kernels.enqueue import Enqueue
from tilewise.tuning.device import device_spec

KERNELS = Path(tilewise.__file__).parent / "kernels"
SLEEP = 20_000_000  # cycles, some 10 ms: longer than the host takes for the call behind
# Shapes of q, of k and of v; the kernel that is launched early.
SHAPES = {
    "forward_cut": (((1, 2, 600, 128), (1, 2, 8000, 128)), "combine_splits_kernel"),
    "forward_cut_256": (((1, 2, 600, 256), (1, 2, 600, 256)), "combine_splits_kernel"),
    "forward_packed_heads": (((1, 8, 7, 128), (1, 2, 6000, 128)), "combine_splits_kernel"),
    "decode": (((3, 8, 1, 128), (3, 2, 6000, 128)), "combine_kernel"),
    "decode_deterministic": (((3, 8, 1, 128), (3, 2, 6000, 128)), "combine_kernel"),
}


def test_these_are_all_kernels_that_may_be_launched_early():
    """Of which each has to wait, as its first statement, before it reads anything."""
    launched = {}
    for path in sorted(KERNELS.rglob("*.py")):
        text = path.read_text()
        if '"launch_pdl"' in text or "launch_pdl=" in text:
            launched[path.name] = set(re.findall(r"Launch\(\n?\s*(combine\w*|\w+_kernel),", text[:text.index(
                "launch_pdl")].rpartition("\ndef ")[2]))
    assert launched == {"combine.py": {"combine_splits_kernel"}, "decode_launch.py": {"combine_kernel"}}
    assert {kernel for _, kernel in SHAPES.values()} == set.union(*launched.values())
    for file, kernel in (("combine.py", "combine_splits_kernel"), ("decode.py", "combine_kernel")):
        body = (KERNELS / "triton" / file).read_text().split(f"\ndef {kernel}(")[1].split('"""')[2]
        assert body.lstrip().startswith("if OVERLAPPED:\n        gdc_wait()"), kernel


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The names of kernels that were launched early."""
    names = []
    enqueue = Enqueue.__call__

    def noting(self, *arguments, **options):
        if self.options.get("launch_pdl"):
            names.append(self.kernel.__name__)
        enqueue(self, *arguments, **options)

    monkeypatch.setattr(Enqueue, "__call__", noting)
    return names


def made(name, device, seed):
    (q, k), _ = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in (q, k, k)]


def called(name, tensors):
    if name.startswith("decode"):
        return attention_decode(*tensors, return_aux=("lse",), backend="triton",
                                deterministic=name.endswith("deterministic"))
    return attention(*tensors, return_aux=("lse",), backend="gluon")


@pytest.fixture(params=SHAPES)
def name(request, device):
    if device_spec(device).arch != "sm_90":
        pytest.skip("kernels overlap, and calls are cut into these parts, on Hopper GPUs")
    return request.param


def written_late(tensors, values):
    torch.cuda._sleep(SLEEP)
    for tensor, own in zip(tensors, values, strict=True):
        tensor.copy_(own)


def alike(results, wanted):
    return all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))


@pytest.mark.gpu
def test_a_call_behind_a_slow_kernel_that_writes_its_inputs_is_the_call_behind_a_synchronisation(name, device,
                                                                                                 launched):
    values = made(name, device, 0)
    tensors = [own.clone() for own in values]
    called(name, made(name, device, 1))  # compiles; what it leaves in freed memory is of other numbers
    torch.cuda.synchronize(device)
    wanted = called(name, tensors)
    torch.cuda.synchronize(device)
    assert torch.isfinite(wanted.out).all()
    for _ in range(5):
        called(name, made(name, device, 1))
        for tensor in tensors:
            tensor.fill_(float("nan"))
        torch.cuda.synchronize(device)
        del launched[:]
        written_late(tensors, values)
        done = torch.cuda.Event()
        done.record()
        early = not done.query()  # else the kernels were not in the queue behind a slow one
        results = called(name, tensors)
        assert early
        assert launched == [SHAPES[name][1]]
        assert alike(results, wanted)


@pytest.mark.gpu
def test_calls_that_follow_one_another_without_a_wait_do_not_disturb_one_another(name, device, launched):
    pair = [made(name, device, seed) for seed in (0, 1)]
    wanted = []
    for values in pair:
        wanted.append(called(name, values))
        torch.cuda.synchronize(device)
    assert not torch.equal(wanted[0].out, wanted[1].out)
    del launched[:]
    torch.cuda._sleep(SLEEP)
    results = [called(name, pair[i % 2]) for i in range(20)]
    assert launched == [SHAPES[name][1]] * 20
    assert [alike(found, wanted[i % 2]) for i, found in enumerate(results)] == [True] * 20


@pytest.mark.gpu
def test_a_graph_with_a_slow_kernel_in_front_replays_to_the_same_bits(name, device, launched):
    """In a graph the early launch is an edge of its own kind between two nodes."""
    values, others = made(name, device, 0), made(name, device, 1)
    given, tensors = ([own.clone() for own in values] for _ in range(2))
    wanted = called(name, tensors)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    del launched[:]
    with torch.cuda.graph(graph):
        written_late(tensors, given)
        results = called(name, tensors)
    assert launched == [SHAPES[name][1]]
    for numbers in (others, values, others, values):
        for tensor, own in zip(given, numbers, strict=True):
            tensor.copy_(own)
        for tensor in tensors:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(device)
        assert alike(results, wanted) == (numbers is values)
