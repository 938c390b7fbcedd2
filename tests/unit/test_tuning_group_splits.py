"""Among how many tiles a group's query heads are split in the Hopper backward pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends import gluon
from tilewise.masks import Mask, causal, prefix, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import OperandSpec
from tilewise.problem.sequences import Sequences
from tilewise.tuning.group_splits import choose_group_splits
from tilewise.tuning.heuristics_hopper import backward_heuristic

LENGTHS = Sequences(seqlens_k=OperandSpec((1,), (1,), torch.int32))


def problem_of(b, heads, s, d, mask=None, **fields):
    hq, hk = heads
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=s, sk=s, d=d, dv=d, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=causal() if mask is None else mask,
                            direction="backward", **fields)


def chosen(problem, num_sms=132):
    return choose_group_splits(problem, backward_heuristic(problem, num_sms), num_sms)


@pytest.mark.parametrize(("problem", "splits"), [
    # The fastest on an H200 (benchmarks/journal/hopper-backward.md).
    (problem_of(2, (28, 4), 2048, 128), 7), (problem_of(1, (28, 4), 4096, 128), 7),
    (problem_of(1, (28, 4), 8192, 128), 1), (problem_of(4, (32, 8), 1024, 128), 1),
    (problem_of(1, (32, 8), 2048, 128), 2), (problem_of(1, (32, 8), 4096, 128), 1),
    (problem_of(1, (16, 2), 4096, 128), 4), (problem_of(1, (8, 1), 8192, 128), 4),
    (problem_of(1, (16, 2), 4096, 128, causal() & window(1023, 0)), 2),
    (problem_of(1, (32, 8), 1024, 128, Mask()), 2), (problem_of(2, (32, 8), 2048, 128, Mask()), 1),
    (problem_of(1, (64, 8), 2048, 128), 2), (problem_of(1, (64, 8), 4096, 128), 2),
    (problem_of(4, (64, 8), 4096, 128), 2), (problem_of(2, (96, 8), 4096, 128), 3),
    (problem_of(1, (64, 4), 4096, 128), 4), (problem_of(2, (48, 8), 4096, 128), 2),
    (problem_of(2, (40, 8), 4096, 128), 1), (problem_of(2, (28, 4), 8192, 128), 1),
    (problem_of(1, (64, 8), 8192, 64), 2), (problem_of(2, (14, 2), 2048, 64), 7), (problem_of(1, (64, 8), 2048, 64), 2),
    (problem_of(1, (32, 8), 4096, 64), 1), (problem_of(1, (4, 1), 4096, 256), 4),
    (problem_of(1, (16, 2), 4096, 256), 2), (problem_of(2, (8, 4), 2048, 256), 1),
    # Nothing to split, or nothing to gain: few heads a group, and many tiles.
    (problem_of(1, (4, 4), 2048, 128), 1), (problem_of(1, (16, 4), 256, 128), 1),
    (problem_of(8, (32, 8), 32768, 128), 1),
    # The sum is compiled for each number of splits: eight at most, and none of a group whose least divisor is above.
    (problem_of(1, (48, 1), 4096, 128), 8), (problem_of(1, (71, 1), 2048, 64), 1),
    # Splits have rows of all keys.
    (replace(problem_of(1, (16, 2), 4096, 128, causal("top_left")), sk=8192), 1),
    (replace(problem_of(1, (16, 2), 4096, 128, window(9, 9, "top_left")), sk=2048), 1),
    # The bits of a sequence must not depend on its batch.
    (problem_of(1, (16, 2), 4096, 128, deterministic=True), 1),
    # How long a tile is does not follow from the shapes, or a head has CTAs of its own.
    (problem_of(1, (16, 2), 4096, 128, sequences=LENGTHS), 1),
    (problem_of(1, (16, 2), 4096, 128, causal() & prefix(100)), 1), (problem_of(16, (16, 8), 512, 64), 1),
], ids=lambda value: str(value).removeprefix("backward ").removesuffix(" on cuda:0"))
def test_a_group_is_split_where_that_was_faster(problem, splits):
    assert chosen(problem) == splits


def test_fewer_multiprocessors_need_fewer_splits():
    problem = problem_of(1, (8, 2), 4096, 128)
    assert [chosen(problem, num_sms) for num_sms in (8, 32, 64, 132)] == [1, 1, 2, 4]


def test_the_gluon_backend_launches_the_splits_that_are_chosen(monkeypatch):
    launched = []
    monkeypatch.setattr(gluon, "device_spec", lambda device: SimpleNamespace(name="none"))
    monkeypatch.setattr(gluon, "backward_launch", lambda *given: launched.append(given[2].group_splits))
    monkeypatch.setattr("tilewise.kernels.triton.backward.delta_launch", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    for heads in ((16, 2), (16, 16)):
        strides, of_keys = ((h * 4096 * 128, 4096 * 128, 128, 1) for h in heads)
        problem = problem_of(1, heads, 4096, 128, q_strides=strides, k_strides=of_keys, v_strides=of_keys)
        gluon._backward_plan.__wrapped__(problem, (strides, strides, None), (True,))
    assert launched == [4, 1]
