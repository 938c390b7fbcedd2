"""A launch of a Triton kernel: what stands in the place of each tensor, and of what is left out."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.functions import ScoreFunction
from tilewise.kernels.triton.arguments import NO_MODIFIERS, Sinks, StridedTensor
from tilewise.kernels.triton.backward import attention_backward_dkdv_kernel
from tilewise.kernels.triton.launch import (
    Launch,
    modifiers_of,
    needs_int64,
    operand_addresses,
    operand_count,
)
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands, ScoreSettings

Q, OUT = torch.zeros(1, 1, 8, 16), torch.zeros(3)


def launch_of(blocks=(), optional=1, ctas=5, strides=()):
    kernel = SimpleNamespace(arg_names=("q", "out", "modifiers", "problem", "BLOCK"))
    launch, seen = Launch(kernel, ctas, ((128,), 64), strides, blocks, optional, num_warps=4), []
    launch.enqueue = lambda addresses, arguments, alike: seen.append((addresses, arguments(), alike))
    return launch, seen


def test_addresses_stand_for_tensors_and_the_front_end_gets_these():
    launch, seen = launch_of()
    modifiers = NO_MODIFIERS._replace(sinks=Sinks(OUT))
    launch(Q, OUT, modifiers)
    launch(Q, OUT)
    launch(Q, None, NO_MODIFIERS)
    at_q, at_out = Q.data_ptr(), OUT.data_ptr()
    assert seen == [((at_q, at_out, at_out), (Q, OUT, modifiers), True), ((at_q, at_out), (Q, OUT, NO_MODIFIERS), True),
                    ((at_q, None), (Q, None, NO_MODIFIERS), True)]


def test_addresses_that_are_known_are_handed_on():
    launch, seen = launch_of()
    launch.at((1, 2, 3), lambda: (Q, OUT, NO_MODIFIERS))
    assert seen == [((1, 2, 3), (Q, OUT, NO_MODIFIERS), True)]


def test_the_front_end_gets_tensors_with_their_strides_and_addresses_stay_what_they_are():
    launch, seen = launch_of(strides=((128, 128, 16), (1, 2, 3, 4)))
    launch(Q, None)
    launch(Q, OUT)
    ((addresses, arguments, _), (_, (_, out, _), _)) = seen
    assert addresses == (Q.data_ptr(), None)
    assert arguments == (StridedTensor(Q, 128, 128, 16, 1), None, NO_MODIFIERS)
    assert out == StridedTensor(OUT, 1, 2, 3, 4)


def test_the_front_end_gets_descriptors_where_a_tensor_has_a_block():
    launch, seen = launch_of((([1, 1, 4, 16], 7),), strides=((128, 128, 16, 1),))
    launch(Q, OUT)
    ((addresses, (described, *others), _),) = seen
    assert addresses == (Q.data_ptr(), OUT.data_ptr())
    assert isinstance(described, TensorDescriptor)
    assert (described.base is Q, described.shape, described.strides, described.block_shape) == (
        True, [1, 1, 7, 16], [16, 16, 16, 1], [1, 1, 4, 16])
    assert others == [OUT, NO_MODIFIERS]


@pytest.mark.parametrize("tensors", [(), (Q,), (Q, OUT, NO_MODIFIERS, Q)], ids=len)
def test_too_few_and_too_many_tensors_are_refused(tensors):
    launch, _ = launch_of()
    with pytest.raises(TypeError, match=f"takes 2 to 3 tensors, got {len(tensors)}$"):
        launch(*tensors)


def test_modifiers_in_the_place_of_a_result_are_refused():
    """They were taken for a result that was not wanted, and the call ran without its dropout."""
    launch = Launch(attention_backward_dkdv_kernel, 1, (None, None), optional=4)
    with pytest.raises(TypeError, match=r"takes its modifiers as argument 12, got them as argument 10$"):
        launch(*[torch.zeros(1)] * 8, None, NO_MODIFIERS)


@pytest.mark.parametrize(("ctas", "grid"), [(5, (5, 1, 1)), ((5, 2), (5, 2, 1)), ((5, 2, 3), (5, 2, 3))])
def test_a_grid_has_one_to_three_dims(ctas, grid):
    assert launch_of(ctas=ctas)[0].grid == grid



def operands_of(*names):
    made = {"bias": torch.zeros(1, 2, 8, 8), "alibi_slopes": torch.zeros(1, 2),
            "mask": torch.ones(1, 1, 8, 8, dtype=torch.bool), "sinks": torch.zeros(2),
            "seed": torch.zeros(1, dtype=torch.int64)}
    made |= {f"{name}_{side}": torch.zeros(size, dtype=torch.int32) for side in "qk" for name, size in (
        ("cu_seqlens", 2), ("seqlens", 1), ("documents", (1, 4, 8)))}
    return Operands(**{name: made[name] for name in names})


@pytest.mark.parametrize("names", [
    (), *((name,) for name in ("bias", "alibi_slopes", "mask", "sinks", "seed", "seqlens_q", "seqlens_k")),
    ("cu_seqlens_q", "cu_seqlens_k"), ("documents_q", "documents_k"), ("bias", "sinks", "seed"),
    ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "sinks", "alibi_slopes")], ids=" ".join)
def test_operands_lie_where_their_modifiers_have_them(names):
    operands = operands_of(*names)
    q = torch.zeros(1, 2, 8, 16)
    problem = AttentionProblem.from_tensors(
        q, q, q, operands, mask=Mask(None, None, "top_left"),
        settings=ScoreSettings(dropout_p=0.5 if operands.seed is not None else 0.0))
    launch, seen = launch_of()
    launch(Q, OUT, modifiers_of(problem, operands))
    assert operand_addresses(problem)(operands) == seen[0][0][2:]
    assert operand_count(problem) == len(names)
    other = Operands._make([own.clone() if isinstance(own, torch.Tensor) else own for own in operands])
    assert sorted(operand_addresses(problem)(other)) == sorted(tensor.data_ptr() for tensor in other.present)


@pytest.mark.parametrize(("keys", "elements", "wide"), [
    (2**20, None, False), (2**20, 2**31, False), (2**20, 2**31 + 1, True), (2**20 + 1, None, True)])
def test_offsets_are_wide_where_a_function_may_number_over_2_31_pairs_or_elements(keys, elements, wide):
    tensors = () if elements is None else (torch.empty(elements, dtype=torch.bool, device="meta"),)
    function = ScoreFunction(torch=lambda score, *_: score, tensors=tensors)
    q, k = (torch.empty(1, 1, length, 8, device="meta") for length in (2**11, keys))
    for functions in (True, False):
        settings = ScoreSettings(score_function=function.code) if functions else ScoreSettings()
        problem = AttentionProblem.from_tensors(q, k, k, Operands(score_tensors=tensors if functions else ()),
                                                settings=settings)
        assert needs_int64(problem, q.stride(), k.stride()) is (wide and functions)
