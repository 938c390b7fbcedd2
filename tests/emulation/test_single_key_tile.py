"""Where one tile holds all keys, one launch makes the gradients that three make elsewhere."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import tilewise as tw
from tilewise.backends import triton
from tilewise.kernels.triton.launch import Launch
from tilewise.support.caches import clear_caches
from tilewise.testing.cases import Case
from tilewise.testing.inputs import make_inputs

OPTIONS = {
    "plain": {},
    "causal": {"mask": tw.causal("top_left")},
    "window": {"mask": tw.window(90, 10, "top_left")},
    "prefix": {"mask": tw.causal("bottom_right") & tw.prefix(7)},
    "softcap": {"softcap": 5.0},
    "bias": {"bias": torch.linspace(-2, 2, 37)[None, None, None]},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 1, 4), "mask": tw.causal("top_left")},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}


def gradients(case, dtype, device, options):
    q, k, v, dout, _ = make_inputs(case, dtype, device)
    options = {name: given.to(device) if isinstance(given, torch.Tensor) else given for name, given in options.items()}
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = tw.attention(*leaves, backend="triton", **options)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("name", OPTIONS)
def test_one_launch_makes_the_gradients_of_three(monkeypatch, device, name):
    case = Case("few_keys", b=2, hq=4, hk=2, sq=100, sk=37, d=40, dv=24)
    dtype, launched = torch.float16, []
    enqueue = Launch.at

    def noted(launch, addresses, tensors):
        launched.append(launch.kernel.__name__)
        enqueue(launch, addresses, tensors)

    monkeypatch.setattr(Launch, "at", noted)
    clear_caches()
    alone = gradients(case, dtype, device, OPTIONS[name])
    one_launch, launched = launched, []
    clear_caches()
    monkeypatch.setattr(triton, "single_tile_config", lambda problem, spec: None)
    apart = gradients(case, dtype, device, OPTIONS[name])
    clear_caches()
    forward, dkdv = "attention_forward_kernel", "attention_backward_dkdv_kernel"
    assert one_launch == [forward, dkdv]
    assert launched == [forward, "attention_delta_kernel", dkdv, "attention_backward_dq_kernel"]
    near = 4 * torch.finfo(dtype).eps
    for one, three in zip(alone, apart, strict=True):
        assert one.any()
        torch.testing.assert_close(one, three, rtol=near, atol=near * float(three.abs().max()))
