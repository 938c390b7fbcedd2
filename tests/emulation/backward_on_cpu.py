"""The Hopper backward kernels of heads up to 128 on the CPU: what is in plain words, and how they are called."""

import math

import pytest
import torch

from emulation.backward_calls import dq_of_accum, extra_columns_of
from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.arguments import BackwardPointers, Lengths, StridedRows

gluon_on_cpu, plan_on_cpu, forward_on_cpu = (
    pytest.importorskip(f"emulation.{name}", reason="Triton is not installed") for name in (
        "gluon_on_cpu", "plan_on_cpu", "forward_on_cpu"))
(mask_plan, mask_ranges, pipeline, softmax, alibi, score_functions, varlen, tiles, augmented_k, bias, d64, d128,
 dq_accum, dq_shared, assignment, mmas, masking, epilogue, producers) = (
    pytest.importorskip(f"tilewise.kernels.hopper.{name}") for name in (
        "mask_plan", "mask_ranges", "pipeline", "softmax", "alibi", "score_functions", "varlen", "tile_scheduler",
        "backward.augmented_k",
        "backward.bias", "backward.d64", "backward.d128", "backward.dq_accum", "backward.dq_shared",
        "backward.kv_tile_assignment", "backward.mmas", "backward.masking", "backward.epilogue", "backward.producers"))
Descriptor, Pointer = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer
MODULES = (d64, d128, producers, mmas, masking, epilogue, dq_accum, dq_shared, augmented_k, bias, varlen, pipeline,
           softmax, alibi, score_functions, assignment, tiles, mask_plan, mask_ranges)
def clear_rows(tiles, stage, begin, stop, width):
    """By rows: the kernel's own knows in which order a tile lies in memory, which the tiles here do not have."""
    tile, rows = tiles.index(stage).reshape([64, width]), torch.arange(64)
    tile.store(torch.where(((rows >= begin) & (rows < stop))[:, None], tile.load(None), 0.0))


CONSTANTS = {(module, "QUERIES"): 64 for module in MODULES if hasattr(module, "QUERIES")} | {
    (module, "LOG2E"): math.log2(math.e) for module in (d64, d128, producers, bias, softmax)} | {
    (producers, "LOST"): 2.0**24, (producers, "clear_rows"): clear_rows} | {
    (module, "EXTRA_COLUMNS"): 16 for module in (d64, d128, augmented_k)} | {(augmented_k, "SLOPE_COLUMNS"): 6} | {
    (varlen, "_CHUNK"): 128, (varlen, "_CLEARED"): 32} | {
    (module, "WRITERS"): 2 for module in (dq_shared, dq_accum)} | {
    (module, "NO_TILE"): -1 for module in (d64, d128, producers, tiles)} | {
    (module, "scheduling_fence_of"): lambda values, turn: (values, turn) for module in (d128, pipeline)} | {
    (bias, "in_float32"): lambda numbers: numbers.float(), (softmax, "squashed"): forward_on_cpu.squashed,
    (d64, "ZERO"): 0, (d64, "ONE"): 1} | plan_on_cpu.plan_constants(MODULES)


def filled_splits(launch):
    """What splits write dk and dv to, of all keys: NaN."""
    return [torch.empty_strided(*form).fill_(float("nan")) for form in launch.forms]


def differentiate(problem, tensors, config, num_sms, together, plan=None, borders=None, slopes=None, added=None,
                  group_splits=1, function_tensors=()):
    """Return dq before it is scaled, dk and dv.

    together: how many CTAs run at once. plan: lists, bits and strides of a mask that is no band. borders: cu_seqlens of
    queries and keys, of packed sequences; in dq's place come then the accumulator and what tiles have written of dq.
    slopes: ALiBi's. added: a bias.
    group_splits: as of a schedule; dk and dv are then those of splits. function_tensors: what a score function reads.
    """
    lists, bits, strides = (None, None, None) if plan is None else plan
    launch = bound_backward(problem, config, num_sms, plans=() if plan is None else (strides,),
                            group_splits=group_splits)
    q, k, v, dout, lse, delta = tensors
    dq, dk, dv = (torch.full_like(tensor, float("nan"), dtype=problem.out_dtype) for tensor in (q, k, v))
    if group_splits > 1:
        launch, (dk, dv) = launch.launch, filled_splits(launch)
    assert not (config.dynamic_tiles or config.head_persistent) or launch.grid[0] <= num_sms
    is_set_first = config.head_persistent or (config.deterministic and borders is None)
    whole = torch.full((math.prod(launch.accum_shape),), float("nan") if is_set_first else 0.0)
    accum, semaphores = whole.split([launch.accum_rows * 256, whole.numel() - launch.accum_rows * 256])
    semaphores.zero_()
    read = extra_columns_of(lse, delta, slopes) if config.augmented_k else lse
    assert not config.augmented_k or read.shape == launch.columns_shape
    is_narrow = config.kernel == "d64"
    given = launch.taken((q, k, v, dout, lse, delta, dq, dk, dv), read,
                         None if added is None else launch._bias_read(added))
    described = launch._in_forms(given, lambda tensor, form: (
        Pointer(tensor.flatten()) if form is None else Descriptor(tensor, form[0])))
    of_delta = Pointer(delta.flatten()) if added is not None and not config.augmented_k else None
    target = Pointer(accum) if config.dq_from_registers else Descriptor(accum.view(-1, 256), launch.accum_block)
    counter = torch.zeros(1, dtype=torch.int32)
    workspace = Pointer(counter) if config.dynamic_tiles else Pointer(whole) if config.head_persistent else Pointer(
        semaphores.view(torch.int32)) if config.deterministic else None
    packed = (None, None) if borders is None else (Pointer(dk.view(-1)), Pointer(dv.view(-1)))
    flat = tuple(Pointer(one.flatten()) for one in function_tensors)
    pointers = BackwardPointers(*packed, None, *(None if part is None else Pointer(part.flatten())
                                                 for part in (lists, bits, slopes)), of_delta,
                                launch.function._replace(tensors=flat),
                                StridedRows(Pointer(dq.view(-1)), *dq.stride()[:3]) if launch.writes_dq else None)
    of_sequences = (None, None) if borders is None else map(Pointer, borders)
    lengths = () if is_narrow else (Lengths(*of_sequences, None, None),)
    gluon_on_cpu.run(launch.kernel, MODULES, launch.grid[0],
                     (*described, target, workspace, pointers, *lengths, *launch.scalars), CONSTANTS, together)
    assert not counter.any(), "the next launch fetches tiles by it"
    if borders is not None:
        return (accum, dq), dk, dv
    if config.head_persistent:
        return dq.float() / problem.scale, dk, dv
    parts = dq_of_accum(accum, sum(config.columns(problem)[0]) // 2, (problem.b, problem.hq), None)
    dq = parts.unflatten(2, (-1, 2, 64)).transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :q.shape[2], :problem.d]
    return dq, dk, dv
