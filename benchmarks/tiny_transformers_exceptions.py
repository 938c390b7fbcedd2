"""What the names of a configuration's numbers do not tell about a type of Transformers: see tiny_transformers.py."""

from collections.abc import Callable
from typing import Any

import torch

LEFT_OUT = object()
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_ONE_ATTENTION_LAYER = {"attn_layer_indices": [1], "layer_types": LEFT_OUT, "layers_block_type": LEFT_OUT}
_SMALL_RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
                 "out_features": ["stage2", "stage3", "stage4"]}
_SMALL_OWN_RESNET = {
    "backbone_config": {"embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1],
                        "out_features": ["stage2", "stage3", "stage4"], "out_indices": [2, 3, 4]},
    "encoder_in_channels": [32, 64, 64]}
_SMALL_DAVIT = {"embed_dim": [16, 32, 64, 128], "num_heads": [1, 2, 4, 8], "num_groups": [1, 2, 4, 8],
                "depths": [1, 1, 1, 1]}
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
_SMALL_EFFICIENT_NET = {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320}
_SMALL_HIERA = {"hidden_size": 16, "embed_dim_per_stage": [16, 32, 64, 128], "blocks_per_stage": [1, 2, 1, 1],
                "global_attention_blocks": [2], "image_size": [128, 128]}
_SMALL_SAM2_VISION = {"backbone_config": _SMALL_HIERA, "backbone_channel_list": [128, 64, 32, 16],
                      "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
_SMALL_SAM2 = {"vision_config": _SMALL_SAM2_VISION, "prompt_encoder_config": {"image_size": 128}}
_COMPASS = {"layer_types": ["full_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4,
                                                   "mrope_section": [4, 2, 2]}}}
# By type and class: options of the configuration that differ, in configurations within as well.
CONFIGURATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "align": {"AlignVisionConfig": _SMALL_EFFICIENT_NET, "AlignConfig": {"vision_config": _SMALL_EFFICIENT_NET}},
    "aria": {"AriaConfig": {"projector_patch_to_query_dict": {"16": 6}}},
    "audio_spectrogram_transformer": {"ASTConfig": {"max_length": 64}},
    "bamba": {"BambaConfig": _ONE_ATTENTION_LAYER},
    "blip_2": {"Blip2Config": {"image_token_index": 120}},
    "chameleon": {"ChameleonConfig": {"vocabulary_map": {"<image>": 120}}},
    "cohere_compass": {"CohereCompassTextConfig": _COMPASS, "CohereCompassConfig": {"text_config": _COMPASS}},
    "dbrx": {"DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}},
    "decision_transformer": {"DecisionTransformerConfig": {"vocab_size": 128}},
    "deformable_detr": {"DeformableDetrConfig": {"backbone_config": _SMALL_RESNET}},
    "dory": {"DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
                            "num_hidden_layers": 3, "layer_types": LEFT_OUT}},
    "esm": {"EsmConfig": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 127}},
    "esmc": {"EsmcConfig": {"vocab_size": 128}},
    "falcon_h1": {"FalconH1Config": {"mamba_d_ssm": 128, "mamba_d_head": 32}},
    "florence2": {"Florence2VisionConfig": _SMALL_DAVIT, "Florence2Config": {"vision_config": _SMALL_DAVIT}},
    "granitemoehybrid": {"GraniteMoeHybridConfig": _LINEAR_AND_FULL},
    "hrm_text": {"HrmTextConfig": {"num_layers_per_stack": LEFT_OUT, "num_hidden_layers": 1}},
    "hunyuan_v1_dense": {"HunYuanDenseV1Config": _ROPE},
    "hunyuan_v1_moe": {"HunYuanMoEV1Config": _ROPE},
    "informer": {"InformerConfig": {"prediction_length": 4, "context_length": 9, "input_size": 1,
                                    "lags_sequence": [1, 2], "num_time_features": 1, "sampling_factor": 1,
                                    "feature_size": LEFT_OUT}},
    "jamba": {"JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1}},
    "lfm2_moe": {"Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]}},
    "ministral": {"MinistralConfig": _ROPE},
    "longcat_flash": {"LongcatFlashConfig": {"qk_head_dim": LEFT_OUT, "head_dim": 8}},
    "moonshine": {"MoonshineConfig": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}},
    "nemotron_h": {"NemotronHConfig": {"n_groups": 1}},
    "rt_detr": {"RTDetrConfig": _SMALL_OWN_RESNET,
                "RTDetrResNetConfig": {"embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1]}},
    "rt_detr_v2": {"RTDetrV2Config": _SMALL_OWN_RESNET},
    "sam2": {"Sam2HieraDetConfig": _SMALL_HIERA, "Sam2VisionConfig": _SMALL_SAM2_VISION, "Sam2Config": _SMALL_SAM2},
    "recurrent_gemma": {"RecurrentGemmaConfig": {"num_hidden_layers": 3}},
}


def _image(*size: int) -> Callable[[Any], Any]:
    return lambda source: _Call({"pixel_values": source.randn(2, *size)})


def _codebooks(source: Any) -> Any:
    books = source.config.num_codebooks
    return _Call({"input_ids": source.ids(batch=2 * books)}, 9, 2)


def _text_to_codebooks(source: Any) -> Any:
    books = source.config.decoder.num_codebooks
    return _Call({"input_ids": source.ids(), "decoder_input_ids": source.ids(7, 2 * books)}, 9)


def _beside_codebooks(source: Any) -> Any:
    tokens = source.ids(9 * (source.config.num_codebooks + 1)).view(2, 9, -1)
    return _Call({"input_ids": tokens}, 9)


def _interleaved_images(source: Any) -> Any:
    return _Call({"input_ids": source.ids(), "pixel_values": source.image()[:, None],
                  "image_attention_mask": torch.ones(2, 9, 1, dtype=torch.long)}, 9)


def _text_and_image(source: Any) -> Any:
    return _Call({"input_ids": source.ids(), "pixel_values": source.image()}, 9)


def _time_series(source: Any) -> Any:
    past, future = (2, 11), (2, 4)
    return _Call({"past_values": source.randn(*past), "past_time_features": source.randn(*past, 1),
                  "past_observed_mask": torch.ones(past), "future_values": source.randn(*future),
                  "future_time_features": source.randn(*future, 1)})


def _drafted(source: Any) -> Any:
    width, block = source.config.hidden_size, source.config.block_size
    return _Call({"noise_embeds": source.randn(2, block, width),
                  "context_hidden_states": source.randn(2, 9, width * len(source.config.target_layer_ids)),
                  "attention_mask": torch.ones(2, 9 + block, dtype=torch.long),
                  "position_ids": torch.arange(9 + block).expand(2, -1)})


def _flat_patches(*more: str) -> Callable[[Any], Any]:
    def call(source: Any) -> Any:
        places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)).expand(2, -1, -1)
        patches = torch.cat([places, source.randn(2, 16, 3 * 16 * 16)], -1)
        return _Call({"flattened_patches": patches} | {name: getattr(source, name)()[0] for name in more})

    return call


def _features(width: int) -> Callable[[Any], Any]:
    return lambda source: _Call({"input_features": source.randn(2, 64, width)}, 64, is_sound=True)


def _sound_and_features(source: Any) -> Any:
    return _Call({"input_values": source.randn(2, 1, 4000), "input_features": source.randn(2, 64, 160)})


def _Call(*arguments: Any, **named: Any) -> Any:  # noqa: N802
    from tiny_transformers import Call

    return Call(*arguments, **named)


# By type and class of the model: what it is called with.
CALLS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "d_fine": {"DFineModel": _image(3, 128, 128)},
    "git": {"GitForCausalLM": _text_and_image},
    "granite_speech5": {"GraniteSpeech5Encoder": _features(320), "GraniteSpeech5ForCTC": _features(320)},
    "idefics": {"IdeficsModel": _interleaved_images},
    "informer": {"InformerModel": _time_series},
    "kyutai_speech_to_text": {"KyutaiSpeechToTextForConditionalGeneration": _beside_codebooks,
                              "KyutaiSpeechToTextModel": _beside_codebooks},
    "muse_glimmer_assistant": {"MuseGlimmerAssistantModel": _drafted},
    "musicgen": {"MusicgenForCausalLM": _codebooks, "MusicgenForConditionalGeneration": _text_to_codebooks},
    "musicgen_melody": {"MusicgenMelodyForCausalLM": _codebooks,
                        "MusicgenMelodyForConditionalGeneration": _text_to_codebooks},
    "neucodec": {"NeuCodecModel": _sound_and_features},
    "pix2struct": {"Pix2StructForConditionalGeneration": _flat_patches("decoder_input_ids"),
                   "Pix2StructVisionModel": _flat_patches()},
    "pp_ocrv5_mobile_rec": {"PPOCRV5MobileRecModel": _image(3, 48, 320)},
    "pp_ocrv5_server_rec": {"PPOCRV5ServerRecModel": _image(3, 48, 320)},
    "pp_ocrv6_small_rec": {"PPOCRV6SmallRecModel": _image(3, 48, 320)},
}
