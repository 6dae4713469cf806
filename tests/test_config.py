"""Configs: presets, what they resolve to, and what Hugging Face dicts mean."""

import contextlib
import dataclasses
import math
import re

import numpy as np
import pytest
from tiny import tiny_drafter_config, tiny_family_config, tiny_gemma4_config, tiny_llama_config, tiny_qwen3_config

from reanchor_jax import DecodeConfig, huggingface
from reanchor_jax.config import ConfidenceConfig, HeadConfig, MixtureConfig


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
        (DecodeConfig.reanchor(), 15, 256, (1, 4, 16), (16, 64, 128, 256)),
        (DecodeConfig.reanchor(retain="deepest"), 30, 256, (1, 4, 16, 31), (16, 64, 128, 256)),
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


def test_plain_decoding_resolves_to_itself():
    plain = DecodeConfig.autoregressive(cache_length=99)
    assert plain.resolve(16) == plain


def test_a_small_block_gives_a_small_trie():
    assert DecodeConfig.reanchor().resolve(5).num_nodes == 25
    assert DecodeConfig.reanchor().resolve(5).max_offsets == 4
    assert DecodeConfig.reanchor(max_offsets=1).resolve(16).num_nodes == 32  # two blocks hold no more
    assert DecodeConfig.reanchor(retain="both").resolve(5).num_nodes == 25
    assert DecodeConfig.dflash().resolve(7).num_nodes == 7
    assert DecodeConfig.ddtree().resolve(16).num_nodes == 64
    assert DecodeConfig.reanchor_tree(20).resolve(16) == DecodeConfig(
        expand="merge", retain="suffix", num_nodes=20, max_offsets=8, block_buckets=(1, 4, 9), node_buckets=(16, 20)
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DecodeConfig.reanchor(max_offsets=16), "max_offsets (16) exceeds the 15 nodes that retain='baseline' can keep here"),
        (DecodeConfig.reanchor(retain="both", max_offsets=46), "max_offsets (46) exceeds the 45 nodes"),
        (DecodeConfig.reanchor(retain="descendants", max_offsets=20, num_nodes=20), "max_offsets (20) exceeds the 19 nodes"),
        (DecodeConfig.ddtree(15), "num_nodes (15) must hold the baseline block of 16 tokens; raise it to at least 16"),
    ],
)
def test_more_than_a_block_or_a_trie_can_give_is_refused(config, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        config.resolve(16)


def test_integers_of_numpy_are_integers():
    config = DecodeConfig.ddtree(np.int64(20), cache_length=np.asarray([3, 90]).max())
    assert config == DecodeConfig.ddtree(20, cache_length=90)
    assert (type(config.num_nodes), type(config.cache_length)) == (int, int)
    with pytest.raises(ValueError, match="cache_length must be an integer"):
        DecodeConfig.dflash(cache_length=np.float32(64))


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


NAN, INFINITE = float("nan"), float("inf")
LLAMA3 = tiny_llama_config()["rope_parameters"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_ROPE = tiny_gemma4_config()["rope_parameters"]


def refused(read, config, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        read(config)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": "24"}, "hidden_size must be a positive integer; got '24'; fix config.json."),
        ({"hidden_size": 24.0}, "hidden_size must be a positive integer; got 24.0; fix config.json."),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer; got 0"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive integer; got True"),
        ({"vocab_size": [61]}, "vocab_size must be a positive integer; got [61]"),
        ({"vocab_size": 2**31}, "vocab_size must be an integer in 1..2147483647; got 2147483648"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer in 1..1000; got 1000000000"),
        ({"head_dim": 5}, "head_dim (5) must be positive and even, rotary turns pairs"),
        ({"head_dim": None, "num_attention_heads": 30}, "head_dim (0) must be positive and even"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings must be a positive integer; got '512'"),
        ({"model_type": ["llama"]}, "model_type must be a string; got ['llama']"),
        ({"hidden_act": 3}, "hidden_act must be a string; got 3"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false; got 'false'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false; got 1"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings; got 'full_attention'"),
        ({"layer_types": [None] * 3}, "layer_types must be a list of strings; got [None, None, None]"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive float32 number; got 0"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive float32 number; got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive float32 number; got '1e-5'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object; got [1]"),
        ({"rope_parameters": None, "rope_theta": -1}, "rope_theta must be a float32 number above 1; got -1"),
        ({"rope_parameters": {"rope_theta": INFINITE}}, "rope_theta must be a float32 number above 1; got inf"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a float32 number above 1; got 1000"),
        ({"rope_parameters": {**LLAMA3, "rope_type": 3}}, "rope_type must be a string; got 3"),
        ({"rope_parameters": {**LLAMA3, "factor": 0}}, "factor must be a positive float32 number; got 0"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": NAN}}, "low_freq_factor must be a positive float32 number; got nan"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be a float32 number above 1.0; got 1.0"),
        (
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be a positive integer; got 0",
        ),
        ({"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast must be a positive float32 number; got -1"),
        ({"rope_parameters": {**YARN, "beta_slow": 0}}, "beta_slow must be a positive float32 number; got 0"),
        ({"rope_parameters": {**YARN, "attention_factor": NAN}}, "attention_factor must be a positive float32 number; got nan"),
        ({"rope_parameters": {**YARN, "mscale": -1}}, "mscale must be 0 or a positive float32 number; got -1"),
        ({"rope_parameters": {**YARN, "truncate": "false"}}, "truncate must be true or false; got 'false'"),
        ({"eos_token_id": 61}, "eos_token_id holds 61, no token of the vocabulary 0..60; fix generation_config.json, or config.json"),
        ({"eos_token_id": -1}, "eos_token_id holds -1, no token of the vocabulary"),
        ({"eos_token_id": True}, "eos_token_id must be an integer or a list of integers; got True; fix config.json."),
        ({"eos_token_id": [[2]]}, "eos_token_id must be an integer or a list of integers; got [[2]]; fix config.json."),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list of integers; got '2'"),
    ],
)
def test_a_wrong_value_in_a_target_config_is_refused(changes, text):
    refused(huggingface.read_target, tiny_llama_config(**changes), text)


def test_a_wrong_end_token_of_a_generation_config_is_refused():
    for value, text in (
        (2.0, "eos_token_id must be an integer or a list of integers; got 2.0; fix generation_config.json."),
        ([3, 99], "eos_token_id holds 99, no token of the vocabulary 0..60; fix generation_config.json"),
    ):
        refused(lambda given: huggingface.read_target(tiny_llama_config(), given), {"eos_token_id": value}, text)
    assert huggingface.read_target(tiny_llama_config(), {"eos_token_id": None}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters lacks an entry for sliding_attention; Gemma-4 needs one"),
        ({"rope_parameters": None, "rope_theta": 1e4}, "rope_parameters lacks an entry for sliding_attention"),
        (
            {"rope_parameters": {"sliding_attention": GEMMA_ROPE["sliding_attention"]}, "rope_theta": 1e4},
            "rope_parameters lacks an entry for full_attention",
        ),
        ({"rope_parameters": {**GEMMA_ROPE, "full_attention": {"rope_type": "default"}}, "rope_theta": 1e4}, "rope_theta is missing"),
        ({"rope_parameters": {**GEMMA_ROPE, "full_attention": 1e4}}, "full_attention must be an object; got 10000.0"),
        (
            {"rope_parameters": {**GEMMA_ROPE, "full_attention": {**GEMMA_ROPE["full_attention"], "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor must be a float32 number above 0 and at most 1; got 1.5",
        ),
        ({"text_config": "text"}, "text_config must be an object; got 'text'"),
        ({"text_config": None, "vocab_size": None}, "config.json lacks 'vocab_size'; add it."),
        ({"per_layer_config": [1]}, "per_layer_config must be an object; got [1]"),
        ({"per_layer_config": {"2": None}}, "config.json lacks 'per_layer_config[2]'; add it."),
        ({"per_layer_config": {"2": 16}}, "per_layer_config[2] must be an object; got 16"),
        ({"per_layer_config": {"2": {"head_size": 16}}}, "per_layer_config[2] holds head_size, known are head_dim, num_key_value_heads"),
        ({"per_layer_config": {"5": {"head_dim": 16}}}, "per_layer_config[5] is for no layer, layers are 0..4"),
        ({"per_layer_config": {"2": {"head_dim": "16"}}}, "head_dim must be a positive integer; got '16'"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer; got 0"),
        ({"sliding_window": 9.0}, "sliding_window must be a positive integer; got 9.0"),
        ({"attention_k_eq_v": "false"}, "attention_k_eq_v must be true or false; got 'false'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported; a target must be causal"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping must be 0 or a positive float32 number; got -1"),
        ({"final_logit_softcapping": NAN}, "final_logit_softcapping must be 0 or a positive float32 number; got nan"),
    ],
)
def test_a_wrong_value_in_a_gemma_config_is_refused(changes, text):
    refused(huggingface.read_target, tiny_gemma4_config(**changes), text)


SLIDES = {"layer_types": ["sliding_attention", "full_attention"]}
BACKBONE = {name: value for name, value in tiny_drafter_config().items() if name not in ("architectures", "dflash_config")}
SPECULATORS = {"dflash_config": {"block_size": 7, "mask_token_id": 60}, "transformer_layer_config": BACKBONE}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dflash_config": [7]}, "dflash_config must be an object; got [7]"),
        ({"architectures": "DFlashDraftModel"}, "architectures must be a list of strings; got 'DFlashDraftModel'"),
        ({"transformer_layer_config": "qwen3"}, "transformer_layer_config must be an object; got 'qwen3'"),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": ["2"]}, "aux_hidden_state_layer_ids must be a list of integers; got ['2']"),
        (
            {**SPECULATORS, "speculators_config": [1]},
            "speculators_config must be an object; got [1]",
        ),
        (
            {**SPECULATORS, "speculators_config": {"proposal_methods": {"speculative_tokens": 7}}},
            "proposal_methods must be a list of objects; got {'speculative_tokens': 7}",
        ),
        ({"block_size": 7.9}, "block_size must be an integer in 1..1024; got 7.9"),
        ({"block_size": 10**9}, "block_size must be an integer in 1..1024; got 1000000000"),
        ({"mask_token_id": 1.5}, "mask_token_id must be an integer; got 1.5"),
        ({"mask_token_id": True}, "mask_token_id must be an integer; got True"),
        ({"target_layer_ids": [0, 1.0]}, "target_layer_ids must be a list of integers; got [0, 1.0]"),
        ({"target_layer_ids": ["0"]}, "target_layer_ids must be a list of integers; got ['0']"),
        ({"target_layer_ids": [True]}, "target_layer_ids must be a list of integers; got [True]"),
        ({"target_layer_ids": 1}, "target_layer_ids must be a list of integers; got 1"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids holds a layer twice ([1, 1])"),
        ({"num_target_layers": "3"}, "num_target_layers must be an integer in 1..1000; got '3'"),
        ({**SLIDES, "sliding_window": -3}, "sliding_window must be a positive integer; got -3"),
        ({**SLIDES, "sliding_window": "9"}, "sliding_window must be a positive integer; got '9'"),
        ({"use_sliding_window": "false"}, "use_sliding_window must be true or false; got 'false'"),
        ({"is_causal": "false"}, "is_causal must be true or false; got 'false'"),
        ({"sample_from_anchor": "false"}, "sample_from_anchor must be true or false; got 'false'"),
        ({"projector_type": ["domino"]}, "projector_type must be a string; got ['domino']"),
        ({"output_multiplier": 0}, "output_multiplier must be a positive float32 number; got 0"),
        ({"input_embedding_scale": INFINITE}, "input_embedding_scale must be a positive float32 number; got inf"),
        ({"final_logit_softcapping": -2.5}, "final_logit_softcapping must be 0 or a positive float32 number; got -2.5"),
        ({"draft_vocab_size": "37"}, "draft_vocab_size must be a positive integer; got '37'"),
        (
            {"reanchor_jax": [1]},
            "the section 'reanchor_jax' of drafter_config.json was edited: reanchor_jax must be an object; got [1]; convert",
        ),
        ({"reanchor_jax": {"fuse": 1}}, "reanchor_jax holds fuse, known are is_shifted, fusion, head"),
        ({"reanchor_jax": {"is_shifted": "no"}}, "is_shifted must be true or false; got 'no'; convert the drafter again."),
        ({"reanchor_jax": {"is_shifted": None}}, "lacks 'is_shifted'"),
        ({"reanchor_jax": {"fusion": "sum"}}, "fusion must be one of concatenated, per_layer; got 'sum'"),
        ({"reanchor_jax": {"head": {"kind": "gru"}}}, "head lacks size, inner_size, num_plain; convert the drafter again."),
        (
            {"reanchor_jax": {"head": {"kind": "lstm", "size": 3, "inner_size": 0, "num_plain": 0}}},
            "kind must be one of gru, markov, gated_markov, rnn_markov, refiner; got 'lstm'",
        ),
        (
            {"reanchor_jax": {"head": {"kind": "refiner", "size": 3, "inner_size": 2, "num_plain": 0}}},
            "a refiner needs a pass and a width of at least 1; got 0 passes, width 2.",
        ),
        (
            {"reanchor_jax": {"confidence": {"reads_previous": True, "has_bias": True, "temperatures": ["1"]}}},
            "temperatures must be a list of positive float32 numbers; got ['1']",
        ),
        ({"reanchor_jax": {"num_drafts": 6.0}}, "num_drafts must be a positive integer; got 6.0"),
    ],
)
def test_a_wrong_value_in_a_drafter_config_is_refused(changes, text):
    refused(huggingface.read_drafter, tiny_drafter_config(**changes), text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"markov_head_type": ["rnn"]}, "markov_head_type must be a string; got ['rnn']"),
        ({"markov_rank": -1}, "markov_rank must be an integer in 0..2147483647; got -1"),
        ({"enable_confidence_head": "false"}, "enable_confidence_head must be true or false; got 'false'"),
        *(
            ({"confidence_temperatures": [1.0, wrong]}, "confidence_temperatures must be a list of positive float32 numbers; got [1.0,")
            for wrong in (NAN, INFINITE, True, "1", 0, -1.0)
        ),
    ],
)
def test_a_wrong_value_of_a_head_is_refused(changes, text):
    refused(huggingface.read_drafter, tiny_family_config("dspark", tiny_llama_config(), **changes), text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"refiner_rank": None}, "refiner_rank is missing from the drafter config (looked in dflash_config and at the top level); add it."),
        ({"refiner_width": None}, "refiner_width is missing from the drafter config"),
        ({"refiner_width": 0}, "refiner_width must be a positive integer; got 0; fix config.json."),
        ({"refiner_passes": 2.0}, "refiner_passes must be a positive integer; got 2.0; fix config.json."),
        ({"mixture_components": 1}, "mixture_components must be at least 2; got 1; leave mixture_rank out for none."),
        ({"mixture_components": None}, "mixture_components is missing from the drafter config"),
        ({"mixture_rank": None, "projector_type": "dblast"}, "mixture_rank is missing from the drafter config"),
        ({"mixture_rank": "3"}, "mixture_rank must be a positive integer; got '3'; fix config.json."),
    ],
)
def test_a_wrong_value_of_a_refiner_or_a_mixture_is_refused(changes, text):
    config = tiny_family_config("xpress_dblast", tiny_llama_config())
    refused(huggingface.read_drafter, {**config, "dflash_config": {**config["dflash_config"], **changes}}, text)


def test_a_refiner_and_a_mixture_are_read_as_they_are_stated():
    config = huggingface.read_drafter(tiny_family_config("xpress_dblast", tiny_llama_config()))
    assert config.head == HeadConfig(kind="refiner", size=11, inner_size=9, num_passes=6)
    assert config.mixture == MixtureConfig(num_components=3, size=13)
    with pytest.raises(ValueError, match="confidence_head_with_markov needs a Markov head"):
        dataclasses.replace(config, confidence=ConfidenceConfig())


def test_temperatures_of_a_record_are_finite_too():
    config = huggingface.read_drafter(tiny_family_config("dspark", tiny_llama_config()))
    calibrated = dataclasses.replace(config.confidence, temperatures=(1.0,) * (config.num_drafts - 1) + (INFINITE,))
    with pytest.raises(ValueError, match="confidence_temperatures must be 7 positive finite numbers"):
        dataclasses.replace(config, confidence=calibrated)


def test_null_counts_as_absent():
    given = tiny_drafter_config()
    nulls = ("architectures", "rope_scaling", "is_causal", "output_multiplier", "final_logit_softcapping", "transformer_layer_config")
    nulls += ("draft_vocab_size", "projector_type", "partial_rotary_factor", "reanchor_jax", "model_arch", "target_num_hidden_layers")
    absent = {name: None for name in nulls if name not in given}
    assert huggingface.read_drafter({**given, **absent}) == huggingface.read_drafter(given)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_offsets": True}, "max_offsets must be an integer; got True"),
        ({"num_nodes": 16.0}, "num_nodes must be an integer; got 16.0"),
        ({"cache_length": "64"}, "cache_length must be an integer; got '64'"),
        ({"prefill_chunk": 64.0}, "prefill_chunk must be an integer; got 64.0"),
        ({"is_speculative": 1}, "is_speculative must be True or False; got 1"),
        ({"is_second_tried": "no"}, "is_second_tried must be True or False; got 'no'"),
        ({"retain": ["both"]}, "retain must be one of none, baseline"),
        ({"extent": None}, "extent must be one of both, in_block, extension; got None"),
        ({"expand": "best"}, "expand must be one of none, marginal, merge; got 'best'"),
        ({"has_trace": 1}, "has_trace must be True or False; got 1"),
        ({"is_speculative": False, "has_trace": True}, "proposes nothing to trace; leave out has_trace"),
        ({"is_speculative": False, "expand": "marginal"}, "expand='marginal' needs drafts"),
        ({"expand": "marginal", "retain": "both"}, "expand='marginal' drafts no shifted blocks, so retain='both' has no use"),
        ({"expand": "merge"}, "expand='merge' needs retained states; set retain to one of baseline, suffix"),
        ({"expand": "merge", "retain": "both", "attach": "random"}, "expand='merge' attaches blocks at every prefix"),
        ({"attach": "random"}, "without retained states there are none"),
        ({"extent": "in_block"}, "without retained states there are none"),
        ({"is_second_tried": True}, "without retained states there are none"),
        ({"expand": "marginal", "extent": "in_block"}, "leave out attach, is_second_tried and extent"),
        ({"expand": "merge", "retain": "both", "min_confidence": 0.5}, "expand='merge' takes a number of nodes; leave out min_confidence"),
        ({"reliability": 1.5}, "reliability must lie in [0, 1]; got 1.5"),
        ({"reliability": NAN}, "reliability must lie in [0, 1]; got nan"),
        ({"num_nodes": 4097}, "num_nodes must lie in 0..4096, its masks are square; got 4097"),
        ({"num_ranks": 8}, "num_ranks (8) belongs to trees; set expand"),
        ({"expand": "marginal", "reliability": 0.5}, "reliability (0.5) belongs to expand='merge'"),
        ({"num_ranks": -1}, "num_ranks must be 0 or more; got -1"),
        ({"num_ranks": 2.0}, "num_ranks must be an integer; got 2.0"),
        ({"min_confidence": "0.5"}, "min_confidence must lie in [0, 1); got '0.5'"),
        ({"min_confidence": NAN}, "min_confidence must lie in [0, 1); got nan"),
        ({"min_confidence": False}, "min_confidence must lie in [0, 1); got False"),
        ({"steps_per_second": (1.0, INFINITE)}, "steps_per_second must be a tuple of positive numbers, all finite; got (1.0, inf)"),
        ({"steps_per_second": [1.0]}, "steps_per_second must be a tuple of positive numbers, all finite; got [1.0]"),
        ({"steps_per_second": ("1",)}, "steps_per_second must be a tuple of positive numbers, all finite; got ('1',)"),
        ({"block_buckets": (1.5, 4)}, "block_buckets must be a tuple of strictly rising positive integers; got (1.5, 4)"),
        ({"node_buckets": (True, 16)}, "node_buckets must be a tuple of strictly rising positive integers; got (True, 16)"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused(settings, text):
    refused(lambda given: DecodeConfig(**given), settings, text)


def paths(config, before=()):
    for name, value in config.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def changed(config, path, value):
    name, *rest = path
    return {**config, name: changed(config[name], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("read", "config"),
    [
        (huggingface.read_target, tiny_llama_config()),
        (huggingface.read_target, {"model_type": "gemma4_unified", "text_config": tiny_gemma4_config()}),
        (huggingface.read_drafter, tiny_family_config("domino", tiny_llama_config(), reanchor_jax={"num_drafts": 3})),
        (huggingface.read_drafter, tiny_family_config("dspark", tiny_llama_config(), confidence_temperatures=[1.0] * 7)),
        (huggingface.read_drafter, tiny_family_config("xpress_dblast", tiny_llama_config())),
        (huggingface.read_drafter, tiny_drafter_config(**SPECULATORS, aux_hidden_state_layer_ids=[1])),
    ],
    ids=["llama", "gemma4", "domino", "dspark", "xpress", "speculators"],
)
def test_no_value_of_any_field_raises_anything_but_a_value_error(read, config):
    read(config)
    for path in paths(config):
        for value in (None, "7", 1.5, NAN, -1, 0, 2**40, 10**400, True, [], [None], [[1]], {}, {"a": 1}):
            with contextlib.suppress(ValueError):
                read(changed(config, path, value))
