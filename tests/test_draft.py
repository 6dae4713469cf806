"""Drafted blocks against one drafter pass a block over its own dense context, and draft choices against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from situations import BLOCK, small_models

from reanchor_jax import DecodeConfig
from reanchor_jax.cache import Committed, init_cache, write
from reanchor_jax.decoding.draft import draft_blocks, draft_candidates
from reanchor_jax.decoding.retain import Retained
from reanchor_jax.decoding.sampling import component_noise, draft_noise, filter_logits, make_sampling, position_noise, row_keys
from reanchor_jax.models.drafter import BlockContext
from reanchor_jax.models.heads import RefinerHead

ROWS, ENTRIES, SLOTS = 3, 4, 128
LENGTHS = np.asarray([0, 11, 70], np.int32)
COUNTS = np.asarray([2, 4, 0], np.int32)
# entries 0 and 1 follow each other, 2 stands alone, 3 follows 2
PATHS = [[0], [0, 1], [2], [2, 3]]
SAMPLING = make_sampling(ROWS, temperature=[0.0, 0.7, 1.0], top_p=[1.0, 0.9, 1.0])


@functools.cache
def drawn(family):
    """Committed features per row, retained entries, and anchors that make sites likely."""
    models = small_models(3, family=family)
    rng = np.random.default_rng(5)
    width = models.drafter.config.feature_width
    committed = rng.standard_normal((ROWS, LENGTHS.max(), width)).astype(np.float32)
    visible = np.zeros((ROWS, ENTRIES, ENTRIES), bool)
    for entry, path in enumerate(PATHS):
        visible[:, entry, path] = True
    is_entry = np.arange(ENTRIES)[None] < COUNTS[:, None]
    retained = Retained(
        tokens=np.where(is_entry, rng.integers(61, size=(ROWS, ENTRIES)), 0).astype(np.int32),
        offsets=np.where(is_entry, [[1, 2, 1, 2]] * ROWS, 1).astype(np.int32),
        features=np.where(is_entry[..., None], rng.standard_normal((ROWS, ENTRIES, width)), 0).astype(np.float32),
        visible=visible & is_entry[:, :, None] & is_entry[:, None, :],
        counts=COUNTS,
    )
    return models, committed, retained, rng.integers(61, size=ROWS).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("draft_choice", "num_blocks", "is_tree"))
def draft(models, committed, retained, anchors, noise, *, draft_choice, num_blocks=1 + ENTRIES, is_tree=False):
    positions = jnp.broadcast_to(jnp.arange(committed.shape[1], dtype=jnp.int32), committed.shape[:2])
    entries = models.drafter.context_keys_values(committed, positions)
    # NaN in every slot nobody may read, those behind each row's own length included
    cache = init_cache(models.drafter.config.layers, num_rows=ROWS, num_slots=SLOTS, dtype=jnp.float32)
    cache = write(tuple(jnp.full_like(buffer, jnp.nan) for buffer in cache), entries, jnp.zeros(ROWS, jnp.int32))
    is_real = (jnp.arange(SLOTS)[None] < LENGTHS[:, None])[:, None, :, None]
    cache = tuple(jnp.where(is_real, buffer, jnp.nan) for buffer in cache)
    lengths = jnp.asarray(LENGTHS)
    state = Committed(layers=cache, lengths=lengths), retained, row_keys(jax.random.key(9), ROWS), SAMPLING, noise
    given = {"num_blocks": num_blocks, "config": DecodeConfig(draft_choice=draft_choice)}
    if is_tree:
        return draft_candidates(models.target, models.drafter, anchors, *state, **given)
    return draft_blocks(models.target, models.drafter, anchors, *state, is_running=jnp.ones(ROWS, bool), **given)


@functools.cache
def target_noise():
    """The target's own noise for the 2K-1 positions behind each anchor."""
    positions = LENGTHS[:, None] + 1 + np.arange(2 * BLOCK - 1)[None]
    return position_noise(row_keys(jax.random.key(9), ROWS), jnp.asarray(positions, jnp.int32), vocab_size=61)


@jax.jit
def block_logits(models, features, positions, mask, anchor, first_position, noise):
    """States and logits of one block of one row whose whole context lies beside it, behind masks. noise: of a mixture's components."""
    target, drafter = models
    slots = jnp.arange(drafter.config.num_slots, dtype=jnp.int32)[None]
    states = drafter.block_states(
        drafter.embed(target, jnp.where(slots == 0, anchor, drafter.config.mask_token_id)),
        first_position + slots,
        context=BlockContext(keys_values=drafter.context_keys_values(features, positions), positions=positions, mask=mask),
    )
    first, states = states[0, 0], drafter.predicting(states)[0]
    if drafter.latent_mixture is not None:
        component = jnp.argmax(drafter.latent_mixture.log_priors(first) + noise)
        states = drafter.latent_mixture(states)[:, component]
    return states, drafter.base_logits(target, states)


def own_component_noise(family, row, block, place, draft_choice):
    """Noise with which a block's component is drawn: none where the likeliest is taken."""
    num_components = 0 if (mixture := drawn(family)[0].drafter.latent_mixture) is None else mixture.config.num_components
    if draft_choice != "independent" or SAMPLING.temperature[row] == 0:
        return np.zeros(num_components, np.float32)
    key = row_keys(jax.random.key(9), ROWS)[row : row + 1]
    return component_noise(key, jnp.full((1, 1 + ENTRIES), place, jnp.int32), num_components=num_components)[0, block]


def logits_of(family, row, block, anchor, draft_choice):
    """States and logits of a block of a row, over committed features and the retained entries of its path; block 0 is the baseline."""
    models, committed, retained, _ = drawn(family)
    length, num_committed = int(LENGTHS[row]), committed.shape[1]
    path, offset = (PATHS[block - 1], retained.offsets[row, block - 1]) if block else ([], 0)
    features = np.concatenate([committed[row], retained.features[row]])[None]
    places = np.concatenate([np.arange(num_committed), length + retained.offsets[row] - 1])[None]
    mask = np.concatenate([np.arange(num_committed) < length, [entry in path for entry in range(ENTRIES)]])[None]
    noise = own_component_noise(family, row, block, length + offset, draft_choice)
    return block_logits(models, features, places.astype(np.int32), mask, np.int32(anchor), np.int32(length + offset), noise)


def drafted_tokens(family, row, block, anchor, site, draft_choice):
    """Tokens behind a block's anchor, chosen one after the other where a head makes them depend on each other."""
    states, logits = logits_of(family, row, block, anchor, draft_choice)
    target, drafter = drawn(family)[0]
    head = drafter.causal_head
    if head is None:
        return chosen(np.asarray(drafter.spread(logits)), row, block, site, draft_choice)
    if isinstance(head, RefinerHead):
        return refined_tokens(drafter, states, logits, row, block, anchor, site, draft_choice)
    tokens, state = [int(anchor)], head.start((), jnp.float32)
    for index in range(len(logits)):
        previous = jnp.asarray(tokens[-1], jnp.int32)
        state, correction = head(state, previous, drafter.embed(target, previous), states[index])
        corrected = logits[index] + (correction if index >= drafter.config.head.num_plain else 0.0)
        tokens += chosen(np.asarray(drafter.spread(corrected))[None], row, block, site + index, draft_choice)
    return tokens[1:]


@jax.jit
def refined(drafter, states, logits, previous):
    return drafter.spread(logits + drafter.causal_head(drafter.causal_head.read(states), previous))


def refined_tokens(drafter, states, logits, row, block, anchor, site, draft_choice):
    """Tokens behind a block's anchor as a refiner's passes leave them: those of the last pass, behind the tokens of the one before it."""
    tokens = chosen(np.asarray(drafter.spread(logits)), row, block, site, draft_choice)
    for _ in range(drafter.config.head.num_passes):
        corrected = refined(drafter, states, logits, np.asarray([anchor, *tokens[:-1]], np.int32))
        tokens = chosen(np.asarray(corrected), row, block, site, draft_choice)
    return tokens


def chosen(logits, row, block, site, draft_choice):
    """Tokens by the definition of the choice; site: where the token before the first stands behind the round's anchor."""
    if draft_choice == "argmax" or SAMPLING.temperature[row] == 0:
        return logits.argmax(axis=-1).tolist()
    own_sampling = jax.tree.map(lambda value: value[row : row + 1], SAMPLING)
    filtered = np.asarray(filter_logits(jnp.asarray(logits)[None], own_sampling))[0]
    places = site + 1 + np.arange(len(logits))
    if draft_choice == "coupled":
        noise = np.asarray(target_noise())[row, places - 1]
    else:
        positions = jnp.asarray(LENGTHS[row] + places, jnp.int32)[None, None]
        noise = np.asarray(draft_noise(row_keys(jax.random.key(9), ROWS)[row : row + 1], positions, first_block=block, vocab_size=61))[0, 0]
    return (filtered + noise).argmax(axis=-1).tolist()


@pytest.mark.parametrize(
    ("family", "draft_choice"),
    [
        ("llama", "coupled"),
        pytest.param("llama", "independent", marks=pytest.mark.slow),
        ("qwen3", "argmax"),
        ("domino", "coupled"),
        pytest.param("dspark", "independent", marks=pytest.mark.slow),
        pytest.param("dspark_dflare", "coupled", marks=pytest.mark.slow),
        pytest.param("gemma4_dspark", "argmax", marks=pytest.mark.slow),
        ("xpress", "coupled"),
        pytest.param("dblast", "independent", marks=pytest.mark.slow),
        pytest.param("xpress_dblast", "independent", marks=pytest.mark.slow),
        pytest.param("xpress_dblast", "coupled", marks=pytest.mark.slow),
    ],
)
def test_every_block_equals_a_pass_of_its_own_and_its_tokens_the_definition_of_the_choice(family, draft_choice):
    models, committed, retained, anchors = drawn(family)
    baselines = [[int(anchor), *drafted_tokens(family, row, 0, anchor, 0, draft_choice)] for row, anchor in enumerate(anchors)]
    tokens = np.array(retained.tokens)
    tokens[0, 1], tokens[1, 0], tokens[1, 2] = baselines[0][2], baselines[1][4], anchors[1]  # these blocks find a site
    drafted = draft(models, committed, retained._replace(tokens=tokens), anchors, target_noise(), draft_choice=draft_choice)
    sites = set()
    for row, baseline in enumerate(baselines):
        assert drafted.tokens[row, 0].tolist() == baseline
        for block in range(1, 1 + COUNTS[row]):
            anchor = int(tokens[row, block - 1])
            site = baseline.index(anchor) if anchor in baseline else -1
            assert int(drafted.sites[row, block]) == site
            expected = drafted_tokens(family, row, block, anchor, max(site, 0), draft_choice)
            assert drafted.tokens[row, block].tolist() == [anchor, *expected]
            sites.add(site)
        assert not drafted.tokens[row, 1 + COUNTS[row] :].any()
        assert (drafted.sites[row, 1 + COUNTS[row] :] == -1).all()
    assert sites > {-1, 0}


@pytest.mark.slow
def test_a_smaller_bucket_drafts_the_same_blocks():
    models, committed, retained, anchors = drawn("llama")
    kept = retained._replace(counts=np.minimum(COUNTS, 2))
    whole = draft(models, committed, kept, anchors, target_noise(), draft_choice="independent")
    fewer = draft(models, committed, kept, anchors, target_noise(), draft_choice="independent", num_blocks=3)
    np.testing.assert_array_equal(fewer.tokens, whole.tokens[:, :3])
    np.testing.assert_array_equal(fewer.sites, whole.sites[:, :3])
    assert (whole.sites[:, 3:] == -1).all()


@pytest.mark.parametrize(
    ("family", "draft_choice"),
    [
        ("domino", "coupled"),
        pytest.param("dspark", "independent", marks=pytest.mark.slow),
        pytest.param("dspark_dflare", "coupled", marks=pytest.mark.slow),
        pytest.param("llama", "coupled", marks=pytest.mark.slow),
        pytest.param("gemma4_dspark", "argmax", marks=pytest.mark.slow),
        pytest.param("xpress", "coupled", marks=pytest.mark.slow),
        pytest.param("xpress_dblast", "independent", marks=pytest.mark.slow),
    ],
)
def test_the_likeliest_candidates_are_the_tokens_drafted_and_a_head_reads_them(family, draft_choice):
    """Noise of the target's belongs to places: where a shifted block will stand is not known, so its candidates are ranked without."""
    models, committed, retained, anchors = drawn(family)
    found = draft(models, committed, retained, anchors, target_noise(), draft_choice=draft_choice, is_tree=True)
    for row in range(ROWS):
        for block in range(1 + COUNTS[row]):
            anchor = retained.tokens[row, block - 1] if block else anchors[row]
            offset = int(retained.offsets[row, block - 1]) if block else 0
            choice = "argmax" if block and draft_choice == "coupled" else draft_choice
            assert found.tokens[row, block, :, 0].tolist() == drafted_tokens(family, row, block, anchor, offset, choice)
    assert (np.diff(found.log_probs[0]) <= 0).all()  # at temperature 0 the likeliest come first
    assert found.is_block.sum(axis=1).tolist() == (1 + COUNTS).tolist()
