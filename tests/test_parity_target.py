"""The target equals transformers' Llama, Qwen3 and Gemma-4: logits and all states, one shot, in chunks over a cache, over a trie."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_gemma4_config, tiny_llama_config, tiny_qwen3_config

from reanchor_jax import cache, checkpoint, huggingface
from reanchor_jax.convert.engine import convert
from reanchor_jax.models.layers import rotary_frequencies

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # logits have a standard deviation of about 1
NUM_SLOTS = 192
LENGTHS = (150, 131)  # tokens of each row

_QWEN3_WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFIGS = {
    "llama": tiny_llama_config(),
    "llama_tied": tiny_llama_config(tie_word_embeddings=True),
    "llama_every_head_its_own_keys": tiny_llama_config(
        num_key_value_heads=6, head_dim=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
    "qwen3_tied": tiny_qwen3_config(),
    "qwen3": tiny_qwen3_config(tie_word_embeddings=False),
    "qwen3_yarn": tiny_qwen3_config(rope_theta=None, rope_scaling=None, rope_parameters=_YARN),
    "qwen3_window": tiny_qwen3_config(**_QWEN3_WINDOW),
    "gemma4": tiny_gemma4_config(),
    "gemma4_values_of_their_own": tiny_gemma4_config(attention_k_eq_v=False, final_logit_softcapping=None, num_global_key_value_heads=None),
    "gemma4_inside_a_multimodal_model": {"model_type": "gemma4_unified", "text_config": tiny_gemma4_config(), "eos_token_id": [2, 5]},
    "qwen3_window_by_layer_number": tiny_qwen3_config(use_sliding_window=True, sliding_window=9, max_window_layers=3),
}
every_config = pytest.mark.parametrize("name", CONFIGS)
# the cache meets rotary kinds and windows; what else differs among the configs is compared in one shot
_WITH_CACHE = ("llama", "qwen3_yarn", "qwen3_window", "gemma4")
every_cached_config = pytest.mark.parametrize(
    "name", [name if name in _WITH_CACHE else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Function from a config's name to the torch model and its conversion."""

    @functools.cache
    def build(name):
        directory = tmp_path_factory.mktemp(name)
        model = random_torch_model(CONFIGS[name])
        model.save_pretrained(directory / "huggingface")
        converted = convert(directory / "huggingface", None, directory / "converted", show_progress=False)
        return model, checkpoint.load(converted).target

    return build


def random_torch_model(config):
    classes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma4_unified_text": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
        "gemma4_unified": ("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration"),
    }[config["model_type"]]
    given = {name: value for name, value in config.items() if value is not None and name != "model_type"}
    torch.manual_seed(19)
    model = getattr(transformers, classes[1])(getattr(transformers, classes[0])(**given, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if "scalar" in name)]:
            if parameter.ndim == 1:
                parameter.normal_(mean=1.0, std=0.25)
                if "q_norm" in name and "Gemma4" in classes[0]:  # its attention scale is 1: unit queries would make the softmax one-hot
                    parameter.mul_(len(parameter) ** -0.5)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def torch_run(model, tokens):
    """Logits [T V] and states after every layer, the last after the final norm, of one sequence."""
    with torch.no_grad():
        output = model(torch.tensor(np.asarray(tokens))[None], output_hidden_states=True, use_cache=False)
    return output.logits[0].numpy(), [states[0].numpy() for states in output.hidden_states[1:]]


@jax.jit
def run(target, tokens, positions, mask, committed):
    with jax.default_matmul_precision("highest"):
        taps = tuple(range(target.config.num_layers))
        output = target(tokens, positions, mask, committed=committed, target_layer_ids=taps)
        return target.logits(output.states), jnp.split(output.taps, len(taps), axis=-1), output.keys_values


def random_tokens(num_tokens, seed):
    return np.random.default_rng(seed).integers(0, 61, num_tokens)


def causal(num_tokens):
    return jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))


def one_shot(target, tokens):
    tokens = jnp.asarray(tokens)[None]
    return run(target, tokens, jnp.arange(tokens.shape[1])[None], causal(tokens.shape[1]), None)


def prefill(target, rows):
    """Feed rows of unequal length in chunks of 50, 47 real tokens of row 1 in the first; return per-row logits, and the cache.

    Slots past a row's length hold NaN throughout.
    """
    buffers = tuple(
        jnp.full_like(buffer, jnp.nan)
        for buffer in cache.init_cache(target.config.layers, num_rows=2, num_slots=NUM_SLOTS, dtype=jnp.float32)
    )
    done, logits = [0, 0], [[], []]
    while any(done[row] < len(rows[row]) for row in range(2)):
        counts = [min(50 if row == 0 or done[row] else 47, len(rows[row]) - done[row]) for row in range(2)]
        tokens = np.zeros((2, 50), np.int32)
        for row in range(2):
            tokens[row, : counts[row]] = rows[row][done[row] : done[row] + counts[row]]
        starts = jnp.asarray(done, jnp.int32)
        output, _, keys_values = run(
            target, jnp.asarray(tokens), starts[:, None] + jnp.arange(50)[None], causal(50), cache.Committed(layers=buffers, lengths=starts)
        )
        is_real = (jnp.arange(50)[None] < jnp.asarray(counts)[:, None])[:, None, :, None]
        buffers = cache.write(buffers, tuple(jnp.where(is_real, entries, jnp.nan) for entries in keys_values), starts)
        for row in range(2):
            logits[row].append(output[row, : counts[row]])
            done[row] += counts[row]
    return [jnp.concatenate(row) for row in logits], buffers


@every_config
def test_logits_and_every_hidden_state_equal_transformers(pair, name):
    model, target = pair(name)
    tokens = random_tokens(LENGTHS[0], seed=23)
    expected_logits, expected_states = torch_run(model, tokens)
    logits, states, _ = one_shot(target, tokens)
    assert 0.3 < expected_logits.std() < 3
    assert len(states) == len(expected_states) == target.config.num_layers
    for actual, expected in zip(states, expected_states, strict=True):
        np.testing.assert_allclose(actual[0], expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits[0], expected_logits, atol=TOLERANCE, rtol=0)


@every_cached_config
def test_prefill_in_chunks_equals_one_shot(pair, name):
    model, target = pair(name)
    rows = [random_tokens(length, seed=29 + length) for length in LENGTHS]
    logits, _ = prefill(target, rows)
    for row in range(2):
        np.testing.assert_allclose(logits[row], torch_run(model, rows[row])[0], atol=TOLERANCE, rtol=0)


@every_cached_config
def test_every_node_of_a_trie_equals_its_path_run_alone(pair, name):
    model, target = pair(name)
    rows = [random_tokens(length, seed=31 + length) for length in LENGTHS]
    _, buffers = prefill(target, rows)
    num_nodes = 13
    rng = np.random.default_rng(37)
    # mostly deep: a parent among the three nodes before
    parents = np.array([[-1] + [int(rng.integers(max(node - 3, 0), node)) for node in range(1, num_nodes)] for _ in range(2)])
    tokens = rng.integers(0, 61, (2, num_nodes))
    paths = [[path_to(node, parents[row]) for node in range(num_nodes)] for row in range(2)]
    mask = np.array([[[other in paths[row][node] for other in range(num_nodes)] for node in range(num_nodes)] for row in range(2)])
    positions = np.array([[LENGTHS[row] + len(paths[row][node]) - 1 for node in range(num_nodes)] for row in range(2)])
    committed = cache.Committed(layers=buffers, lengths=jnp.asarray(LENGTHS))
    logits, states, _ = run(target, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask), committed)
    assert max(len(path) for row in paths for path in row) > 6
    for row in range(2):
        leaves = set(range(num_nodes)) - set(parents[row])
        for leaf in leaves:
            path = paths[row][leaf]
            expected_logits, expected_states = torch_run(model, np.concatenate([rows[row], tokens[row, path]]))
            np.testing.assert_allclose(logits[row, path], expected_logits[-len(path) :], atol=TOLERANCE, rtol=0)
            for actual, expected in zip(states, expected_states, strict=True):
                np.testing.assert_allclose(actual[row, path], expected[-len(path) :], atol=TOLERANCE, rtol=0)


def path_to(node, parents):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(parents[node])
    return np.array(path)


@every_config
def test_our_reading_of_a_config_equals_our_reading_of_transformers_copy(pair, name):
    model, target = pair(name)
    given = {field: value for field, value in CONFIGS[name].items() if value is not None}
    assert target.config == huggingface.read_target(given) == huggingface.read_target(json.loads(model.config.to_json_string()))


@pytest.mark.parametrize("name", ["llama", "qwen3_yarn"])
def test_the_rescaled_frequencies_have_all_three_bands_and_equal_transformers(pair, name):
    model, target = pair(name)
    rope = target.config.layers[0].rope
    frequencies = np.asarray(rotary_frequencies(rope, target.config.layers[0].head_size))
    np.testing.assert_allclose(frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(model.model.rotary_emb.attention_scaling)
    base = rope.theta ** (-np.arange(0, len(frequencies)) / len(frequencies))
    kept, slowed = np.isclose(frequencies, base), np.isclose(frequencies, base / rope.factor)
    assert kept.any()
    assert slowed.any()
    assert (~kept & ~slowed).any()
