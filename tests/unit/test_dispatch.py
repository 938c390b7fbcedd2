"""Which backend is chosen, by whom, and what a refusal says."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from tilewise import (
    InvalidInput,
    UnsupportedProblem,
    attention,
    causal,
    chunk,
    dispatch,
    explain,
    prefix,
    sink_tokens,
    use_backend,
    window,
)
from tilewise.backends.base import Gradients, Needs, Results
from tilewise.dispatch import BACKENDS, choose, explain_problem, get_backend
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, Operands, OperandSpec, ScoreSettings
from tilewise.problem.sequences import Sequences
from tilewise.support.caches import clear_caches
from tilewise.tuning.device import DeviceSpec

LENGTHS = Sequences(seqlens_k=OperandSpec((4,), (1,), torch.int32))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("TILEWISE_BACKEND", raising=False)


def _qkv(dtype=torch.float32, s=8, d=16):
    return [torch.zeros(1, 2, s, d, dtype=dtype) for _ in range(3)]


def _problem(mask=causal(), dtype=torch.float32):  # noqa: B008 - a frozen value
    return AttentionProblem.from_tensors(*_qkv(dtype), mask=mask)


class _Recorder:
    """A backend that takes everything, computes zeros and remembers which passes it was called for."""

    name = "recorder"

    def __init__(self):
        self.calls = []

    def why_not(self, problem):
        return None

    def forward(self, problem, q, k, v, operands=NO_OPERANDS):
        self.calls.append("forward")
        return Results(torch.zeros_like(q), q.new_zeros(q.shape[:3]))

    def backward(self, problem, saved, dout, dlse, needs=Needs()):  # noqa: B008 - a value, never changed
        self.calls.append("backward")
        return Gradients(*(torch.zeros_like(tensor) for tensor in saved[:3]))


@pytest.fixture
def recorder(monkeypatch):
    """The backend "reference", replaced by one that records its calls."""
    recorder = _Recorder()
    monkeypatch.setattr(get_backend("reference").__class__, "forward", lambda _, *a: recorder.forward(*a))
    monkeypatch.setattr(get_backend("reference").__class__, "backward", lambda _, *a: recorder.backward(*a))
    return recorder


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_called_by_its_file_name(name):
    assert get_backend(name).name == name
    assert get_backend(name).__class__.__module__ == f"tilewise.backends.{name}"


def test_unknown_backend_raises_and_lists_the_known_ones():
    message = ("backend is 'flash'; allowed are 'gluon', 'triton', 'cuda', 'cuda_ieee', 'torch', 'cudnn', 'reference', "
               "or None to choose.")
    for ask in (lambda: get_backend("flash"), lambda: choose(_problem(), "flash"),
                lambda: attention(*_qkv(), backend="flash"), lambda: explain(*_qkv(), backend="flash")):
        with pytest.raises(InvalidInput) as caught:
            ask()
        assert str(caught.value) == message


def test_explicit_backend_never_falls_back():
    with pytest.raises(UnsupportedProblem) as caught:
        attention(*_qkv(), mask=window(2, 2), backend="torch")
    reason = get_backend("torch").why_not(_problem(window(2, 2)))
    assert caught.value.reasons == {"torch": reason}
    assert str(caught.value) == (
        "backend 'torch' refuses this problem: forward b1 h2 s8x8 d16 float32 window(2, 2) on cpu\n"
        f"  torch: {reason}"
    )


def test_first_backend_that_takes_the_problem_is_chosen():
    assert choose(_problem()).name == "torch"
    assert choose(_problem(window(2, 2))).name == "reference", "torch knows no window"
    assert choose(_problem().backward(lse_grad=True)).name == "reference", "torch has no gradient through lse"


def test_float16_goes_to_the_reference_on_cpus():
    for problem in (_problem(dtype=torch.float16), _problem(dtype=torch.float16).backward(lse_grad=False)):
        assert choose(problem).name == "reference"


def test_bfloat16_gradients_go_to_torch_only_where_the_cpu_multiplies_bfloat16(monkeypatch):
    forward = _problem(dtype=torch.bfloat16)
    for multiplies, first in ((True, "torch"), (False, "reference")):
        monkeypatch.setattr(dispatch, "_cpu_multiplies_bfloat16", lambda answer=multiplies: answer)
        assert dispatch.order(forward)[0] == "torch"
        assert dispatch.order(forward.backward(lse_grad=False))[0] == first


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_order_names_every_backend_once_but_for_those_on_request(dtype, device):
    problem = AttentionProblem.from_tensors(*(t.to(device) for t in _qkv(dtype)))
    for side in (problem, problem.backward(lse_grad=False)):
        assert sorted((*dispatch.order(side), *dispatch.ON_REQUEST)) == sorted(BACKENDS)


def _sized(**fields):
    sizes = {"d": 64, "dv": 64, "hq": 4, "hk": 4} | fields
    return replace(_problem(dtype=torch.bfloat16), device=torch.device("cuda", 0), **sizes)


@pytest.mark.parametrize(("fields", "forward", "backward"), [
    ({"b": 4, "sq": 4096, "sk": 4096}, "gluon", "gluon"), ({}, "triton", "triton"),
    ({"b": 200, "sq": 512, "sk": 512}, "gluon", "gluon"),
    ({"b": 16, "sq": 512, "sk": 512, "dv": 128}, "gluon", "gluon"),
    ({"b": 12, "sq": 512, "sk": 512}, "triton", "gluon"), ({"b": 2, "sq": 512, "sk": 512}, "triton", "triton"),
    ({"b": 1, "sq": 65, "sk": 65, "dv": 129}, "gluon", "gluon"),
    ({"b": 64, "sq": 65, "sk": 4096, "hk": 4}, "gluon", "gluon"),
    ({"b": 4, "sq": 4096, "sk": 4096, "sequences": LENGTHS}, "gluon", "gluon"),
    ({"b": 1, "sq": 8192, "sk": 8192, "sequences": Sequences(8, LENGTHS.seqlens_k, LENGTHS.seqlens_k)}, "gluon",
     "gluon"),
    ({"b": 1, "sq": 8192, "sk": 8192, "sequences": Sequences(80, LENGTHS.seqlens_k, LENGTHS.seqlens_k)}, "triton",
     "gluon"),
    ({"b": 1, "sq": 1000, "sk": 1000, "dv": 256, "sequences": Sequences(125, *LENGTHS[1:3])}, "triton", "triton"),
    ({"b": 4, "sq": 4096, "sk": 4096, "sequences": LENGTHS, "deterministic": True}, "gluon", "gluon"),
    ({"b": 1, "sq": 1000, "sk": 1000, "deterministic": True,
      "sequences": Sequences(125, LENGTHS.seqlens_k, LENGTHS.seqlens_k)}, "gluon", "gluon"),
])
def test_gpus_ask_gluon_first_for_what_is_worth_its_launch(fields, forward, backward):
    problem = _sized(**fields)
    for side, first in ((problem, forward), (problem.backward(lse_grad=False), backward)):
        second = {"gluon": "triton", "triton": "gluon"}[first]
        assert dispatch.order(side) == (first, second, "cuda", "cuda_ieee", "torch", "reference")


@pytest.mark.parametrize(("fields", "forward", "backward"), [
    ({"sq": 512, "sk": 512}, "triton", "gluon"), ({"sq": 65, "sk": 65}, "triton", "gluon"),
    ({"sq": 65, "sk": 65, "d": 80, "dv": 80}, "gluon", "gluon"),
    ({"sq": 65, "sk": 65, "d": 40, "dv": 80}, "gluon", "gluon"), ({"sq": 64, "sk": 512, "d": 128}, "triton", "triton"),
    ({"sq": 4096, "sk": 4096}, "gluon", "gluon"),
])
@pytest.mark.parametrize("b", [1, 200])
def test_of_deterministic_calls_one_entry_decides_or_none(fields, forward, backward, b):
    """Bits are no affair of a batch, so its size is not asked: more entries gain by gluon, and one loses little."""
    problem = _sized(b=b, deterministic=True, **fields)
    assert (dispatch.order(problem)[0], dispatch.order(problem.backward(lse_grad=False))[0]) == (forward, backward)


@pytest.fixture
def tf32():
    """Set whether torch may multiply in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda allowed: setattr(matmul, "fp32_precision", "tf32" if allowed else "ieee")
    matmul.fp32_precision = before


def _on_gpu(monkeypatch, arch, **fields):
    """A plain problem on a GPU that is not here."""
    monkeypatch.setattr(dispatch, "device_spec", lambda device: DeviceSpec.of_arch(arch))
    return replace(_problem(), device=torch.device("cuda", 0), **{"sq": 1024, "sk": 1024, "d": 64, "dv": 64} | fields)


@pytest.mark.parametrize(("arch", "dtype", "allowed", "asked"), [
    ("sm_90", torch.float32, False, ("cuda", "triton", "gluon")),
    ("sm_90", torch.float32, True, ("triton", "gluon", "cuda")),
    ("sm_80", torch.float32, False, ("triton", "gluon", "cuda")),
    ("gfx942", torch.float32, False, ("triton", "gluon", "cuda")),
    ("sm_90", torch.bfloat16, False, ("triton", "gluon", "cuda")),
])
def test_cuda_is_asked_first_where_its_float32_kernels_were_timed_to_be_faster(monkeypatch, tf32, arch, dtype, allowed,
                                                                               asked):
    tf32(allowed)
    problem = _on_gpu(monkeypatch, arch, dtype=dtype)
    for side in (problem, problem.backward(lse_grad=False)):
        assert dispatch.order(side) == (*asked, "cuda_ieee", "torch", "reference")


@pytest.mark.parametrize(("sizes", "is_first"), [
    ({"d": 128, "dv": 128}, True), ({"d": 96}, True), ({"d": 129}, False), ({"dv": 136}, False), ({"d": 63}, False),
    ({"dv": 40}, False), ({"sq": 1023}, False), ({"sk": 1023}, False), ({"sq": 1}, False)])
def test_cuda_is_asked_first_at_the_sizes_that_were_timed(monkeypatch, tf32, sizes, is_first):
    tf32(False)
    first = dispatch.order(_on_gpu(monkeypatch, "sm_90", dtype=torch.float32, **sizes))[0]
    assert (first == "cuda") is is_first


def test_choice_follows_torchs_tf32_setting_from_call_to_call(monkeypatch, tf32):
    problem = _on_gpu(monkeypatch, "sm_90", sq=1025)
    for name in BACKENDS:
        monkeypatch.setattr(get_backend(name).__class__, "why_not", lambda self, _: None)
    for allowed, name in ((False, "cuda"), (True, "triton"), (False, "cuda")):
        tf32(allowed)
        assert choose(problem).name == explain_problem(problem).forward == name
        assert choose(problem, tf32=not allowed).name != name
        assert choose(problem, "triton").name == "triton"


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_calls_follow_torchs_tf32_setting_forward_and_backward(monkeypatch, tf32, recorder, options):
    """What a call resolves to is kept: without the setting in its key, the first call would decide for all."""
    real = get_backend("torch")
    monkeypatch.setattr(real.__class__, "why_not", lambda self, _: None)
    for side in ("forward", "backward"):
        monkeypatch.setattr(real.__class__, side, lambda _, *given, side=side: (
            getattr(_Recorder(), side)(*given)))
    monkeypatch.setattr(dispatch, "order", lambda problem, tf32: ("reference",) if tf32 else ("torch",))
    clear_caches()
    try:
        q, k, v = (tensor.requires_grad_() for tensor in _qkv())
        for allowed in (False, True, False, True):
            recorder.calls.clear()
            tf32(allowed)
            attention(q, k, v, **options).sum().backward()
            assert recorder.calls == (["forward", "backward"] if allowed else [])
    finally:
        clear_caches()


@pytest.mark.parametrize(("fields", "first"), [
    ({}, "gluon"), ({"hk": 32}, "triton"), ({"b": 4}, "triton"), ({"b": 4, "sk": 65536}, "gluon"),
    ({"deterministic": True}, "triton"), ({"b": 4, "sk": 65536, "deterministic": True}, "triton"),
])
def test_few_queries_are_gluons_where_heads_of_a_group_share_a_tile_or_keys_are_cut(fields, first):
    sizes = {"b": 64, "sq": 1, "sk": 4096, "hq": 32, "hk": 8, "mask": causal("bottom_right")} | fields
    problem = replace(_problem(dtype=torch.bfloat16), device=torch.device("cuda", 0), **sizes)
    assert dispatch.order(problem)[0] == first
    assert dispatch.order(problem.backward(lse_grad=False))[0] == "triton"


def test_when_every_backend_refuses_the_error_holds_every_reason(monkeypatch):
    problem = _problem(window(2, 2))
    for name in BACKENDS:
        monkeypatch.setattr(get_backend(name).__class__, "why_not", lambda self, _: f"{self.name} says no")
    with pytest.raises(UnsupportedProblem) as caught:
        dispatch._chosen.__wrapped__(problem, None, False)  # past the cache, which may know the problem
    assert caught.value.reasons == {name: f"{name} says no" for name in BACKENDS if name not in dispatch.ON_REQUEST}
    assert str(caught.value).startswith("no backend takes this problem: forward b1 h2 s8x8 d16 float32 window(2, 2)")


@pytest.mark.parametrize(("problem", "words"), [
    (_problem(window(2, 2)), "a causal one without a window whose first seeing query sees one key; got window(2, 2)"),
    (_problem().backward(lse_grad=True), "no gradient through lse"),
    (AttentionProblem.from_tensors(*(torch.zeros(1, 1, 4, d) for d in (8, 8, 5))), "equal head dims, got 8"),
    (AttentionProblem.from_tensors(*(torch.zeros(1, 1, s, 8) for s in (4, 0, 0))), "at least one query that sees"),
    (AttentionProblem.from_tensors(*(torch.zeros(1, 1, 8, 4).mT for _ in range(3))), "stride 1 in the last dim"),
    (AttentionProblem.from_tensors(*(torch.zeros(1, 1, s, 8) for s in (4, 7, 7)), mask=causal("bottom_right")),
     "got causal(alignment='bottom_right') with 4 queries and 7 keys"),
    (AttentionProblem.from_tensors(*(torch.zeros(1, 1, 4, 8, device="meta") for _ in range(3))),
     "runs on CPUs and CUDA devices, got meta"),
])
def test_torch_refuses_in_words(problem, words):
    assert words in get_backend("torch").why_not(problem)


@pytest.mark.parametrize(("operands", "settings", "words"), [
    (Operands(bias=torch.zeros(1, 1, 8, 8)), ScoreSettings(), "takes no bias"),
    (Operands(alibi_slopes=torch.zeros(1, 2)), ScoreSettings(), "takes no ALiBi slopes"),
    (Operands(mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)), ScoreSettings(), "takes no mask tensor"),
    (NO_OPERANDS, ScoreSettings(softcap=30.0), "takes no softcap"),
    (Operands(sinks=torch.zeros(2)), ScoreSettings(), "takes no sinks"),
    (Operands(seed=torch.tensor([1])), ScoreSettings(dropout_p=0.1), "takes no dropout"),
    (NO_OPERANDS, ScoreSettings(max_logit=True), "takes no max_logit"),
    (Operands(documents_q=torch.zeros(1, 4, 8, dtype=torch.int32),
              documents_k=torch.zeros(1, 4, 8, dtype=torch.int32)), ScoreSettings(), "takes no documents"),
    (Operands(seqlens_k=torch.tensor([5])), ScoreSettings(),
     "takes no lengths that are data: neither seqlens nor packed sequences"),
    (Operands(cu_seqlens_q=torch.tensor([0, 5, 8]), cu_seqlens_k=torch.tensor([0, 5, 8])), ScoreSettings(),
     "takes no lengths that are data: neither seqlens nor packed sequences"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_torch_refuses_each_option_and_the_reference_takes_it(operands, settings, words):
    problem = AttentionProblem.from_tensors(*_qkv(), operands, settings=settings)
    for side in (problem, problem.backward(lse_grad=False)):
        assert get_backend("torch").why_not(side) == words
        assert choose(side).name == "reference"


@pytest.mark.parametrize("mask", [prefix(3), chunk(4), causal() & sink_tokens(2)], ids=str)
def test_torch_refuses_a_mask_with_exceptions(mask):
    assert get_backend("torch").why_not(_problem(mask)) == f"takes no prefix, sink tokens or chunks, got {mask}"


def test_torch_takes_a_window_that_hides_nothing_and_blind_queries():
    taken = [(8, 8, window(8, 7)), (8, 8, causal() & window(7, 0)), (9, 4, causal("bottom_right")),
             (4, 9, causal("top_left")), (1, 9, causal("bottom_right"))]
    for sq, sk, mask in taken:
        tensors = (torch.zeros(1, 1, s, 8) for s in (sq, sk, sk))
        assert get_backend("torch").why_not(AttentionProblem.from_tensors(*tensors, mask=mask)) is None, (sq, sk, mask)


def _on_cuda(monkeypatch, capability, **fields):
    """A CUDA problem, on a machine without the device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tensors = [torch.zeros(1, 1, s, fields.get("d", 64), dtype=fields.get("dtype", torch.float16), device="meta")
               for s in (fields.get("sq", 8), 8, 8)]
    problem = AttentionProblem.from_tensors(*tensors, mask=fields.get("mask", causal("top_left")))
    return replace(problem, device=torch.device("cuda", 0))


@pytest.mark.parametrize(("capability", "fields", "words"), [
    ((7, 5), {"d": 16}, "capability 8.0 or newer, got 7.5"),
    ((9, 0), {"dtype": torch.float32}, "float16 and bfloat16 on CUDA devices, got torch.float32"),
    ((9, 0), {"d": 20}, "multiple of 8 on CUDA devices, got 20"),
    ((9, 0), {"d": 264}, "head dim up to 256 on CUDA devices, got 264"),
    ((9, 0), {"sq": 12}, "equal lengths on CUDA devices, got 12 queries and 8 keys"),
])
def test_torch_refuses_in_words_on_cuda(monkeypatch, capability, fields, words):
    assert words in get_backend("torch").why_not(_on_cuda(monkeypatch, capability, **fields))


def test_torch_on_cuda_refuses_only_the_backward_pass_of_wide_heads_on_some_devices(monkeypatch):
    torch_backend = get_backend("torch")
    problem = _on_cuda(monkeypatch, (8, 6), d=256)
    assert torch_backend.why_not(problem) is None
    assert "head dim up to 192 for the backward pass" in torch_backend.why_not(problem.backward(lse_grad=False))


def test_reference_refuses_a_deterministic_call_on_a_gpu_alone():
    problem = AttentionProblem.from_tensors(*_qkv(), deterministic=True)
    assert get_backend("reference").why_not(problem) is None
    for side in (problem, problem.backward(lse_grad=False)):
        assert get_backend("reference").why_not(replace(side, device=torch.device("cuda", 0))) == (
            "gives a sequence bits that depend on its batch on CUDA devices, and a deterministic result was asked for")


def test_torch_refuses_a_deterministic_call():
    """Three queries of 700 keys had other bits beside other sequences, on a CPU with two threads."""
    problem = AttentionProblem.from_tensors(*_qkv(), deterministic=True)
    reason = "gives a sequence bits that depend on its batch, and a deterministic result was asked for"
    assert get_backend("torch").why_not(problem) == get_backend("torch").why_not(
        problem.backward(lse_grad=False)) == reason
    assert explain(*_qkv()).forward == "torch"
    assert explain(*_qkv(), deterministic=True).forward == "reference"


def test_explain_tells_the_choice_and_every_reason():
    explanation = explain(*_qkv(), mask=window(2, 2))
    assert (explanation.forward, explanation.backward) == ("reference", "reference")
    assert set(explanation.reasons) == {(side, name) for side in ("forward", "backward") for name in BACKENDS}
    assert explanation.reasons["forward", "reference"] is None
    assert "got window(2, 2)" in explanation.reasons["backward", "torch"]


def test_explanation_prints_one_line_a_pass_and_backend():
    lines = str(explain(*_qkv(), mask=window(2, 2))).splitlines()
    assert lines[0] == "b1 h2 s8x8 d16 float32 window(2, 2) on cpu"
    assert lines[1].split(maxsplit=2)[:2] == ["forward", "torch"]
    assert lines[1].split(maxsplit=2)[2].startswith("no: takes no mask")
    assert "  forward  reference  chosen" in lines
    assert "  backward reference  chosen" in lines
    assert len(lines) == 1 + 2 * len(BACKENDS)


def test_explain_does_not_raise_for_a_refusal():
    explanation = explain(*_qkv(), mask=window(2, 2), backend="torch")
    assert (explanation.forward, explanation.backward) == (None, None)


def test_explain_agrees_with_choose():
    for mask in (causal(), window(2, 2)):
        for dtype in (torch.float16, torch.float32, torch.float64):
            problem = _problem(mask, dtype)
            explanation = explain_problem(problem)
            assert explanation.forward == choose(problem).name
            assert explanation.backward == choose(problem.backward(lse_grad=False)).name


def test_use_backend_holds_inside_its_block(recorder):
    attention(*_qkv())
    assert recorder.calls == [], "torch serves this call by itself"
    with use_backend("reference"):
        attention(*_qkv())
    assert recorder.calls == ["forward"]
    attention(*_qkv())
    assert recorder.calls == ["forward"]


def test_use_backend_refuses_a_name_at_once_also_where_no_block_follows():
    with pytest.raises(InvalidInput, match="'nonsense'"):
        use_backend("nonsense")


def test_use_backend_holds_for_the_backward_pass_run_after_the_block(recorder):
    q, k, v = (tensor.requires_grad_() for tensor in _qkv())
    with use_backend("reference"):
        out = attention(q, k, v)
    out.sum().backward()
    assert recorder.calls == ["forward", "backward"]


def test_an_argument_outranks_use_backend(recorder):
    with use_backend("reference"):
        attention(*_qkv(), backend="torch")
    assert recorder.calls == []


def test_use_backend_refuses_as_the_argument_does():
    with use_backend("torch"), pytest.raises(UnsupportedProblem, match="backend 'torch' refuses"):
        attention(*_qkv(), mask=window(2, 2))
    with pytest.raises(InvalidInput, match="backend is 'flash'"), use_backend("flash"):
        pass


def test_environment_names_the_backend(recorder, monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    attention(*_qkv())
    assert recorder.calls == ["forward"]
    with use_backend("torch"):
        attention(*_qkv())
    assert recorder.calls == ["forward"], "the scope outranks the environment"
    monkeypatch.setenv("TILEWISE_BACKEND", "flash")
    with pytest.raises(InvalidInput, match="backend is 'flash'"):
        attention(*_qkv())


def test_use_backend_does_not_reach_another_thread():
    chosen = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: chosen.append(explain(*_qkv()).forward))
        thread.start()
        thread.join()
        chosen.append(explain(*_qkv()).forward)
    assert chosen == ["torch", "reference"]


def test_use_backend_does_not_reach_a_task_that_runs_meanwhile():
    async def task(name, chosen):
        with use_backend(name):
            await asyncio.sleep(0)
            chosen[name] = explain(*_qkv()).forward

    async def both():
        chosen = {}
        await asyncio.gather(task("reference", chosen), task("torch", chosen))
        return chosen

    assert asyncio.run(both()) == {"reference": "reference", "torch": "torch"}
