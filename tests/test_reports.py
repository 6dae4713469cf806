"""What users of other implementations reported, each test named after its symptom: almost all of it leaves the text right and drafts poor.

Sources are named as owner/repository#number; each number is an issue or a pull request on GitHub.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from situations import BLOCK, FAVOURITE, always_wrong, often_right, small_config, small_models
from tiny import random_models, tiny_drafter_config, tiny_family_config, tiny_gemma4_config, tiny_llama_config, tiny_qwen3_config

from reanchor_jax import checkpoint, huggingface, prefill, step
from reanchor_jax.cache import Committed, init_cache, write
from reanchor_jax.config import check_pair
from reanchor_jax.convert.engine import export_tensors
from reanchor_jax.convert.families import find_options
from reanchor_jax.convert.plan import plan
from reanchor_jax.convert.tables import drafter_table
from reanchor_jax.decoding.draft import draft_blocks
from reanchor_jax.models.drafter import BlockContext
from reanchor_jax.models.layers import apply_rotary, rotary_frequencies

TARGET = tiny_llama_config(num_hidden_layers=2)
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "block_size": BLOCK, "target_layer_ids": [1]}


def speculators(**overrides):
    """The packaging with a dict of its own for the backbone, taps counted from the embedding."""
    backbone = tiny_drafter_config(TARGET, num_hidden_layers=1, layer_types=["full_attention"])
    for name in ("architectures", "dflash_config", "num_target_layers"):
        del backbone[name]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": backbone,
        "block_size": BLOCK,
        "mask_token_id": 60,
        "aux_hidden_state_layer_ids": [2],
        **overrides,
    }


def old_layout(config):
    """A drafter's config as packaged before dflash_config and rope_parameters held everything."""
    flat = {name: value for name, value in config.items() if name not in ("dflash_config", "rope_parameters")}
    scaling = dict(config["rope_parameters"])
    flat["rope_theta"] = scaling.pop("rope_theta")
    return {**flat, **config["dflash_config"], "rope_scaling": None if scaling["rope_type"] == "default" else scaling}


def without(config, *names):
    """A copy without the names, at the top level and one level down."""
    kept = {name: value for name, value in config.items() if name not in names}
    return {name: without(value, *names) if isinstance(value, dict) else value for name, value in kept.items()}


@pytest.mark.parametrize(
    ("read", "config", "thetas"),
    [
        (huggingface.read_drafter, tiny_drafter_config(TARGET), {3000.0}),
        (huggingface.read_drafter, old_layout(tiny_drafter_config(TARGET)), {3000.0}),
        (huggingface.read_drafter, speculators(), {3000.0}),
        (huggingface.read_target, tiny_llama_config(), {10000.0}),
        (huggingface.read_target, tiny_qwen3_config(), {5000.0}),
        (huggingface.read_target, tiny_gemma4_config(), {3000.0, 700.0}),
    ],
    ids=["new layout", "old layout", "speculators", "llama", "qwen3", "gemma4"],
)
def test_theta_falling_back_to_10000_is_an_error(read, config, thetas):
    """NVIDIA/Model-Optimizer#2221, jundot/omlx#2317"""
    assert {layer.rope.theta for layer in read(config).layers} == thetas
    with pytest.raises(ValueError, match=r"rope_theta is missing from the config .* guessing 10000 would be silently wrong"):
        read(without(config, "rope_theta"))


def test_a_config_in_the_new_layout_loads_as_in_the_old_one():
    """jundot/omlx#2317, NVIDIA/Model-Optimizer#2221"""
    new = tiny_drafter_config(TARGET, **ONE_LAYER)
    read = huggingface.read_drafter(new)
    assert (read.num_slots, read.mask_token_id, read.target_layer_ids, read.layers[0].rope.theta) == (BLOCK, 60, (1,), 3000.0)
    assert huggingface.read_drafter(old_layout(new)) == read
    # its file tells nothing of the target's depth, and its tensors what it owns
    packaged = {**speculators(), huggingface.OPTIONS: {"has_embedding": False, "has_head": False}}
    assert huggingface.read_drafter(packaged) == dataclasses.replace(read, num_target_layers=None)


@pytest.mark.parametrize("layout", [dict, old_layout])
def test_yarn_is_neither_assumed_nor_removed(layout):
    """Avarok-Cybersecurity/atlas#258"""
    yarn = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    plain, scaled = (
        huggingface.read_drafter(layout(tiny_drafter_config(TARGET, **changes))).layers[0].rope
        for changes in ({}, {"rope_parameters": yarn})
    )
    base = 3000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rotary_frequencies(plain, 8), base, rtol=1e-6)
    assert plain.attention_factor == 1.0
    found = np.asarray(rotary_frequencies(scaled, 8))
    # the fastest pair turns 10 times within 64 positions, the slowest 0.06 times
    np.testing.assert_allclose(found[[0, -1]], [base[0], base[-1] / 8], rtol=1e-6)
    assert scaled.attention_factor == pytest.approx(0.1 * math.log(8) + 1)


@pytest.mark.parametrize("place", ["top level", "rope_parameters", "transformer_layer_config"])
def test_a_partial_rotary_factor_is_not_dropped(place):
    """vllm-project/speculators#703, #613, #738"""
    config = speculators() if place == "transformer_layer_config" else old_layout(tiny_drafter_config(TARGET))
    if place == "top level":
        config["partial_rotary_factor"] = 0.5
    elif place == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": 3000.0, "partial_rotary_factor": 0.5}
    else:
        config["transformer_layer_config"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.5 is supported with rope_type proportional only"):
        huggingface.read_drafter(config)
    if place == "top level":
        with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.5"):
            huggingface.read_target(tiny_qwen3_config(partial_rotary_factor=0.5))


def test_a_rotary_size_smaller_than_a_head_is_not_dropped():
    """vllm-project/speculators#738; SGLang's name for it"""
    rope = {"rope_type": "default", "rope_theta": 3000.0}
    whole = huggingface.read_drafter(tiny_drafter_config(TARGET, rope_parameters={**rope, "rope_dim": 8}))
    assert whole == huggingface.read_drafter(tiny_drafter_config(TARGET))
    with pytest.raises(ValueError, match=r"rope_dim 4 is not supported; only the whole head \(8\) is rotated"):
        huggingface.read_drafter(tiny_drafter_config(TARGET, rope_parameters={**rope, "rope_dim": 4}))


@pytest.mark.parametrize(
    "config",
    [tiny_drafter_config(TARGET), old_layout(tiny_drafter_config(TARGET)), tiny_family_config("domino", TARGET), speculators()],
    ids=["new layout", "old layout", "domino", "speculators"],
)
@pytest.mark.parametrize(
    ("names", "missing"),
    [(("target_layer_ids", "aux_hidden_state_layer_ids"), "target_layer_ids"), (("mask_token_id",), "mask_token_id")],
)
def test_a_missing_tap_or_mask_id_is_not_made_up(config, names, missing):
    """z-lab/dflash#156 (fallback taps wrong for 14 of 20 checkpoints), NVIDIA-NeMo/Automodel#2461 (the pad token served as mask)"""
    huggingface.read_drafter(config)
    with pytest.raises(ValueError, match=f"{missing} is missing from the drafter config"):
        huggingface.read_drafter({**without(config, *names), "pad_token_id": 3})


def test_a_mask_id_of_minus_one_is_an_error_and_one_beyond_the_tokenizer_is_not():
    """ggml-org/llama.cpp#26761; the mask token may lie beyond the tokenizer's own tokens"""
    for wrong in (-1, 61):
        with pytest.raises(ValueError, match=rf"mask_token_id \({wrong}\) must lie in 0\.\.60 \(an embedding row of the target\)"):
            huggingface.read_drafter(tiny_drafter_config(TARGET, mask_token_id=wrong))
    assert huggingface.read_drafter(tiny_drafter_config(TARGET, mask_token_id=60)).mask_token_id == 60


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, None),
        ({"dflash_config": {**tiny_drafter_config(TARGET)["dflash_config"], "selector_rank": 3}}, None),
        ({}, "candidate_selector.predecessor_codebook"),
        ({}, "layers.0.attention_conv.base_kernel"),
    ],
    ids=["architecture", "field", "selector", "convolution"],
)
def test_dflash_2_is_not_loaded_as_the_first_dflash(changes, tensor):
    """noonghunna/club-3090#1064"""
    config = tiny_drafter_config(TARGET, **ONE_LAYER)
    shapes = {key: value.shape for key, value in published_tensors(config).items()}
    find_options(config, shapes)
    with pytest.raises(ValueError, match=r"this is DFlash 2.* not supported yet; use the target's first DFlash drafter"):
        find_options({**config, **changes}, shapes if tensor is None else {**shapes, tensor: (61, 3)})


def published_tensors(config, seed=5):
    """Random tensors of a drafter's file, by key."""
    drafter = random_models(TARGET, config, seed=seed).drafter
    return export_tensors(drafter, drafter_table(drafter.config))


def plan_of(directory, config, tensors):
    """Moves and problems of a conversion from these tensors."""
    save_file(tensors, directory / "model.safetensors")
    options = find_options(config, {key: value.shape for key, value in tensors.items()})
    read = huggingface.read_drafter({**config, huggingface.OPTIONS: options})
    return plan(directory, checkpoint.leaves(checkpoint.build_drafter(read, jnp.float32)), drafter_table(read))


def test_taps_that_the_fusion_was_not_trained_for_are_told_by_its_width(tmp_path):
    """z-lab/dflash#156"""
    config = tiny_drafter_config(TARGET, **ONE_LAYER)
    tensors = published_tensors(config)
    config["dflash_config"]["target_layer_ids"] = [0, 1]
    _, problems = plan_of(tmp_path, config, tensors)
    assert problems == ["shape: fc.weight is [24, 24], config.json asks for [24, 48]"]


@pytest.mark.parametrize("key", ["aux_norms.0.weight", "layers.0.context_layernorm.weight", "layers.1.input_layernorm.weight"])
def test_a_norm_tensor_that_nothing_claims_is_not_left_out_silently(tmp_path, key):
    """charlie12345/ROCmFPX#48"""
    config = tiny_drafter_config(TARGET, **ONE_LAYER)
    tensors = published_tensors(config)
    moves, problems = plan_of(tmp_path, config, tensors)
    assert problems == []
    assert len(moves) == len(tensors)
    _, problems = plan_of(tmp_path, config, {**tensors, key: np.ones(24, np.float32)})
    assert problems == [f"unexpected: {key} [24] has no place in the model that config.json describes"]
    _, problems = plan_of(tmp_path, config, {name: value for name, value in tensors.items() if name != "hidden_norm.weight"})
    assert problems == ["missing: hidden_norm.weight for context_norm/scale"]


def test_a_padded_vocabulary_is_told_instead_of_drafting_from_padding(tmp_path):
    """vllm-project/vllm#46435 (0 % accepted), huggingface/transformers#45307, vllm-project/vllm#16210"""
    config = tiny_drafter_config(TARGET, **ONE_LAYER)
    padded = huggingface.read_drafter({**config, "vocab_size": 64})
    with pytest.raises(ValueError, match=r"drafter vocab_size \(64\) differs from the target's \(61\); they do not belong together"):
        check_pair(huggingface.read_target(TARGET), padded)
    head = {"lm_head.weight": np.ones((64, 24), np.float32)}
    _, problems = plan_of(tmp_path, config, {**published_tensors(config), **head})
    assert problems == ["shape: lm_head.weight is [64, 24], config.json asks for [61, 24]"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "qwen3_next"}, "model_type 'qwen3_next' is not a supported target"),
        ({"model_type": "qwen3_5_text"}, "model_type 'qwen3_5_text' is not a supported target"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer type 'linear_attention' is not supported"),
    ],
)
def test_a_target_with_recurrent_state_that_no_rejection_rolls_back_is_refused(changes, text):
    """MiaAI-Lab/Qwen3.8-27B-SGLang-DGX-Spark#11, sgl-project/sglang#35150"""
    given = tiny_qwen3_config(num_hidden_layers=2)
    huggingface.read_target(given)
    with pytest.raises(ValueError, match=text):
        huggingface.read_target({**given, **changes})


def test_an_m_rope_target_or_drafter_is_refused():
    """ggml-org/llama.cpp#28587: its positions are not counts of tokens"""
    scaling = {"rope_type": "mrope", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
    for model_type in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_text"):
        with pytest.raises(ValueError, match=f"model_type '{model_type}' is not a supported target"):
            huggingface.read_target(tiny_qwen3_config(model_type=model_type))
    with pytest.raises(ValueError, match="rope_type 'mrope' is not supported"):
        huggingface.read_target(tiny_qwen3_config(rope_parameters=scaling))
    with pytest.raises(ValueError, match="rope_type 'mrope' is not supported"):
        huggingface.read_drafter(tiny_drafter_config(TARGET, rope_parameters=scaling))


@pytest.mark.parametrize("name", ["quantization_config", "quantization"])
@pytest.mark.parametrize("make", [tiny_llama_config, tiny_qwen3_config, tiny_gemma4_config])
def test_a_quantised_target_whose_states_the_drafter_never_saw_is_refused(make, name):
    """z-lab/dflash#152, vllm-project/vllm-ascend#12886 (a rotated basis: 0.06 % accepted)"""
    quantised = {name: {"quant_method": "quarot", "bits": 4}}
    huggingface.read_target(make())
    with pytest.raises(ValueError, match=rf"a quantised checkpoint \({name}\), which is not supported yet; use its bfloat16 original"):
        huggingface.read_target(make(**quantised))
    if make is tiny_gemma4_config:
        with pytest.raises(ValueError, match=rf"a quantised checkpoint \({name}\)"):
            huggingface.read_target({"model_type": "gemma4_unified", "text_config": make(), **quantised})


def test_a_rotary_style_other_than_the_drafters_own_is_not_assumed():
    """vllm-project/vllm#53063: the style was taken from the target"""
    for name in ("rope_is_neox_style", "is_neox_style"):
        huggingface.read_drafter(tiny_drafter_config(TARGET, **{name: True}))
        with pytest.raises(ValueError, match=f"{name}=False is not supported"):
            huggingface.read_drafter(tiny_drafter_config(TARGET, **{name: False}))
    # the target's frequencies are rescaled (llama3), the drafter's are plain and of another theta
    drafter = drafter_of()
    features = np.random.default_rng(3).standard_normal((1, 3, 24)).astype(np.float32)
    positions = np.asarray([[0, 4, 19]], np.int32)
    keys = np.asarray(drafter.context_keys_values(features, positions)[0][0, :2])
    unrotated = np.asarray(drafter.context_keys_values(features, np.zeros((1, 3), np.int32))[0][0, :2])
    angles = positions[0][:, None] * 3000.0 ** (-np.arange(0, 8, 2) / 8)
    left, right = np.split(unrotated, 2, axis=-1)
    expected = np.concatenate([left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)], axis=-1)
    np.testing.assert_allclose(keys, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "is_shifted"),
    [
        (tiny_family_config("dspark", TARGET, markov_rank=0, enable_confidence_head=False, block_size=7), True),
        (tiny_family_config("dspark", TARGET, block_size=7), True),
        (tiny_drafter_config(TARGET, block_size=7), False),
        (tiny_drafter_config(TARGET, block_size=7, sample_from_anchor=True), True),
        (speculators(block_size=7, sample_from_anchor=True), True),
        (speculators(block_size=7, sample_from_anchor=False), False),
        (tiny_drafter_config(TARGET, block_size=7, shift_label=True), True),
    ],
    ids=["block7", "dspark", "dflash", "stated", "speculators, stated", "speculators, denied", "label"],
)
def test_a_block7_checkpoint_read_at_the_same_position_accepts_nothing(config, is_shifted):
    """deepseek-ai/DeepSpec#73, vllm-project/vllm#49614, sgl-project/sglang-jax#1619, z-lab/dflash#170: slots start at the anchor's"""
    drafter = checkpoint.build_drafter(huggingface.read_drafter(config), jnp.float32)
    assert drafter.config.is_shifted is is_shifted
    states = jnp.arange(7.0)[None, :, None]
    assert drafter.predicting(states)[0, :, 0].tolist() == ([0, 1, 2, 3, 4, 5, 6] if is_shifted else [1, 2, 3, 4, 5, 6])


def test_a_drafters_own_head_is_not_overwritten_by_the_targets():
    """vllm-project/vllm-ascend#11374 (25 % accepted became 1.7 %)"""
    states = np.random.default_rng(2).standard_normal((1, 3, 24)).astype(np.float32)
    borrowing = random_models(TARGET, tiny_drafter_config(TARGET, **ONE_LAYER), seed=7)
    np.testing.assert_allclose(
        borrowing.drafter.base_logits(borrowing.target, states), states @ np.asarray(borrowing.target.head.kernel[...]), atol=1e-5
    )
    owning = random_models(TARGET, tiny_family_config("dspark", TARGET, block_size=BLOCK, target_layer_ids=[1]), seed=7)
    own, borrowed = np.asarray(owning.drafter.head.kernel[...]), np.asarray(owning.target.head.kernel[...])
    np.testing.assert_allclose(owning.drafter.base_logits(owning.target, states), states @ own, atol=1e-5)
    assert np.abs(states @ (own - borrowed)).max() > 0.5
    tokens = np.asarray([[3, 60]], np.int32)
    np.testing.assert_array_equal(owning.drafter.embed(owning.target, tokens), np.asarray(owning.drafter.embedding.embedding[...])[tokens])


@pytest.mark.parametrize("family", ["z-lab", "gemma4_dspark"])
def test_a_gemma_drafter_without_embedding_scale_and_soft_cap_accepts_little(family):
    """vllm-project/vllm#41703, #40898"""
    given = tiny_gemma4_config(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    overrides = {"block_size": BLOCK, "target_layer_ids": [0]}
    config = tiny_drafter_config(given, **overrides) if family == "z-lab" else tiny_family_config(family, given, **overrides)
    models = random_models(given, config, seed=7)
    target, drafter = models
    tokens = np.asarray([[5, 60]], np.int32)
    table = (target if drafter.embedding is None else drafter).embedding.embedding[...]
    np.testing.assert_allclose(drafter.embed(target, tokens), np.asarray(table)[tokens] * math.sqrt(24), rtol=1e-5)
    states = 3 * np.random.default_rng(2).standard_normal((1, 5, 24)).astype(np.float32)
    head = np.asarray(target.embedding.embedding[...]).T if drafter.head is None else np.asarray(drafter.head.kernel[...])
    raw = states @ head
    assert np.abs(raw).max() > 2.5  # else the cap would not show
    np.testing.assert_allclose(drafter.base_logits(target, states), 2.5 * np.tanh(raw / 2.5), atol=1e-5)
    if family == "z-lab":  # what the drafter states itself wins over the target's
        own = huggingface.read_drafter({**config, "input_embedding_scale": 1.0, "final_logit_softcapping": 0})
        plain = checkpoint.with_leaves(checkpoint.build_drafter(own, jnp.float32), checkpoint.leaves(drafter))
        np.testing.assert_array_equal(plain.embed(target, tokens), np.asarray(table)[tokens])
        np.testing.assert_allclose(plain.base_logits(target, states), raw, atol=1e-5)


@functools.cache
def tapping_target():
    return random_models(tiny_llama_config(), None, seed=11).target


@functools.partial(jax.jit, static_argnames="taps")
def tapped(target, tokens, taps):
    """Each tap [1 T D] of a pass over one sequence."""
    count = tokens.shape[1]
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    output = target(tokens, positions, jnp.tril(jnp.ones((1, count, count), bool)), target_layer_ids=taps)
    return jnp.split(output.taps, len(taps), axis=-1)


def changed(target, leaf):
    """The target with one leaf of its weights changed."""
    values = checkpoint.leaves(target)
    return checkpoint.with_leaves(target, {**values, leaf: values[leaf] * 1.5})


def test_a_drafter_tap_one_layer_off_gives_other_features():
    """z-lab/dflash#118, vllm-project/vllm#42505, #42704, microsoft/onnxruntime-genai#2538, Avarok-Cybersecurity/atlas#394

    Tap i is what layer i puts out: it changes with the weights of layers 0..i and of no later one.
    """
    target, tokens, taps = tapping_target(), np.asarray([[5, 9, 2, 60, 7]], np.int32), (-1, 0, 1, 2)
    before = tapped(target, tokens, taps)
    np.testing.assert_array_equal(before[0], np.asarray(target.embedding.embedding[...])[tokens])
    for layer in range(3):
        after = tapped(changed(target, f"layers/{layer}/mlp/down/kernel"), tokens, taps)
        is_changed = [bool(np.abs(old - new).max() > 1e-3) for old, new in zip(before, after, strict=True)]
        assert is_changed == [tap >= layer for tap in taps]
    # one packaging counts from the embedding
    assert huggingface.read_drafter(speculators(aux_hidden_state_layer_ids=[0, 1, 2])).target_layer_ids == (-1, 0, 1)
    assert huggingface.read_drafter(tiny_drafter_config(TARGET, target_layer_ids=[0, 1])).target_layer_ids == (0, 1)


def test_a_tap_of_the_last_layer_is_taken_after_the_final_norm_and_none_lies_beyond():
    """sgl-project/sglang#32204, #39776, charlie12345/ROCmFPX#44"""
    target, tokens, taps = tapping_target(), np.asarray([[5, 9, 2, 60, 7]], np.int32), (-1, 0, 1, 2)
    before, after = tapped(target, tokens, taps), tapped(changed(target, "norm/scale"), tokens, taps)
    for tap, old, new in zip(taps, before, after, strict=True):
        np.testing.assert_allclose(new, old * (1.5 if tap == 2 else 1.0), rtol=1e-5)
    for wrong in (2, -2):
        with pytest.raises(ValueError, match=rf"target_layer_ids holds {wrong}, outside 0\.\.1"):
            huggingface.read_drafter(tiny_drafter_config(TARGET, target_layer_ids=[0, wrong]))
    beyond = huggingface.read_drafter(speculators(aux_hidden_state_layer_ids=[1, 3]))  # this packaging does not tell the target's depth
    with pytest.raises(ValueError, match="the drafter taps target layer 2, this target has 2"):
        check_pair(huggingface.read_target(TARGET), beyond)


def drafter_of(**changes):
    """A drafter of one layer; the same weights whatever is changed in its config."""
    config = huggingface.read_drafter(tiny_drafter_config(TARGET, **ONE_LAYER, vocab_size=61, hidden_size=24) | changes)
    weights = checkpoint.leaves(random_models(TARGET, tiny_drafter_config(TARGET, **ONE_LAYER), seed=7).drafter)
    return checkpoint.with_leaves(checkpoint.build_drafter(config, jnp.float32), weights)


CONTEXT = 11


def influence(drafter):
    """Which block slots [K, C + K] change with each context entry and each slot's own input."""
    rng = np.random.default_rng(13)
    features = rng.standard_normal((1, CONTEXT, 24)).astype(np.float32)
    block = rng.standard_normal((1, BLOCK, 24)).astype(np.float32)
    direction = rng.standard_normal(24).astype(np.float32)[None, None]

    def states(features, block):
        places = jnp.arange(CONTEXT, dtype=jnp.int32)[None]
        entries = drafter.context_keys_values(features, places)
        context = BlockContext(keys_values=entries, positions=places, mask=jnp.ones((1, CONTEXT), bool))
        return drafter.block_states(block, CONTEXT + jnp.arange(BLOCK, dtype=jnp.int32)[None], context=context)[0]

    def changes(place):
        change = jnp.where(jnp.arange(CONTEXT + BLOCK)[None, :, None] == place, 1.0, 0.0) * direction
        return states(features + change[:, :CONTEXT], block + change[:, CONTEXT:])

    @jax.jit
    def run():
        before = states(features, block)
        return jax.vmap(changes)(jnp.arange(CONTEXT + BLOCK)) - before[None]

    return (np.abs(run()).max(axis=-1) > 1e-6).T


SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 3}
QUERY, KEY = CONTEXT + np.arange(BLOCK)[:, None], np.arange(CONTEXT + BLOCK)[None]


def test_a_sliding_window_of_the_drafter_is_not_ignored():
    """z-lab/dflash#126, ikawrakow/ik_llama.cpp#2021, AEON-7/Qwen3.6-27B-AEON-Ultimate-Uncensored-DFlash#6, vllm-project/tpu-inference#3526

    Each slot has a window of its own, which counts the slot itself.
    """
    assert influence(drafter_of())[:, :CONTEXT].all()
    np.testing.assert_array_equal(influence(drafter_of(**SLIDING))[:, :CONTEXT], (QUERY - KEY < 3)[:, :CONTEXT])
    with pytest.raises(ValueError, match="layer type 'chunked_attention' is not supported"):
        drafter_of(layer_types=["chunked_attention"])
    with pytest.raises(ValueError, match="sliding_window is missing"):
        drafter_of(layer_types=["sliding_attention"])


def test_windows_told_by_layer_number_are_not_ignored():
    """ikawrakow/ik_llama.cpp#2021; without layer_types, transformers slides layers from max_window_layers on"""
    by_number = {"layer_types": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    read = huggingface.read_drafter(tiny_drafter_config(TARGET, **by_number))
    assert [(layer.window, layer.is_causal) for layer in read.layers] == [(None, False), (5, True)]
    unused = huggingface.read_drafter(tiny_drafter_config(TARGET, **{**by_number, "use_sliding_window": False}))
    assert [layer.window for layer in unused.layers] == [None, None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, KEY >= 0),
        ({"is_causal": True}, KEY <= QUERY),
        ({"is_causal": None, "causal": True}, KEY <= QUERY),
        (SLIDING, (QUERY - KEY < 3) & (KEY <= QUERY)),
        ({**SLIDING, "is_causal": False}, (QUERY - KEY < 3) & (KEY - QUERY < 3)),
        ({**SLIDING, "sliding_window_non_causal": True}, (QUERY - KEY < 3) & (KEY - QUERY < 3)),
    ],
    ids=["full", "full, causal", "full, vLLM's name", "sliding", "sliding, not causal", "sliding, speculators' name"],
)
def test_sliding_layers_are_causal_inside_a_block_and_full_ones_are_not_unless_told(changes, expected):
    """sgl-project/sglang#34524 (5.27 instead of 5.62 tokens a round)"""
    np.testing.assert_array_equal(influence(drafter_of(**changes)), np.broadcast_to(expected, (BLOCK, CONTEXT + BLOCK)))


@functools.partial(jax.jit, static_argnames="num_slots")
def long_states(drafter, features, block, *, num_slots):
    """States of a block behind a cache that holds all features."""
    count = features.shape[1]
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    buffers = init_cache(drafter.config.layers, num_rows=1, num_slots=num_slots, dtype=jnp.float32)
    buffers = write(buffers, drafter.context_keys_values(features, positions), jnp.zeros(1, jnp.int32))
    committed = Committed(layers=buffers, lengths=jnp.full(1, count, jnp.int32))
    return drafter.block_states(block, count + jnp.arange(BLOCK, dtype=jnp.int32)[None], committed=committed)


def test_context_past_4096_is_neither_clipped_nor_moved():
    """spiritbuun/buun-llama-cpp#32, Luce-Org/lucebox#740

    The oracle is attention over the whole context in float64, its positions the tokens' own.
    """
    drafter = drafter_of()
    rng = np.random.default_rng(17)
    features = rng.standard_normal((1, 4201, 24)).astype(np.float32)
    features[:, :50] *= 8  # the oldest entries must weigh something
    block = rng.standard_normal((1, BLOCK, 24)).astype(np.float32)
    found = np.asarray(long_states(drafter, features, block, num_slots=4224))
    np.testing.assert_allclose(found[0], slow_states(drafter, features[0], block[0]), atol=2e-4)
    clipped = slow_states(drafter, features[0, -4096:], block[0], first=4201 - 4096)
    moved = slow_states(drafter, features[0, -4096:], block[0])
    assert np.abs(found[0] - clipped).max() > 1e-3
    np.testing.assert_allclose(clipped, moved, atol=1e-3)  # only distances count


def slow_states(drafter, features, block, first=0):
    """One drafter layer in float64 numpy, full attention; first: position of the first feature."""
    weights = {name: np.asarray(value, np.float64) for name, value in checkpoint.leaves(drafter).items()}

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weights[name]

    def project(x, name, positions):
        maps = weights["layers/0/attention/query/kernel"] if name == "query" else weights["layers/0/attention/key_value/kernel"]
        maps = {"query": maps, "key": maps[:, 0], "value": maps[:, 1]}[name]
        heads = (x @ maps.reshape(x.shape[1], -1)).reshape(len(x), -1, 8)
        if name == "value":
            return heads
        heads = norm(heads, f"layers/0/attention/{name}_norm/scale")
        angles = (positions[:, None] * 3000.0 ** (-np.arange(0, 8, 2) / 8))[:, None]
        left, right = np.split(heads, 2, axis=-1)
        return np.concatenate([left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)], axis=-1)

    places = first + np.arange(len(features) + len(block))
    normed = norm(block, "layers/0/attention_norm/scale")
    together = np.concatenate([features, normed])
    queries = project(normed, "query", places[len(features) :])
    keys, values = (np.repeat(project(together, name, places), 2, axis=1) for name in ("key", "value"))
    scores = np.einsum("THA,NHA->HTN", queries, keys) / math.sqrt(8)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("HTN,NHA->THA", scores / scores.sum(axis=-1, keepdims=True), values)
    x = block + mixed.reshape(len(block), -1) @ weights["layers/0/attention/output/kernel"]
    normed = norm(x, "layers/0/mlp_norm/scale")
    gate, up = (normed @ weights["layers/0/mlp/gate_up/kernel"][:, index] for index in range(2))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["layers/0/mlp/down/kernel"]
    return norm(x, "norm/scale")


def test_positions_past_max_position_embeddings_do_not_run_out_of_a_table():
    """vllm-project/vllm#57964, #57941, #53812, turboderp-org/exllamav2#274"""
    drafter = drafter_of(max_position_embeddings=16)
    features = np.random.default_rng(3).standard_normal((1, 2, 24)).astype(np.float32)

    def keys(*positions):
        return np.asarray(drafter.context_keys_values(features, np.asarray([positions], np.int32))[0][0, :2], np.float64)

    # what a query sees of a key is their distance, on either side of the limit
    for far in (17, 40, 5000):
        near, away = keys(3, 8), keys(far, far + 5)
        np.testing.assert_allclose((away[:, 0] * away[:, 1]).sum(-1), (near[:, 0] * near[:, 1]).sum(-1), atol=5e-3)
        assert np.abs(away - near).max() > 0.1


def test_neighbouring_positions_are_told_apart_in_bfloat16():
    """sgl-project/sglang-jax#1591, #1594: integer positions, and angles in float32 (bfloat16 rounds 257 to 256)"""
    rope = drafter_of().config.layers[0].rope
    x = np.random.default_rng(3).standard_normal((1, 2, 3, 8)).astype(jnp.bfloat16)
    x[:, 1] = x[:, 0]
    positions = np.asarray([[256, 257]], np.int32)
    found = np.asarray(apply_rotary(x, positions, rope=rope)).astype(np.float32)
    wide = np.asarray(apply_rotary(x.astype(np.float32), positions, rope=rope))
    np.testing.assert_allclose(found, wide, rtol=2**-8, atol=1e-6)
    assert np.abs(found[:, 0] - found[:, 1]).max() > 0.5


ROWS, NEW, SIZE = 3, 14, 160
LENGTHS = np.asarray([70, 3, 130], np.int32)
CONFIG = dataclasses.replace(small_config("both", "argmax"), cache_length=SIZE, node_buckets=(BLOCK,))
# the drafter drafts the favourite and nothing else; the target emits it often, or never
SITUATIONS = {
    "random": lambda models: models,
    "known": lambda models: often_right(models, logit=4.0)._replace(drafter=always_wrong(models).drafter),
    "always_wrong": always_wrong,
}


class Rounds(NamedTuple):
    """rows: emitted tokens. log_probs: theirs. states: after prefill and every round. infos: of every round."""

    rows: list
    log_probs: list
    states: list
    infos: list


@functools.cache
def pair(name):
    """Two layers each, one of them sliding (9 in the target, 3 in the drafter), the last target layer tapped; the mask is the favourite."""
    models = SITUATIONS[name](small_models(3, family="qwen3"))
    config = dataclasses.replace(models.drafter.config, mask_token_id=FAVOURITE)
    drafter = checkpoint.with_leaves(checkpoint.build_drafter(config, jnp.float32), checkpoint.leaves(models.drafter))
    return models._replace(drafter=drafter)


@functools.cache
def tokens_of(seed):
    tokens = np.random.default_rng(seed).integers(61, size=(ROWS, LENGTHS.max())).astype(np.int32)
    return np.where(np.arange(LENGTHS.max())[None] < LENGTHS[:, None], tokens, 0)


begin = jax.jit(functools.partial(prefill, config=CONFIG, max_new_tokens=NEW))
advance = jax.jit(functools.partial(step, config=CONFIG))


def generate(name, seed=1, between=lambda state: state):
    """Run all rounds; between: applied to the state in front of each."""
    models = pair(name)
    state, first = begin(models, tokens_of(seed), LENGTHS, jax.random.key(0))
    rows, log_probs = [[int(token)] for token in first.tokens[:, 0]], [[float(value)] for value in first.log_probs[:, 0]]
    result = Rounds(rows=rows, log_probs=log_probs, states=[state], infos=[])
    while (np.asarray(state.finish) == 0).any():
        state, info = advance(models, between(state))
        result.states.append(state)
        result.infos.append(info)
        for row, count in enumerate(info.emitted.num_emitted.tolist()):
            rows[row] += np.asarray(info.emitted.tokens)[row, :count].tolist()
            log_probs[row] += np.asarray(info.emitted.log_probs)[row, :count].tolist()
    return result


@functools.cache
def generated(name):
    return generate(name)


class Pass(NamedTuple):
    """What one pass over whole texts computes: keys and values of the target and of the drafter's context, features, log-probabilities."""

    keys_values: tuple
    context: tuple
    features: jax.Array
    log_probs: jax.Array


@jax.jit
def one_pass(models, tokens):
    """No cache, no chunks, no tries."""
    count = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), tokens.shape)
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    output = models.target(tokens, positions, mask, target_layer_ids=models.drafter.config.target_layer_ids)
    features = models.drafter.features(output.taps)
    return Pass(
        keys_values=output.keys_values,
        context=models.drafter.context_keys_values(features, positions),
        features=features,
        log_probs=jax.nn.log_softmax(models.target.logits(output.states)),
    )


def texts(rows, seed=1):
    """Prompts and what followed, padded to one size."""
    tokens = np.zeros((ROWS, SIZE), np.int32)
    for row, new in enumerate(rows):
        tokens[row, : LENGTHS[row] + len(new)] = [*tokens_of(seed)[row, : LENGTHS[row]], *new]
    return tokens


@functools.cache
def expected(name):
    return one_pass(pair(name), texts(generated(name).rows))


def assert_same_entries(buffers, entries, lengths):
    for ours, theirs in zip(buffers, entries, strict=True):
        for row, length in enumerate(np.asarray(lengths)):
            np.testing.assert_allclose(ours[row, :, :length], theirs[row, :, :length], atol=1e-4)


def test_generated_mask_tokens_stay_in_the_output():
    """z-lab/dflash#73, #76"""
    rows = generated("known").rows
    assert pair("known").drafter.config.mask_token_id == FAVOURITE
    assert sum(row.count(FAVOURITE) for row in rows) > 3
    assert [len(row) for row in rows] == [NEW] * ROWS


def test_tokens_verified_together_get_the_log_probabilities_of_one_pass():
    """z-lab/dflash#4, #57, #159, vllm-project/vllm#8783, #54928, ggml-org/llama.cpp#27407, huggingface/transformers#30413,
    SafeAILab/EAGLE#75
    """
    for name in ("random", "known"):
        log_probs = np.asarray(expected(name).log_probs)
        for row, (tokens, given) in enumerate(zip(*generated(name)[:2], strict=True)):
            own = log_probs[row, LENGTHS[row] - 1 : LENGTHS[row] - 1 + NEW]
            assert own.argmax(axis=-1).tolist() == tokens
            np.testing.assert_allclose(given, own.max(axis=-1), atol=1e-4)


def test_a_drafter_that_is_always_wrong_does_not_worsen_the_answers():
    """ggml-org/llama.cpp#27975 (93 % right became 62 %)"""
    found = generated("always_wrong")
    assert sum(int(info.num_accepted.sum()) for info in found.infos) == 0
    log_probs = np.asarray(expected("always_wrong").log_probs)
    for row, tokens in enumerate(found.rows):
        assert log_probs[row, LENGTHS[row] - 1 : LENGTHS[row] - 1 + NEW].argmax(axis=-1).tolist() == tokens


def test_a_drafter_that_knows_the_target_is_accepted():
    """vllm-project/vllm#49559 (0 % accepted), ggml-org/llama.cpp#25792: every draft that the target agrees with is taken"""
    found, done, num_accepted = generated("known"), np.ones(ROWS, np.int32), 0
    for info in found.infos:
        for row, accepted in enumerate(info.num_accepted.tolist()):
            following = found.rows[row][done[row] : done[row] + BLOCK - 1]
            right = next((index for index, token in enumerate(following) if token != FAVOURITE), len(following))
            assert accepted >= right
            num_accepted += accepted
        done += np.asarray(info.num_emitted)
    assert num_accepted > 9


def test_the_drafters_context_holds_every_committed_token_and_no_other():
    """z-lab/dflash#15 (is it dirty?), Avarok-Cybersecurity/atlas#302 (a width without states), guoqingbao/xinfer#481 (no prompt),
    the ZML research log (only the last 64 tokens of a prompt in chunks; slots shifted)
    """
    for name in ("random", "known"):
        context = expected(name).context
        states = generated(name).states
        for state in (states[0], states[len(states) // 2], states[-1]):
            assert_same_entries(state.drafter_cache, context, state.lengths)
    # both widths of a verification were met
    sizes = {int(info.num_nodes.max()) > BLOCK for info in generated("random").infos}
    assert sizes == {False, True}


def test_context_positions_are_not_counted_from_1():
    """vllm-project/speculators#703, #613"""
    attention = pair("random").drafter.layers[0].attention
    keys = attention.key_norm(attention.key_value(expected("random").features[:, :1])[:, 0, 0])  # at position 0 nothing is rotated
    np.testing.assert_allclose(generated("random").states[0].drafter_cache[0][:, :2, 0], keys, atol=1e-4)


@jax.jit
def drafted(models, state):
    """Tokens behind the anchor of the baseline block that the next round drafts."""
    target, drafter = models
    noise = jnp.zeros((ROWS, 2 * BLOCK - 1, 61), jnp.float32)
    committed = Committed(layers=state.drafter_cache, lengths=state.lengths)
    given = (state.anchors, committed, state.retained, state.keys, state.sampling, noise)
    is_running = jnp.ones(given[0].shape, bool)
    return draft_blocks(target, drafter, *given, is_running=is_running, num_blocks=1, config=CONFIG).tokens[:, 0, 1:]


@jax.jit
def drafted_at(models, context, anchors, lengths, first_positions):
    """The same from dense context of the given lengths, the block's first slot at a position of its own choice."""
    target, drafter = models
    slots = jnp.arange(BLOCK, dtype=jnp.int32)[None]
    places = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), (ROWS, SIZE))
    states = drafter.block_states(
        drafter.embed(target, jnp.where(slots == 0, anchors[:, None], drafter.config.mask_token_id)),
        first_positions[:, None] + slots,
        context=BlockContext(keys_values=context, positions=places, mask=places < lengths[:, None]),
    )
    return jnp.argmax(drafter.base_logits(target, states), axis=-1)[:, 1:]


def test_block_positions_are_not_counted_from_1():
    """vllm-project/speculators#703, #613: a block's anchor stands at the number of committed tokens"""
    models, context, state = pair("random"), expected("random").context, generated("random").states[3]
    given = (models, context, state.anchors, state.lengths)
    np.testing.assert_array_equal(drafted(models, state), drafted_at(*given, state.lengths))
    assert (np.asarray(drafted(models, state)) != drafted_at(*given, state.lengths + 1)).sum() > 2


def test_caches_are_one_token_shorter_than_the_text_after_every_round():
    """Avarok-Cybersecurity/atlas#218 (a rewind one off), ggml-org/llama.cpp#27407"""
    for name in SITUATIONS:
        found, emitted = generated(name), np.ones(ROWS, np.int32)
        for index, state in enumerate(found.states):
            if index:
                emitted = emitted + np.asarray(found.infos[index - 1].num_emitted)
            np.testing.assert_array_equal(state.lengths, LENGTHS + emitted - 1)
            assert state.anchors.tolist() == [row[count - 1] for row, count in zip(found.rows, emitted, strict=True)]


def test_a_sliding_target_survives_rejections_past_its_window():
    """huggingface/transformers#48280, ml-explore/mlx-lm#1914, ml-explore/mlx-swift-lm#505"""
    for name in ("random", "known"):
        found = generated(name)
        assert pair(name).target.config.layers[0].window == 9 < LENGTHS.max()
        rejected = sum(int(info.num_nodes.sum() - info.num_accepted.sum()) for info in found.infos)
        assert rejected > 9
        assert_same_entries(found.states[-1].target_cache, expected(name).keys_values, found.states[-1].lengths)


def test_stale_entries_behind_a_rows_length_get_no_weight():
    """vllm-project/vllm#41703 (rejected tokens' context seen in batches), Blaizzy/mlx-vlm#1155, #2113, #1833"""

    def spoil(state):
        def fill(buffer):
            is_real = (jnp.arange(buffer.shape[2])[None] < state.lengths[:, None])[:, None, :, None]
            return jnp.where(is_real, buffer, jnp.nan)

        return state._replace(target_cache=tuple(map(fill, state.target_cache)), drafter_cache=tuple(map(fill, state.drafter_cache)))

    plain, spoiled = generated("known"), generate("known", between=spoil)
    assert spoiled.rows == plain.rows
    assert [info.num_accepted.tolist() for info in spoiled.infos] == [info.num_accepted.tolist() for info in plain.infos]


def test_a_request_before_leaves_no_trace_in_the_next():
    """ggml-org/llama.cpp#22105"""
    before = generated("known")
    assert generate("known", seed=2).rows != before.rows
    after = generate("known")
    assert after.rows == before.rows
    for old, new in zip(before.states, after.states, strict=True):
        for one, other in zip(jax.tree.leaves(old.drafter_cache), jax.tree.leaves(new.drafter_cache), strict=True):
            np.testing.assert_array_equal(one, other)
