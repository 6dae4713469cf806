"""Configs: presets, what they resolve to, and what Hugging Face dicts mean."""

import dataclasses
import math

import pytest
from tiny import tiny_drafter_config, tiny_llama_config, tiny_qwen3_config

from reanchor_jax import DecodeConfig, huggingface


def test_presets_are_what_they_are_called():
    assert not DecodeConfig.autoregressive().is_speculative
    assert DecodeConfig.dflash().retain == "none"
    assert DecodeConfig.reanchor().retain == "baseline"
    assert DecodeConfig.reanchor(retain="both", draft_choice="coupled", cache_length=77).retain == "both"
    for preset in (DecodeConfig.autoregressive, DecodeConfig.dflash, DecodeConfig.reanchor):
        assert preset(cache_length=77).cache_length == 77
        assert hash(preset()) == hash(preset())
        assert preset() == preset()


@pytest.mark.parametrize(
    ("config", "offsets", "nodes", "blocks", "node_sizes"),
    [
        (DecodeConfig.dflash(), 0, 16, (1,), (16,)),
        (DecodeConfig.reanchor(), 15, 256, (1, 4, 16), (16, 64, 256)),
        (DecodeConfig.reanchor(retain="deepest"), 30, 256, (1, 4, 16, 31), (16, 64, 256)),
        (DecodeConfig.reanchor(retain="both", max_offsets=6, num_nodes=40), 6, 40, (1, 4, 7), (16, 40)),
        (DecodeConfig.reanchor(block_buckets=(), node_buckets=()), 15, 256, (16,), (256,)),
        (DecodeConfig.reanchor(block_buckets=(2, 16, 99), node_buckets=(255, 256)), 15, 256, (2, 16), (255, 256)),
    ],
)
def test_a_config_resolves_to_a_block_of_16(config, offsets, nodes, blocks, node_sizes):
    resolved = config.resolve(16)
    assert (resolved.max_offsets, resolved.num_nodes) == (offsets, nodes)
    assert (resolved.block_buckets, resolved.node_buckets) == (blocks, node_sizes)
    assert resolved.resolve(16) == resolved


def test_a_small_block_gives_a_small_trie():
    assert DecodeConfig.reanchor().resolve(5).num_nodes == 25
    assert DecodeConfig.reanchor().resolve(5).max_offsets == 4
    assert DecodeConfig.dflash().resolve(7).num_nodes == 7


def test_configs_cannot_be_changed_or_given_by_position():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DecodeConfig.dflash().cache_length = 5
    with pytest.raises(TypeError):
        DecodeConfig(True)


def test_a_target_reads_its_windows_and_end_tokens():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
    given = tiny_qwen3_config(layer_types=kinds, sliding_window=9, use_sliding_window=True)
    config = huggingface.read_target(given)
    assert [layer.window for layer in config.layers] == [9, None, 9, None, None]
    assert all(layer.is_causal for layer in config.layers)
    assert config.eos_token_ids == (2, 4)
    assert huggingface.read_target(given, {"eos_token_id": 5}).eos_token_ids == (5,)
    # without use_sliding_window the layer types mean nothing, and without layer types windows begin at max_window_layers
    assert {layer.window for layer in huggingface.read_target({**given, "use_sliding_window": False}).layers} == {None}
    late = huggingface.read_target({**given, "layer_types": None, "max_window_layers": 3})
    assert [layer.window for layer in late.layers] == [None, None, None, 9, 9]


def test_a_drafters_sliding_layers_are_causal_unless_told_otherwise():
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    assert [(layer.window, layer.is_causal) for layer in huggingface.read_drafter(tiny_drafter_config(**sliding)).layers] == [
        (5, True),
        (None, False),
    ]
    both_ways = huggingface.read_drafter(tiny_drafter_config(**sliding, is_causal=False))
    assert [layer.is_causal for layer in both_ways.layers] == [False, False]


def test_the_old_layout_of_a_drafter_reads_as_the_new_one():
    new = tiny_drafter_config()
    old = {**{name: value for name, value in new.items() if name != "dflash_config"}, **new["dflash_config"]}
    old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
    assert huggingface.read_drafter(old) == huggingface.read_drafter(new)


def test_yarn_scales_attention_by_its_own_rule_or_the_stated_factor():
    scaling = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 64}
    assert huggingface.read_rope({"rope_parameters": scaling}).attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert huggingface.read_rope({"rope_parameters": {**scaling, "attention_factor": 0.5}}).attention_factor == 0.5
    ratio = huggingface.read_rope({"rope_parameters": {**scaling, "mscale": 2.0, "mscale_all_dim": 1.0}}).attention_factor
    assert ratio == pytest.approx((0.2 * math.log(32) + 1) / (0.1 * math.log(32) + 1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not a supported target; supported are llama, qwen3, gemma4_unified"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu is"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_parameters": None}, "rope_theta is missing from the config"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic' is not supported"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "factor 0.5 is supported with rope_type proportional only",
        ),
        ({"num_key_value_heads": 4}, r"num_heads \(6\) must be a multiple of num_kv_heads \(4\)"),
        ({"vocab_size": None}, "config.json lacks 'vocab_size'; add it"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention' is not supported"),
    ],
)
def test_a_target_config_we_cannot_run_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        huggingface.read_target(tiny_llama_config(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["Other"]}, r"architectures \['Other'\] is not a supported drafter"),
        ({"block_size": None}, "block_size is missing from the drafter config"),
        ({"block_size": 1}, r"block_size \(1\) must be at least 2"),
        ({"mask_token_id": 61}, r"mask_token_id \(61\) must lie in 0..60"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids holds 3, outside 0..2; ids are 0-based layer outputs"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is missing; add it"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "rope_theta": 1e4},
            "for each kind of layer are supported in Gemma",
        ),
        ({"attention_sink_bias": True}, "attention_sink_bias=True is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "this is DFlash 2 .* which is not supported yet; use the target's first DFlash drafter"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "this is an EAGLE drafter, which is not supported yet"),
        ({"model_arch": "dfly"}, "this is DFly .* which is not supported yet"),
        ({"dspark_block_size": 5}, "this is a DeepSeek-V4 bundle, which is not supported yet"),
        ({"quantization_config": {"quant_method": "fp8"}}, "this is a quantised checkpoint"),
        ({"enable_hidden_correction": True}, "enable_hidden_correction=True is not supported"),
        ({"num_drafts": 9, "reanchor_jax": {"num_drafts": 9}}, r"num_drafts \(9\) must lie in 1..6 for 7 slots"),
    ],
)
def test_a_drafter_config_we_cannot_run_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        huggingface.read_drafter(tiny_drafter_config(**changes))
