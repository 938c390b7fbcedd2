"""Models of Transformers whose tokens are sharded: losses and gradients are those of one process."""

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed: there is no model to shard")
MODULE = "distributed.transformers_models"
TOLERANCE = 2e-5  # of float32, in which models norm and rotate
MODELS = ("llama", "mistral_window", "qwen2_some_layers_windowed", "gemma2_softcap", "gemma3_window", "gpt_oss_sinks",
          "llama4_chunks", "deepseek_v3_unequal_head_dims", "gpt2_heads_of_their_own")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_losses_and_gradients_are_those_of_one_process(workers, name, layout):
    for found in workers.run(2, MODULE, "compare", name, layout, False):
        assert max(found) < TOLERANCE


# Of GPT-OSS, Transformers' own mask does not know that sequences are packed.
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_some_layers_windowed"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (3, "contiguous")])
def test_packed_sequences_are_those_of_one_process(workers, name, ranks, layout):
    for found in workers.run(ranks, MODULE, "compare", name, layout, True):
        assert max(found) < TOLERANCE


def test_a_mesh_of_two_dims_serves(workers):
    for found in workers.run((2, 2), MODULE, "compare", "mistral_window", "zigzag", False):
        assert max(found) < TOLERANCE


def test_a_model_computes_its_own_loss_from_shifted_labels(workers):
    assert max(map(abs, workers.run(2, MODULE, "own_loss"))) < 1e-5


POSITIONS = ("InvalidInput", "position_ids are not those of this rank's 12 tokens in layout 'zigzag'; allowed are "
                             "tilewise.distributed.positions(...), counted from the start of each sequence.")
MESSAGES = {
    "left_out": POSITIONS, "contiguous": POSITIONS, "not_within": POSITIONS,
    "one_length": ("InvalidInput", "of cu_seq_lens_q and cu_seq_lens_k one is given; allowed are both or neither."),
    "two_lengths": ("InvalidInput", "cu_seq_lens_q and cu_seq_lens_k are two tensors; allowed under context parallel "
                                    "is one for both"),
    "batch": ("UnsupportedProblem", "cu_seq_lens_q and cu_seq_lens_k are given with 2 batch entries and dropout 0.0; "
                                    "allowed are one entry and no dropout."),
    "chunks": ("UnsupportedProblem", "cu_seq_lens_q and cu_seq_lens_k are given with chunks; allowed under context "
                                     "parallel are packed sequences without"),
    "padding": ("UnsupportedProblem", "attention_mask marks padding; allowed under context parallel are batches "
                                      "without."),
    "all_tokens": (None, None),
    "four_dims": ("UnsupportedProblem", "attention_mask is a Tensor; allowed under context parallel is what the mask "
                                        "function makes that register() enters."),
    "probabilities": ("UnsupportedProblem", "output_attentions is True; allowed is False"),
    "unknown": ("UnsupportedProblem", "sharpness is given, a float; allowed is None"),
    "cache": ("UnsupportedProblem", "the mask is of 12 queries and 24 keys from 0 on; allowed under context parallel "
                                    "are the tokens of one call: no cache of earlier ones."),
    "bias": ("UnsupportedProblem", "position_bias is given; allowed under context parallel is None: it is not cut over "
                                   "ranks."),
    "name": ("InvalidInput", "name is 'flash'; allowed is one without 'flash'"),
    "layout": ("InvalidInput", "layout is 'striped'; allowed are"),
    "mesh": ("InvalidInput", "mesh is a NoneType; allowed is a torch.distributed.device_mesh.DeviceMesh"),
}


def test_packed_sequences_without_lengths_are_refused_whatever_a_rank_holds_of_them(workers):
    first, second = workers.run(2, MODULE, "packed_alone")
    # The jump of the first one's positions is where the layout has one.
    assert first == POSITIONS
    assert second == ("UnsupportedProblem", "position_ids mark packed sequences, which ranks have to know as a whole; "
                                            "hand cu_seq_lens_q and cu_seq_lens_k of all ranks' tokens to the model as "
                                            "well.")


def test_padding_on_one_rank_is_told_to_all(workers):
    *others, last = workers.run(3, MODULE, "padding_of_one")
    assert last[0] == "UnsupportedProblem"
    assert others == [("InvalidInput", f"rank 2 of the mesh refused the call: {last[1]}")] * 2


def test_what_is_not_cut_is_refused_by_name_on_every_rank(workers):
    found = workers.run(2, MODULE, "refusals")
    for of_rank in found:
        assert set(of_rank) == set(MESSAGES)
        unlike = {name: got for name, got in of_rank.items()
                  if got[0] != MESSAGES[name][0] or (MESSAGES[name][1] or "") not in (got[1] or "")}
        assert unlike == {}
