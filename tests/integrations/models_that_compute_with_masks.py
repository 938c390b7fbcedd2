"""Tiny models that compute with the mask they get, or hand to attention what few models do, and what they are called
with. Random weights; one of each kind."""

import importlib
from functools import cache

import torch

from integrations.models import SIZES, WINDOW, transformers

B, S = 2, 9
_SEED = torch.Generator().manual_seed(7)
IDS = torch.randint(2, 61, (B, S), generator=_SEED)
PADDED = (torch.arange(S) >= torch.tensor([[0], [3]])).long()  # on the left
RIGHT = PADDED.flip(1)
TEXT = {"input_ids": IDS, "attention_mask": PADDED, "use_cache": False}

LATENT = {**SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
          "topk_group": 1, "moe_intermediate_size": 16, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2,
          "first_k_dense_replace": 1, "n_shared_experts": 1}
BOTH = {**SIZES, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1}
GEMMA = {**SIZES, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
         "layer_types": ["sliding_attention", "full_attention"]}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
          "image_size": 8, "patch_size": 4}
# Name, as of the folder in transformers.models: class of the configuration, of the model, options of the configuration,
# arguments of the call.
MODELS = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", LATENT, TEXT),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", LATENT, TEXT),
    "axk2": ("AXK2Config", "AXK2ForCausalLM", {**LATENT, "gated_norm_rank": 4}, TEXT),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", LATENT, TEXT),
    "mistral_large4": ("MistralLarge4TextConfig", "MistralLarge4TextModel", LATENT, TEXT),
    "dots3_note": ("Dots3NoteTextConfig", "Dots3NoteTextModel",
                   {**LATENT, "layer_types": ["full_attention", "indexed_attention"], "sliding_window": WINDOW}, TEXT),
    "minimax_m3_vl": ("MiniMaxM3VLTextConfig", "MiniMaxM3VLTextModel",
                      {**SIZES, "head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
                       "dense_intermediate_size": 32, "shared_intermediate_size": 16, "index_n_heads": 2,
                       "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 2}, TEXT),
    "inkling2": ("Inkling2TextConfig", "Inkling2TextModel",
                 {**SIZES, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                  "swa_head_dim": 8, "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 8,
                  "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
                  "n_layers_per_attn_res_block": 1, "unpadded_vocab_size": 61}, TEXT),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM",
                    {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 16,
                     "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                     "layer_types": ["sliding_attention", "compressed_sparse_attention",
                                     "heavily_compressed_attention"],
                     "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
                     "sliding_window": WINDOW, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2,
                     "index_head_dim": 8, "index_topk": 2, "hc_mult": 2, "partial_rotary_factor": 0.5}, TEXT),
    "doge": ("DogeConfig", "DogeForCausalLM", {**SIZES, "keep_window_size": 5}, TEXT),
    "nllb_moe": ("NllbMoeConfig", "NllbMoeForConditionalGeneration",
                 {**BOTH, "num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 64,
                  "router_jitter_noise": 0.0},
                 {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS.flip(0),
                  "decoder_attention_mask": RIGHT, "use_cache": False}),
    "lasr": ("LasrEncoderConfig", "LasrEncoder",
             {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
              "num_mel_bins": 8, "subsampling_conv_channels": 8, "conv_kernel_size": 5, "layerdrop": 0.0},
             {"input_features": torch.randn(B, 40, 8, generator=_SEED),
              "attention_mask": (torch.arange(40) < torch.tensor([[40], [28]])).long()}),
    "siglip2": ("Siglip2VisionConfig", "Siglip2VisionModel",
                {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "patch_size": 2, "num_patches": 16},
                {"pixel_values": torch.randn(B, 16, 12, generator=_SEED),
                 "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [12]])).long(),
                 "spatial_shapes": torch.tensor([[4, 4], [4, 3]])}),
    "informer": ("InformerConfig", "InformerModel",
                 {"prediction_length": 4, "context_length": 9, "input_size": 1, "lags_sequence": [1, 2],
                  "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                  "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_time_features": 1,
                  "sampling_factor": 1, "dropout": 0.0},
                 {"past_values": torch.randn(B, 11, generator=_SEED),
                  "past_time_features": torch.randn(B, 11, 1, generator=_SEED),
                  "past_observed_mask": torch.ones(B, 11), "future_values": torch.randn(B, 4, generator=_SEED),
                  "future_time_features": torch.randn(B, 4, 1, generator=_SEED)}),
    "musicgen": ("MusicgenDecoderConfig", "MusicgenForCausalLM",
                 {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_codebooks": 4, "max_position_embeddings": 64, "pad_token_id": 60,
                  "bos_token_id": 60, "dropout": 0.0, "audio_channels": 1},
                 {"input_ids": torch.randint(2, 60, (B * 4, S), generator=_SEED),
                  "attention_mask": RIGHT.repeat_interleave(4, 0), "use_cache": False}),
    "t5gemma2": ("T5Gemma2Config", "T5Gemma2ForConditionalGeneration",
                 {"encoder": {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4,
                              "image_token_index": 59},
                  "decoder": GEMMA, "image_token_index": 59, "decoder_start_token_id": 1},
                 {"input_ids": IDS.clamp(max=58), "attention_mask": RIGHT,
                  "decoder_input_ids": IDS.clamp(max=58)[:, :7], "use_cache": False}),
    "bridgetower": ("BridgeTowerConfig", "BridgeTowerModel",
                    {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
                     "text_config": {**SIZES, "eos_token_id": 2, "pad_token_id": 1, "hidden_dropout_prob": 0.0},
                     "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 12, "patch_size": 4}},
                    {"input_ids": IDS, "attention_mask": RIGHT,
                     "pixel_values": torch.randn(B, 3, 12, 12, generator=_SEED)}),
    "pp_doclayout_v2": ("PPDocLayoutV2ReadingOrderConfig", "PPDocLayoutV2ReadingOrder",
                        {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
                         "num_hidden_layers": 2, "max_position_embeddings": 64, "coordinate_size": 6, "shape_size": 4,
                         "global_pointer_head_size": 8, "hidden_dropout_prob": 0.0, "rel_2d_pos_bins": 8,
                         "attention_probs_dropout_prob": 0.0},
                        {"boxes": torch.rand(B, S, 4, generator=_SEED).sort(-1).values * 900,
                         "labels": torch.randint(0, 20, (B, S), generator=_SEED), "mask": RIGHT.bool()}),
    "lightglue": ("LightGlueConfig", "LightGlueTransformerLayer",
                  {"descriptor_dim": 32, "num_attention_heads": 4, "num_hidden_layers": 1},
                  {"descriptors": torch.randn(B, S, 32, generator=_SEED),
                   "keypoints": (torch.randn(B, S, 8, generator=_SEED), torch.randn(B, S, 8, generator=_SEED)),
                   "attention_mask": RIGHT}),
    "janus": ("JanusConfig", "JanusForConditionalGeneration",
              {"text_config": {**SIZES, "model_type": "llama"}, "image_token_id": 60,
               "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                                 "image_size": 8, "patch_size": 4, "projection_dim": 32, "num_image_tokens": 4},
               "vq_config": {"embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "base_channels": 32,
                             "channel_multiplier": [1, 1], "num_patches": 2, "projection_dim": 32,
                             "image_token_embed_dim": 32, "num_hidden_layers": 1}},
              {"input_ids": torch.cat([torch.full((B, 4), 60), IDS.clamp(max=58)], 1),
               "pixel_values": torch.randn(B, 3, 8, 8, generator=_SEED), "vision_feature_layer": -1,
               "use_cache": False}),
}


class Layer(torch.nn.Module):
    """A layer of LightGlue, whose matcher finds keypoints first; its mask is made as the matcher makes it."""

    def __init__(self, config, kind):
        super().__init__()
        self.config, self.layer = config, kind(config, 0)

    def set_attn_implementation(self, name):
        self.config._attn_implementation = name

    def forward(self, descriptors, keypoints, attention_mask):
        mask = transformers.masking_utils.create_bidirectional_mask(
            config=self.config, inputs_embeds=descriptors[:, :1], attention_mask=attention_mask,
            allow_is_bidirectional_skip=False)
        return self.layer(descriptors, keypoints, mask)


@cache
def model(name):
    """Return the model of that name, in float32 and without dropout; one for all who ask."""
    config, maker, options, _ = MODELS[name]
    home = f"transformers.models.{name}"
    config = getattr(importlib.import_module(f"{home}.configuration_{name}"), config)(**options)
    maker = getattr(importlib.import_module(f"{home}.modeling_{name}"), maker)
    torch.manual_seed(0)
    made = (Layer(config, maker) if name == "lightglue" else maker._from_config(config)).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # some begin at 0 or 1, where faults hide
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return made
