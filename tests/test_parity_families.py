"""Every family and packaging of drafters, read from a checkpoint in its published layout, computes what the PyTorch reference computes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_models, tiny_qwen3_config

from reanchor_jax import DecodeConfig, cache, checkpoint, huggingface, make_sampling
from reanchor_jax.convert.engine import convert, export_huggingface
from reanchor_jax.decoding.draft import draft_blocks
from reanchor_jax.decoding.retain import init_retained
from reanchor_jax.decoding.sampling import row_keys

torch = pytest.importorskip("torch")
reference_drafters = pytest.importorskip("reference_drafters")

TOLERANCE = 1e-4
TARGET = tiny_qwen3_config(tie_word_embeddings=False)
POSITION = 71  # of the anchor: longer than a chunk of the cache
ANCHORS = (3, 11, 19, 28, 33, 41, 57)
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}

CASES = {
    "dflash": ("dflash", {}),
    "dflash, windows": ("dflash", _SLIDING),
    "dflash, new layout, scales": ("dflash-new", {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 2.5}),
    "dflash, new layout, windows both ways": ("dflash-new", {**_SLIDING, "is_causal": False}),
    "domino, shifted": ("domino", {"pure_draft_prefix_len": 1}),
    "domino, shifted, no plain draft": ("domino", {"pure_draft_prefix_len": 0}),
    "domino, own position, old names": (
        "domino",
        {"shift_label": False, "pure_draft_prefix_len": 2, "key_prefix": "logit_head.", "projector_type": "causal_v5"},
    ),
    "dspark": ("dspark-deepspec", {}),
    "dspark, gated": ("dspark-deepspec", {"markov_head_type": "gated"}),
    "dspark, rnn": ("dspark-deepspec", {"markov_head_type": "rnn"}),
    "dspark, blind confidence": ("dspark-deepspec", {"confidence_head_with_markov": False}),
    "dspark, no confidence": ("dspark-deepspec", {"enable_confidence_head": False}),
    "block7": ("dflash-block7", {}),
    "dspark, SpecForge": ("dspark-specforge", {}),
    "dspark, speculators": ("dspark-speculators", {}),
    "dspark, speculators, unshifted": ("dspark-speculators", {"sample_from_anchor": None}),
    "dspark, speculators, reduced vocabulary": ("dspark-speculators", {"draft_vocab_size": 37, "own_embedding": False}),
    "dspark, ModelOpt": ("dspark-modelopt", {"markov_head_type": "gated"}),
    "dspark, ModelOpt, rnn": ("dspark-modelopt", {"markov_head_type": "rnn"}),
    "dspark on dflare, AngelSpec": ("dspark-angelspec", {}),
    "dspark on dflare, AngelSpec, renamed": ("dspark-angelspec", {"has_native_names": False}),
    "gemma4 dspark": ("gemma4-dspark", {"markov_head_type": "gated"}),
    "gemma4 block7": ("gemma4-block7", {}),
    "dflare": ("dflare", {}),
    "dflare, AngelSpec": ("dflare-angelspec", {}),
}
# every family, head and alignment once; what only packages them otherwise is left to the slow tests
_QUICK = {
    "dflash, new layout, scales",
    "domino, shifted",
    "domino, own position, old names",
    "dspark, rnn",
    "block7",
    "dspark, speculators, reduced vocabulary",
    "dspark, ModelOpt",
    "dspark on dflare, AngelSpec",
    "gemma4 dspark",
    "dflare",
}
assert CASES.keys() >= _QUICK
every_case = pytest.mark.parametrize("name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Function from a case's name to the reference drafter and our models, converted from the published layout."""
    root = tmp_path_factory.mktemp("families")
    checkpoint.save(root / "target", random_models(TARGET, None, seed=41), target_config=TARGET)

    @functools.cache
    def build(name):
        packaging, options = CASES[name]
        reference = reference_drafters.make(packaging, TARGET, seed=43, **options)
        folder = root / "".join(character if character.isalnum() else "_" for character in name)
        reference.save(folder / "published")
        converted = convert(None, folder / "published", folder / "converted", pair=root / "target", show_progress=False)
        return reference, checkpoint.load(converted), folder

    return build


def inputs(models):
    rng = np.random.default_rng(47)
    taps = rng.standard_normal((POSITION, len(models.drafter.config.target_layer_ids) * TARGET["hidden_size"])).astype(np.float32)
    return taps, int(rng.integers(1, TARGET["vocab_size"]))


def borrowed(models):
    """The target's embedding and head [V D], as PyTorch has them."""
    embedding, head = models.target.embedding.embedding[...], models.target.head.kernel[...]
    return torch.tensor(np.array(embedding)), torch.tensor(np.array(head).T)


def context(drafter, taps):
    """The drafter's cache after the taps."""
    features = drafter.features(jnp.asarray(taps)[None])
    entries = drafter.context_keys_values(features, jnp.arange(len(taps), dtype=jnp.int32)[None])
    buffers = cache.init_cache(drafter.config.layers, num_rows=1, num_slots=128, dtype=jnp.float32)
    buffers = cache.write(tuple(jnp.full_like(buffer, jnp.nan) for buffer in buffers), entries, jnp.zeros(1, jnp.int32))
    return cache.Committed(layers=buffers, lengths=jnp.asarray([len(taps)], jnp.int32))


@jax.jit
def block(models, taps, tokens):
    """States of the predicting slots [K1 D], base logits [K1 V1], corrected logits and log-odds of a block whose tokens [K] are given."""
    target, drafter = models
    config = drafter.config
    slots = jnp.arange(config.num_slots, dtype=jnp.int32)[None]
    embedded = drafter.embed(target, jnp.where(slots == 0, tokens[0], config.mask_token_id))
    states = drafter.predicting(drafter.block_states(embedded, taps.shape[0] + slots, committed=context(drafter, taps)))
    base = drafter.base_logits(target, states)
    corrected = [base[0, index] for index in range(config.num_drafts)]
    if drafter.causal_head is not None:
        state = drafter.causal_head.start((1,), jnp.float32)
        for index in range(config.num_drafts):
            previous = tokens[index][None]
            state, correction = drafter.causal_head(state, previous, drafter.embed(target, previous), states[:, index])
            if index >= config.head.num_plain:
                corrected[index] = corrected[index] + correction[0]
    log_odds = None
    if drafter.confidence is not None:
        reads = config.confidence.reads_previous
        log_odds = drafter.confidence(states[0], drafter.causal_head.embedding(tokens[:-1]) if reads else None)
    return base[0], jnp.stack(corrected), log_odds


@every_case
def test_features_equal_the_reference(pair, name):
    reference, models, _ = pair(name)
    taps, _ = inputs(models)
    expected = reference.features(torch.tensor(taps))
    expected = torch.cat(expected, dim=-1) if isinstance(expected, list) else expected
    np.testing.assert_allclose(models.drafter.features(jnp.asarray(taps)[None])[0], expected.numpy(), atol=TOLERANCE, rtol=0)


@every_case
def test_base_and_corrected_logits_and_confidences_equal_the_reference(pair, name):
    reference, models, _ = pair(name)
    taps, anchor = inputs(models)
    embedding, head = borrowed(models)
    tokens, expected, confidences = reference.draft(torch.tensor(taps), anchor, POSITION, embedding, head)
    states = reference.block_states(torch.tensor(taps), anchor, POSITION, embedding)
    given = jnp.asarray([anchor, *tokens.tolist()], jnp.int32)
    base, corrected, log_odds = block(models, jnp.asarray(taps), given)
    np.testing.assert_allclose(base, reference.base_logits(states, head).numpy(), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(corrected, expected.numpy(), atol=TOLERANCE, rtol=0)
    assert (log_odds is None) == (confidences is None)
    if log_odds is not None:
        np.testing.assert_allclose(jax.nn.sigmoid(log_odds), confidences.numpy().reshape(-1), atol=TOLERANCE, rtol=0)


def drafted(models, config):
    """Baseline blocks of all anchors after the same context."""
    taps, _ = inputs(models)
    drafter, num_rows = models.drafter, len(ANCHORS)
    committed = context(drafter, jnp.asarray(taps))
    return draft_blocks(
        models.target,
        drafter,
        jnp.asarray(ANCHORS, jnp.int32),
        jax.tree.map(lambda buffer: jnp.repeat(buffer, num_rows, axis=0), committed),
        init_retained(num_rows, max_offsets=0, width=drafter.config.feature_width, dtype=jnp.float32),
        row_keys(jax.random.key(0), num_rows),
        make_sampling(num_rows),
        jnp.zeros((num_rows, drafter.config.block_size, TARGET["vocab_size"])),
        is_running=jnp.ones(num_rows, bool),
        num_blocks=1,
        config=config,
    )


@every_case
def test_drafted_tokens_equal_the_reference(pair, name):
    reference, models, _ = pair(name)
    draft = drafted(models, DecodeConfig())
    for row, anchor in enumerate(ANCHORS):
        expected, _, _ = reference.draft(torch.tensor(inputs(models)[0]), anchor, POSITION, *borrowed(models))
        assert draft.tokens[row, 0].tolist() == [anchor, *expected.tolist()]
        assert draft.kept[row, 0] == 1 + len(expected)
    assert models.drafter.config.num_drafts == reference.num_drafts


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_blocks_are_cut_where_the_reference_trusts_them_less(pair, is_calibrated):
    reference, models, _ = pair("dspark, rnn")
    num_drafts = models.drafter.config.num_drafts
    temperatures = tuple(0.5 + 0.25 * index for index in range(num_drafts)) if is_calibrated else ()
    config = dataclasses.replace(
        models.drafter.config, confidence=dataclasses.replace(models.drafter.config.confidence, temperatures=temperatures)
    )
    drafter = checkpoint.with_leaves(checkpoint.build_drafter(config, jnp.float32), checkpoint.leaves(models.drafter))
    kept = drafted(models._replace(drafter=drafter), DecodeConfig(min_confidence=0.45)).kept[:, 0].tolist()
    expected = []
    for anchor in ANCHORS:
        _, _, chances = reference.draft(torch.tensor(inputs(models)[0]), anchor, POSITION, *borrowed(models))
        log_odds = torch.logit(chances.reshape(-1).double()) / torch.tensor(temperatures or [1.0] * num_drafts)
        below = (torch.sigmoid(log_odds) < 0.45).tolist()
        expected.append(1 + (below.index(True) if True in below else num_drafts))
    assert kept == expected
    assert len(set(kept)) > 1


@every_case
def test_what_we_export_holds_the_reference_s_tensors_again(pair, name):
    reference, models, folder = pair(name)
    exported = export_huggingface(folder / "converted", folder / "exported")
    config = json.loads((exported / "drafter/config.json").read_text())
    assert huggingface.OPTIONS not in config
    again = convert(None, exported / "drafter", folder / "again", pair=folder / "converted", show_progress=False)
    for leaf, value in checkpoint.leaves(checkpoint.load_drafter(again)).items():
        np.testing.assert_array_equal(value, checkpoint.leaves(models.drafter)[leaf], err_msg=leaf)
    assert sum(tensor.numel() for tensor in reference.tensors.values() if tensor.dtype != torch.bool) == sum(
        leaf.size for leaf in checkpoint.leaves(models.drafter).values()
    )
