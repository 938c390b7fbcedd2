"""Models that look the attention's name up in a table of classes: tilewise is in it, and gives what "sdpa" gives."""

import copy
import importlib
from dataclasses import dataclass

import pytest
import torch

from integrations.models import SIZES, transformers
from tilewise.integrations import class_tables
from tilewise.integrations.transformers import register

SEED = torch.Generator().manual_seed(5)
IMAGE = {"pixel_values": torch.randn(1, 3, 32, 32, generator=SEED)}
POINTS = {**IMAGE, "input_points": torch.tensor([[[[3.0, 4.0]]]])}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SAM_VISION = {**VISION, "image_size": 32, "patch_size": 8, "output_channels": 16, "mlp_dim": 48,
              "global_attn_indexes": [1], "window_size": 2}
DECODER = {"hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
           "iou_head_hidden_dim": 16}
SAM = {"vision_config": {**SAM_VISION, "num_pos_feats": 8}, "mask_decoder_config": DECODER,
       "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}}


@dataclass(frozen=True)
class Case:
    module: str
    config: str
    maker: str
    options: dict
    given: dict
    output: str = "last_hidden_state"


CASES = {
    "sam": Case("sam.{}_sam", "SamConfig", "SamModel", SAM, POINTS, "pred_masks"),
    "sam_hq": Case("sam_hq.{}_sam_hq", "SamHQConfig", "SamHQModel",
                   SAM | {"mask_decoder_config": DECODER | {"vit_dim": 32}}, POINTS, "pred_masks"),
    "unlimited_ocr": Case("unlimited_ocr.{}_unlimited_ocr", "UnlimitedOcrSamVisionConfig",
                          "UnlimitedOcrSamVisionEncoder", SAM_VISION | {"downsample_channels": [16, 32]}, IMAGE),
    "deepseek_ocr2": Case("deepseek_ocr2.{}_deepseek_ocr2", "DeepseekOcr2SamVisionConfig",
                          "DeepseekOcr2SamVisionEncoder", SAM_VISION | {"downsample_channels": [16, 32]}, IMAGE),
    "data2vec": Case("data2vec.{}_data2vec_vision", "Data2VecVisionConfig", "Data2VecVisionModel",
                     {**VISION, "intermediate_size": 48, "image_size": 32, "patch_size": 8,
                      "use_relative_position_bias": True}, IMAGE),
}


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture
def calls(monkeypatch):
    """Count the calls that come to tilewise by way of torch's function."""
    made = []
    own = class_tables.scaled_dot_product_attention
    monkeypatch.setattr(class_tables, "scaled_dot_product_attention",
                        lambda *arguments, **named: made.append(arguments) or own(*arguments, **named))
    return made


def modules_of(case):
    """Skip where Transformers has no such model."""
    try:
        return [importlib.import_module(f"transformers.models.{case.module.format(kind)}")
                for kind in ("configuration", "modeling")]
    except ModuleNotFoundError:
        pytest.skip(f"this Transformers has no {case.module}")


def model(case, implementation):
    configuration, modeling = modules_of(case)
    config = getattr(configuration, case.config)(**copy.deepcopy(case.options))
    torch.manual_seed(0)
    net = getattr(modeling, case.maker)._from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # position biases begin at 0, where faults hide
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return net


def outcome(case, implementation):
    net = model(case, implementation)
    out = net(**case.given)[case.output]
    out.square().mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_eager(name, calls):
    wanted = outcome(CASES[name], "eager")
    assert calls == []
    found = outcome(CASES[name], "tilewise")
    assert len(calls) == 2  # of the vision tower's layers
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_other_models_functions_stay_torchs(calls):
    """The class within the table alone comes here; torch's function outside of it is torch's."""
    model(CASES["sam"], "sdpa")(**POINTS)
    q = torch.randn(1, 2, 5, 8)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert calls == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_gives_the_same():
    torch._dynamo.reset()
    case = CASES["data2vec"]
    net = model(case, "tilewise")
    with torch.no_grad():
        wanted = net(**case.given)[case.output]
        found = torch.compile(net, backend="aot_eager")(**case.given)[case.output]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_this_transformers_does_not_have_is_passed_over(monkeypatch):
    """Neither a model nor a table of another version is missed, nor a table that has no class of torch's function."""
    modeling = importlib.import_module("transformers.models.git.modeling_git")
    monkeypatch.setattr(class_tables, "_TABLES", {
        "no_such_model.modeling_no_such_model": "TABLE", "git.no_such_module": "TABLE", "git.modeling_git": "NO_TABLE",
        "llama.modeling_llama": "TABLE"})
    class_tables.enter("tilewise")
    monkeypatch.setattr(class_tables, "_TABLES", {"git.modeling_git": "GIT_SELF_ATTENTION_CLASSES"})
    class_tables.enter("tilewise")
    assert set(modeling.GIT_SELF_ATTENTION_CLASSES) == {"eager"}


def test_git_takes_the_name_for_its_vision_half():
    """Its table has an eager class alone; docs/huggingface.md says what to name, and the name alone is a KeyError."""
    config = transformers.GitConfig(**SIZES, vision_config={**VISION, "intermediate_size": 48, "image_size": 8,
                                                            "patch_size": 4})
    given = {"input_ids": torch.randint(2, 60, (2, 9)), "pixel_values": torch.randn(2, 3, 8, 8)}
    found = []
    for names in ("eager", {"": "eager", "vision_config": "tilewise"}):
        torch.manual_seed(0)
        net = transformers.GitForCausalLM._from_config(copy.deepcopy(config), attn_implementation=names).eval()
        found.append(net(**given).logits.detach())
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(KeyError, match="tilewise"):
        transformers.GitForCausalLM._from_config(config, attn_implementation="tilewise")
