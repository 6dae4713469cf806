"""The drafter equals `dflash.model.DFlashDraftModel` of PyPI dflash 0.1.0: features, block states, logits, and its own exported copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import random_models, tiny_drafter_config, tiny_qwen3_config

from reanchor_jax import cache, checkpoint, huggingface
from reanchor_jax.convert.engine import convert, export_huggingface
from reanchor_jax.models.drafter import BlockContext

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
dflash = pytest.importorskip("dflash.model")

TOLERANCE = 1e-4
NUM_SLOTS = 128
NUM_CONTEXT = 83

TARGET = tiny_qwen3_config(tie_word_embeddings=False)
# a window shorter than the block of 7, so that the window inside the block matters too
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
_YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 8.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "full": tiny_drafter_config(TARGET),
    "full_causal": tiny_drafter_config(TARGET, is_causal=True),
    "sliding": tiny_drafter_config(TARGET, **_SLIDING),
    "sliding_both_ways": tiny_drafter_config(TARGET, **_SLIDING, is_causal=False),
    "sliding_causal": tiny_drafter_config(TARGET, **_SLIDING, is_causal=True),
    "yarn": tiny_drafter_config(TARGET, rope_parameters=_YARN, target_layer_ids=[3, 0, 4]),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Function from a config's name to the reference drafter and our models, converted from its save_pretrained."""
    root = tmp_path_factory.mktemp("parity")
    target = random_models(TARGET, None, seed=41)
    checkpoint.save(root / "target", target, target_config=TARGET)

    @functools.cache
    def build(name):
        given = {field: value for field, value in CONFIGS[name].items() if field not in ("model_type", "architectures")}
        torch.manual_seed(43)
        reference = dflash.DFlashDraftModel(transformers.Qwen3Config(**given)).eval()
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.ndim == 1:
                    parameter.normal_(mean=1.0, std=0.25)
                else:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
        reference.save_pretrained(root / f"{name}_zlab")
        converted = convert(None, root / f"{name}_zlab", root / name, pair=root / "target", show_progress=False)
        return reference, checkpoint.load(converted)

    return build


def inputs(config, *, seed):
    """Taps [1 T ED] of a context and token embeddings [1 K D] of a block."""
    rng = np.random.default_rng(seed)
    taps = rng.standard_normal((1, NUM_CONTEXT, len(config.target_layer_ids) * config.width)).astype(np.float32)
    return taps, rng.standard_normal((1, config.block_size, config.width)).astype(np.float32)


def reference_states(reference, taps, block):
    positions = torch.arange(taps.shape[1] + block.shape[1])[None]
    with torch.no_grad():
        return reference(positions, noise_embedding=torch.tensor(block), target_hidden=torch.tensor(taps)).numpy()


@functools.partial(jax.jit, static_argnames="num_committed")
def block_states(drafter, taps, block, *, num_committed):
    """States of a block whose context lies in the cache up to num_committed and beside it from there on."""
    with jax.default_matmul_precision("highest"):
        num_context = taps.shape[1]
        entries = drafter.context_keys_values(drafter.features(taps), jnp.arange(num_context)[None])
        buffers = cache.init_cache(drafter.config.layers, num_rows=1, num_slots=NUM_SLOTS, dtype=jnp.float32)
        buffers = tuple(jnp.full_like(buffer, jnp.nan) for buffer in buffers)
        buffers = cache.write(buffers, tuple(layer[:, :, :num_committed] for layer in entries), jnp.zeros(1, jnp.int32))
        beside = None
        if num_committed < num_context:
            beside = BlockContext(
                keys_values=tuple(layer[:, :, num_committed:] for layer in entries),
                positions=jnp.arange(num_committed, num_context)[None],
                mask=jnp.ones((1, num_context - num_committed), bool),
            )
        positions = num_context + jnp.arange(block.shape[1])[None]
        committed = cache.Committed(layers=buffers, lengths=jnp.asarray([num_committed]))
        return drafter.block_states(block, positions, committed=committed, context=beside)


@every_config
def test_features_equal_the_reference(pair, name):
    reference, models = pair(name)
    taps, _ = inputs(models.drafter.config, seed=47)
    with torch.no_grad():
        expected = reference.hidden_norm(reference.fc(torch.tensor(taps))).numpy()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(models.drafter.features(jnp.asarray(taps)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_committed", [NUM_CONTEXT, 70, 0])
@every_config
def test_block_states_and_logits_equal_the_reference(pair, name, num_committed):
    reference, models = pair(name)
    taps, block = inputs(models.drafter.config, seed=53)
    expected = reference_states(reference, taps, block)
    states = block_states(models.drafter, jnp.asarray(taps), jnp.asarray(block), num_committed=num_committed)
    np.testing.assert_allclose(states, expected, atol=TOLERANCE, rtol=0)
    head = torch.nn.Linear(TARGET["hidden_size"], TARGET["vocab_size"], bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(np.array(models.target.head.kernel[...]).T))
        expected_logits = reference.compute_logits(torch.tensor(expected), head).numpy()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(models.target.logits(states), expected_logits, atol=TOLERANCE, rtol=0)


def test_the_variants_of_the_mask_give_different_states(pair):
    """Else the equalities above would prove nothing about masks."""
    taps, block = inputs(pair("full")[1].drafter.config, seed=53)
    drafter = pair("full")[1].drafter
    graph_free = checkpoint.leaves(drafter)
    results = []
    for name in ("full", "full_causal", "sliding", "sliding_both_ways", "sliding_causal"):
        config = huggingface.read_drafter(CONFIGS[name])
        same_weights = checkpoint.with_leaves(checkpoint.build_drafter(config, jnp.float32), graph_free)
        results.append(block_states(same_weights, jnp.asarray(taps), jnp.asarray(block), num_committed=70))
    for index, one in enumerate(results):
        for other in results[index + 1 :]:
            assert float(jnp.max(jnp.abs(one - other))) > 1e-2


@every_config
def test_what_we_export_is_read_by_the_reference_and_by_transformers(pair, name, tmp_path):
    _, models = pair(name)
    changed = jax.tree.map(lambda leaf: leaf * 1.0625, nnx.state(models.drafter))
    drafter = nnx.merge(nnx.graphdef(models.drafter), changed)
    checkpoint.save(tmp_path / "pair", models._replace(drafter=drafter), target_config=TARGET, drafter_config=CONFIGS[name])
    exported = export_huggingface(tmp_path / "pair", tmp_path / "exported")
    reference, info = dflash.DFlashDraftModel.from_pretrained(exported / "drafter", output_loading_info=True)
    assert not any(info.values())
    assert reference.block_size == models.drafter.config.block_size
    assert reference.mask_token_id == models.drafter.config.mask_token_id
    taps, block = inputs(drafter.config, seed=59)
    states = block_states(drafter, jnp.asarray(taps), jnp.asarray(block), num_committed=NUM_CONTEXT)
    np.testing.assert_allclose(states, reference_states(reference.eval(), taps, block), atol=TOLERANCE, rtol=0)
    target, info = transformers.AutoModelForCausalLM.from_pretrained(exported / "target", output_loading_info=True)
    assert not any(info.values())
    np.testing.assert_array_equal(target.lm_head.weight.detach().numpy(), np.asarray(models.target.head.kernel[...]).T)
