"""Tiny models with random weights, one of each kind of attention, and what they are called with."""

from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed: nothing to compare with")

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": None}
HEAD = {"head_dim": 8}
WINDOW = 5
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
          "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2}
# Name: class of the configuration, and what differs from SIZES.
DECODERS = {
    "llama": ("LlamaConfig", {}),
    "mistral_window": ("MistralConfig", {"sliding_window": WINDOW, **HEAD}),
    "qwen2_some_layers_windowed": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW,
                                                   **ALTERNATING}),
    "gemma2_softcap": ("Gemma2Config", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0,
                                        "query_pre_attn_scalar": 8, **HEAD, **ALTERNATING}),
    "gemma3_window": ("Gemma3TextConfig", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, **HEAD,
                                           **ALTERNATING}),
    "gpt_oss_sinks": ("GptOssConfig", {"sliding_window": WINDOW, **HEAD, **EXPERTS, **ALTERNATING}),
    "llama4_chunks": ("Llama4TextConfig", {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48,
                                           "interleave_moe_layer_step": 3, "moe_layers": [], "no_rope_layers": [1, 0],
                                           **HEAD}),
    "deepseek_v3_unequal_head_dims": ("DeepseekV3Config", LATENT),
    "gpt2_heads_of_their_own": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "phi3_packed_projection": ("Phi3Config", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", {}),
}


ENCODERS = {
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "modernbert_window": ("ModernBertConfig", "ModernBertForMaskedLM",
                          {"local_attention": WINDOW - 1, "global_attn_every_n_layers": 2}),
    "vit_without_a_mask": ("ViTConfig", "ViTModel", {"image_size": 12, "patch_size": 4}),
}
BOTH = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1}
# Encoders with decoders: keys and values of the cross attention are of another length than the queries.
PAIRS = {
    "bart": ("BartConfig", "BartForConditionalGeneration", {**BOTH, "forced_eos_token_id": None}),
    "t5_position_bias": ("T5Config", "T5ForConditionalGeneration",
                         {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                          "relative_attention_num_buckets": 8, "dropout_rate": 0.0, "decoder_start_token_id": 1}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration",
                {**BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
                 "begin_suppress_tokens": None, "suppress_tokens": None}),
}


@cache
def model(name):
    """Return the model of that name, in float32 and without dropout; one for all who ask."""
    if name in DECODERS:
        (kind, options), maker = DECODERS[name], "AutoModelForCausalLM"
    else:
        kind, maker, options = (ENCODERS | PAIRS)[name]
    config = getattr(transformers, kind)(**SIZES | options)
    maker = getattr(transformers, maker)
    torch.manual_seed(0)
    made = (maker.from_config(config) if hasattr(maker, "from_config") else maker(config)).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # some begin at 0 or 1, where faults hide
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return made
