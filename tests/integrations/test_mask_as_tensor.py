"""A model's mask, computed with: it is what eager attention's mask would have been, made once, and only then."""

import copy

import pytest
import torch

from integrations.models import transformers
from tilewise import causal, window
from tilewise.integrations.model_masks import ModelMask
from tilewise.integrations.transformers import attention_mask
from tilewise.masks import Mask, TensorMask

utils = transformers.masking_utils
B, SQ, SK = 2, 5, 7
PADDING = torch.arange(SK) >= torch.tensor([[0], [3]])
OTHERS = torch.randn(B, 4, SQ, SK, generator=torch.Generator().manual_seed(1))
BITS = torch.rand(B, 1, SQ, SK, generator=torch.Generator().manual_seed(2)) > 0.5


def call(**changes):
    return {"batch_size": B, "q_length": SQ, "kv_length": SK, "q_offset": SK - SQ, "kv_offset": 0,
            "mask_function": utils.causal_mask_function, "attention_mask": PADDING, "dtype": torch.float32} | changes


@pytest.fixture
def mask():
    return attention_mask(**call(), device="cpu")


@pytest.fixture
def eager():
    return utils.eager_mask(**call())


@pytest.fixture
def bits():
    given = call()
    del given["dtype"]
    return utils.sdpa_mask(**given, allow_is_causal_skip=False)


ON_NUMBERS = {
    "slice_a_head": lambda mask: mask[:, 0],
    "slice_keys": lambda mask: mask[..., 2:],
    "slice_the_last_query": lambda mask: mask[:, :, -1, :].reshape(-1)[-4:],
    "index_with_a_list": lambda mask: mask[[1, 0]],
    "add_to_scores": lambda mask: OTHERS + mask,
    "be_added_to": lambda mask: mask + OTHERS,
    "add_out_of_place": lambda mask: torch.add(OTHERS, mask),
    "add_in_place": lambda mask: OTHERS.clone().add_(mask),
    "subtract": lambda mask: 1.0 - mask,
    "multiply": lambda mask: mask * 0.5,
    "compare_with_zero": lambda mask: mask == 0,
    "compare_unequal": lambda mask: mask != 0,
    "compare_in_order": lambda mask: mask > -1,
    "negate": lambda mask: -mask,
    "masked_fill": lambda mask: mask.masked_fill(BITS, -3.0),
    "masked_fill_by_it": lambda mask: OTHERS.masked_fill(mask != 0, -3.0),
    "repeat": lambda mask: mask.repeat(1, 4, 1, 1),
    "expand": lambda mask: mask.expand(B, 4, SQ, SK),
    "reshape": lambda mask: mask.reshape(-1, SK),
    "view": lambda mask: mask.view(B, SQ, SK),
    "flip": lambda mask: mask.flip(0),
    "squeeze": lambda mask: mask.squeeze(1),
    "transpose": lambda mask: mask.transpose(-1, -2),
    "concatenate": lambda mask: torch.cat([mask, mask], dim=-1),
    "concatenate_a_tensor": lambda mask: torch.cat((OTHERS[:, :1], mask), -1),
    "pad": lambda mask: torch.nn.functional.pad(mask, (0, 2), value=0.0),
    "where": lambda mask: torch.where(BITS, mask, OTHERS),
    "all": lambda mask: torch.all(~(mask == 0.0), dim=2),
    "to_another_dtype": lambda mask: mask.to(torch.float16),
    "to_bits": lambda mask: mask.to(dtype=torch.bool, device="cpu"),
    "to_be_like_another": lambda mask: mask.to(OTHERS.half()),
    "as_bits": lambda mask: mask.bool(),
    "first_entry": lambda mask: next(iter(mask)),
    "softmax": lambda mask: (OTHERS + mask).softmax(-1),
}
ON_BITS = {
    "and": lambda mask: mask & BITS,
    "anded": lambda mask: BITS & mask,
    "or": lambda mask: mask | BITS,
    "xored": lambda mask: BITS ^ mask,
    "invert": lambda mask: ~mask,
    "and_by_name": lambda mask: torch.bitwise_and(mask, BITS),
    "not_by_name": lambda mask: torch.bitwise_not(mask),
}


def same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_operations_on_numbers_are_those_on_eagers_mask(name, mask, eager):
    same(ON_NUMBERS[name](mask), ON_NUMBERS[name](eager))


@pytest.mark.parametrize("name", ON_BITS)
def test_operations_on_bits_are_those_on_sdpas_mask(name, mask, bits):
    same(ON_BITS[name](mask), ON_BITS[name](bits))


def test_questions_are_answered_without_a_tensor(mask, eager):
    assert mask.size() == eager.size()
    assert mask.size(-1) == eager.size(-1)
    assert tuple(mask.shape) == tuple(eager.shape)
    for name in ("dtype", "device", "ndim"):
        assert getattr(mask, name) == getattr(eager, name)
    assert mask.dim() == eager.dim()
    assert len(mask) == len(eager)
    assert mask is mask.contiguous() is mask[:, :, :, :SK] is mask[:, :, :SQ, 0:] is mask.to(torch.float32)
    assert mask.to("cpu").visible.band == mask.visible.band
    assert mask.made == {}
    with pytest.raises(AttributeError, match="'ModelMask' object has no attribute 'wings'"):
        mask.wings  # noqa: B018
    assert not hasattr(mask, "__array__")
    assert {mask: 1}[mask] == 1
    assert copy.copy(mask).shape == mask.shape


def test_a_tensor_is_made_once(mask, monkeypatch):
    calls = []
    own = ModelMask.pairs
    monkeypatch.setattr(ModelMask, "pairs", lambda self: calls.append(1) or own(self))
    for operation in (*ON_NUMBERS.values(), *ON_BITS.values()):
        operation(mask)
    assert len(calls) == 1
    assert mask.added is mask.added
    assert mask.to("meta").made == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_hidden_is_the_least_number_of_the_models_dtype(dtype):
    same(attention_mask(**call(dtype=dtype)).added, utils.eager_mask(**call(dtype=dtype)))


PLACES = {
    "training": {"q_length": SK, "q_offset": 0},
    "decoding": {"q_length": 1, "q_offset": SK - 1},
    "several_new_tokens": {},
    "prompt_in_a_static_cache": {"q_offset": 0},
    "from_a_static_cache": {"q_length": 2, "q_offset": 3},
    "from_a_compiled_static_cache": {"q_length": 2, "q_offset": torch.tensor(3)},
}
FUNCTIONS = {
    "causal": utils.causal_mask_function,
    "window": utils.sliding_window_causal_mask_function(3),
    "full": utils.bidirectional_mask_function,
    "chunks": utils.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.long)),
    "no_keys": utils.sliding_window_causal_mask_function(0),
    "own": utils.and_masks(utils.causal_mask_function, lambda batch, head, query, key: (query + key) % 3 != 1),
}


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_mask_becomes_eagers(function, place, padding):
    given = call(mask_function=FUNCTIONS[function], attention_mask=padding, **PLACES[place])
    same(attention_mask(**given).added, utils.eager_mask(**given))


def test_packed_sequences_become_eagers():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(B, -1)
    packed = utils.and_masks(utils.causal_mask_function, utils.packed_sequence_mask_function(ids))
    given = call(mask_function=packed, attention_mask=None, **PLACES["training"])
    same(attention_mask(**given).added, utils.eager_mask(**given))


def test_a_mask_knows_without_looking_whether_it_hides_nothing():
    assert ModelMask(Mask(), None, (1, 1, 4, 4)).hides_nothing
    for visible in (causal(), window(2, 2), TensorMask(Mask(), torch.ones(1, 1, 4, 4, dtype=torch.bool))):
        assert not ModelMask(visible, None, (1, 1, 4, 4)).hides_nothing
    assert not ModelMask(Mask(), torch.tensor([3]), (1, 1, 4, 4)).hides_nothing
