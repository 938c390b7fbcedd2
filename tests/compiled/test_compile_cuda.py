"""The CUDA kernels compile for every architecture we name, without a GPU, and spill little."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tilewise.backends._support import float32
from tilewise.errors import BackendUnavailable
from tilewise.kernels.cuda.config import CudaConfig
from tilewise.kernels.cuda.program import Program, compile_program
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_cuda import backward_kernels, sum_kernels

pytestmark = [pytest.mark.aot, pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed")]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PRODUCTS = {"halves": 3, "ieee": 0}
# Bytes of spill stores a thread, at most: stores to local memory that a step of tens of thousands of products hides.
SPILLS = 300


def problem(d):
    strides = (8 * 1024 * d, 1024 * d, d, 1)
    return AttentionProblem(b=2, hq=8, hk=8, sq=1024, sk=1024, d=d, dv=d, dtype=torch.float32,
                            device=torch.device("cuda"), scale=d**-0.5, q_strides=strides, k_strides=strides,
                            v_strides=strides)


def programs(arch, products, d):
    device = DeviceSpec.of_arch(arch)
    kernels = ("forward", "delta", *sum_kernels(problem(d)), "dq", *backward_kernels(problem(d), products))
    tiles = [float32.plan(kernel, problem(d), device, products, vectors=True)[0] for kernel in dict.fromkeys(kernels)]
    split = (float32.splitting(program) for program in tiles if program.config.split)
    return tiles + list(dict.fromkeys(split))


@pytest.fixture(scope="module")
def record():
    from compiled.cuda_record import cuda_record

    return cuda_record()


# Turing has neither TF32 nor products of 16 halves: backend cuda refuses it.
KINDS = [(arch, name) for arch in ARCHS for name in PRODUCTS if name == "ieee" or arch != "sm_75"]
HEAD_DIMS = (64, 128, 256)
# Of one source: each architecture in turn has another head dim, and the one that was measured has all.
COMPILED = [(arch, name, d) for i, (arch, name) in enumerate(KINDS)
            for d in (HEAD_DIMS if arch == "sm_90" else HEAD_DIMS[i // 2 % 3:][:1])]


@pytest.mark.parametrize(("arch", "products", "d"), COMPILED)
def test_kernels_compile_and_spill_little(record, arch, products, d):
    counts = {program.kernel: record.spills_of(program, arch) for program in programs(arch, PRODUCTS[products], d)}
    assert counts
    assert {kernel: count for kernel, count in counts.items() if count > SPILLS} == {}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_kernels_compile_for_rows_that_vectors_cannot_read(arch):
    forward = replace(programs(arch, 0, 64)[0], vectors=False)
    assert compile_program(forward, arch)[0].startswith(b"\x7fELF")


@pytest.mark.parametrize("d", [64, 256])
def test_single_tf32_product_compiles(d):
    for program in programs("sm_90", 1, d):
        assert compile_program(program, "sm_90")[0].startswith(b"\x7fELF")


def test_refused_source_raises_with_the_compilers_words():
    odd = Program("forward", CudaConfig(0, 4, 4, 64), d=64, dv=24, vectors=True)
    with pytest.raises(BackendUnavailable, match="columns come in groups of 32"):
        compile_program(odd, "sm_90")


def test_a_kv_block_that_is_no_number_of_chunks_is_refused():
    odd = Program("forward", CudaConfig(0, 4, 4, 32, chunk=64), d=64, dv=32, vectors=True)
    with pytest.raises(BackendUnavailable, match="keys come in chunks, and 4 to a thread"):
        compile_program(odd, "sm_90")
