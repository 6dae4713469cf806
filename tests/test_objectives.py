"""What drafters are trained for: losses equal values by hand and slow loops, gradients equal differences, recorded blocks are rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tiny import random_models, tiny_drafter_config, tiny_family_config, tiny_llama_config

from reanchor_jax import DecodeConfig, checkpoint, generate, make_sampling
from reanchor_jax.decoding.sampling import row_keys
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.huggingface import read_target
from reanchor_jax.training.families import FAMILIES
from reanchor_jax.training.losses import cross_entropy, divergence, hit_rates, reach_weights, slot_weights, total_variation, weighted_mean
from reanchor_jax.training.packed import Proposed, packed_blocks, proposed_logits, refined_logits
from reanchor_jax.training.rollouts import record_blocks
from reanchor_jax.training.shape import DrafterShape

LENGTH = 23
ANCHORS = [[2, 20], [11, 17]]  # two of the blocks reach past the end
DECAY = 3.0
SHAPE = DrafterShape(mask_token_id=60, num_layers=2, num_heads=2, block_size=6, causal_size=5, causal_width=7)
# as training makes them, and as others publish them
CONFIGS = {
    family: lambda target, family=family: SHAPE.huggingface(read_target(target), family)
    for family in ("dflash", "dflare", "domino", "dspark", "xpress", "dblast")
}
CONFIGS |= {f"{family}, published": functools.partial(tiny_family_config, family) for family in ("domino", "dspark")}
LOG2, LOG3 = np.log(2), np.log(3)


@functools.cache
def pair(family):
    target = tiny_llama_config()
    return random_models(target, CONFIGS[family](target), seed=3)


def texts():
    return jnp.asarray(np.random.default_rng(1).integers(61, size=(2, LENGTH)), jnp.int32)


def loss_of(family):
    return FAMILIES[family.partition(",")[0]].loss


@functools.partial(jax.jit, static_argnames="family")
def scored(drafter, target, progress, *, family):
    blocks = packed_blocks(drafter, target, texts(), jnp.asarray(ANCHORS, jnp.int32))
    return blocks, loss_of(family)(drafter, target, blocks, slot_weights(blocks.is_inside, decay=DECAY), progress)


def softmax(logits):
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def test_values_by_hand():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]))
    np.testing.assert_allclose(cross_entropy(logits, jnp.asarray([0, 2], jnp.int32)), [LOG2, LOG3], rtol=1e-6)
    # KL((1/2, 1/4, 1/4) || uniform) = log 3 - 3/2 log 2
    np.testing.assert_allclose(divergence(logits[0], logits[1]), LOG3 - 1.5 * LOG2, rtol=1e-5)
    np.testing.assert_allclose(divergence(logits[1], logits[0]), (LOG2 + 2 * 2 * LOG2) / 3 - LOG3, rtol=1e-5)
    np.testing.assert_allclose(total_variation(logits[0], logits[1]), 1 / 6, rtol=1e-6)
    assert float(weighted_mean(jnp.asarray([2.0, 7.0]), jnp.asarray([3.0, 1.0]))) == 13 / 4
    assert float(weighted_mean(jnp.asarray([2.0, 7.0]), jnp.zeros(2))) == 0.0


def test_weights_of_slots_by_hand():
    inside = jnp.asarray([[[True, True, True, False]]])
    np.testing.assert_allclose(slot_weights(inside, decay=2.0)[0, 0], [1, np.exp(-0.5), np.exp(-1), 0], rtol=1e-6)
    np.testing.assert_allclose(slot_weights(inside, decay=0.0, emphasis=3.0, old_slots=1)[0, 0], [1, 3, 3, 0])
    # chances 1, 1/2, 1/4 count as 1, 3/4, 5/8: what reaches a slot is 1, 3/4, 15/32, and a slot weighs what reaches it and all behind it
    losses = -jnp.log(jnp.asarray([[[1.0, 0.5, 0.25, 0.5]]]))
    np.testing.assert_allclose(reach_weights(losses, inside)[0, 0], [1 + 0.75 + 15 / 32, 0.75 + 15 / 32, 15 / 32, 0], rtol=1e-6)
    assert not np.asarray(jax.grad(lambda losses: reach_weights(losses, inside).sum())(losses)).any()
    logits = jnp.asarray([[[[0.0, 1.0], [2.0, 1.0]]], [[[0.0, 1.0], [0.0, 1.0]]]])
    rates = hit_rates(logits, jnp.asarray([[[1, 1]], [[0, 1]]], jnp.int32), jnp.asarray([[[True, True]], [[True, False]]]))
    np.testing.assert_allclose(rates, [0.5, 0.0])


def slow_loss(family, models, progress):
    """The loss by loops over rows, anchors and slots in float64, from the logits of `packed_blocks` and the head called token by token."""
    drafter, target = models.drafter, models.target
    blocks = packed_blocks(drafter, target, texts(), jnp.asarray(ANCHORS, jnp.int32))
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (2, LENGTH))
    output = target(texts(), positions, prompt_mask(LENGTH))
    of_target = np.asarray(target.logits(output.states), np.float64)
    head, total, weights = drafter.causal_head, 0.0, 0.0
    for row in range(2):
        for column in range(2):
            state = None if head is None else head.start((), jnp.float32)
            for index in range(drafter.config.num_drafts):
                place = ANCHORS[row][column] + 1 + index
                if place >= LENGTH:
                    continue
                before, label = texts()[row, place - 1], int(texts()[row, place])
                base = np.asarray(blocks.logits[row, column, index], np.float64)
                logits = base
                z = blocks.states[row, column, index]
                if head is not None:
                    state, correction = head(state, before, drafter.embed(target, before), z)
                    logits = base + (np.asarray(correction, np.float64) if index >= head.config.num_plain else 0.0)
                p, q = softmax(of_target[row, place - 1]), softmax(logits)
                if family.startswith("domino"):
                    loss = -progress * np.log(q[label]) - (1 - progress) * np.log(softmax(base)[label])
                elif family.startswith("dspark"):
                    distance = np.abs(p - q).sum()
                    chance = 1 / (1 + np.exp(-float(drafter.confidence(z, head.embedding(before)))))
                    overlap = 1 - distance / 2
                    sure = -overlap * np.log(chance) - (1 - overlap) * np.log(1 - chance)
                    loss = -0.1 * np.log(q[label]) + 0.9 * distance + sure
                else:
                    loss = -np.log(q[label])
                weight = np.exp(-index / DECAY)
                total += weight * loss
                weights += weight
    return total / weights


def block_of(models, blocks, row, column):
    """What slow losses of whole blocks read, in float64: states, first state, base logits, the target's logits, tokens, slots inside."""
    truth = blocks.target_logits
    arrays = (blocks.states, blocks.anchor_states, blocks.logits, truth)
    count = min(models.drafter.config.num_drafts, LENGTH - 1 - ANCHORS[row][column])
    tokens = np.asarray(texts())[row, ANCHORS[row][column] :][: 1 + count]
    return (*(np.asarray(array, np.float64)[row, column] for array in arrays), tokens, count)


def weights_of(models):
    return {path: np.asarray(value, np.float64) for path, value in checkpoint.leaves(models.drafter).items()}


def silu(x):
    return x / (1 + np.exp(-x))


def refined_by_hand(weights, states, base, previous):
    """A refiner's logits by loops over slots and those before them."""
    w = {path.removeprefix("causal_head/"): value for path, value in weights.items()}
    f = states @ w["from_state/kernel"] + states.mean(axis=0) @ w["from_mean/kernel"] + w["embedding/embedding"][previous]
    x = f.copy()
    for slot in range(len(x)):
        for other in range(slot):
            x[slot] += w["mixer"][slot, other] * f[other]
    for index in range(2):
        normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * w[f"norms/{index}/scale"]
        gate, up = (normed @ w[f"mlps/{index}/gate_up/kernel"][:, part] for part in range(2))
        x = x + (silu(gate) * up) @ w[f"mlps/{index}/down/kernel"]
    return base + x @ w["output/kernel"]


def slow_xpress(models, blocks):
    weights, total, weight = weights_of(models), 0.0, 0.0
    for row, column in np.ndindex(2, 2):
        states, _, base, truth, tokens, count = block_of(models, blocks, row, column)
        padded = [*tokens, *[tokens[-1]] * (len(states) - count)]  # behind the text's end; no slot inside reads it
        forced = refined_by_hand(weights, states, base, padded[:-1])
        of_base = free = refined_by_hand(weights, states, base, [tokens[0], *base.argmax(axis=-1)[:-1]])
        for _ in range(2):
            free = refined_by_hand(weights, states, base, [tokens[0], *free.argmax(axis=-1)[:-1]])
        for share, logits in ((1.0, forced), (0.6, of_base), (0.3, free)):
            for index in range(count):
                p, q = softmax(truth[index]), softmax(logits[index])
                total += share * np.exp(-index / DECAY) * (-np.log(q[tokens[1 + index]]) + np.abs(p - q).sum() / 2)
        weight += sum(np.exp(-index / DECAY) for index in range(count))
    return total / weight


def slow_dblast(models, blocks):
    weights, total = weights_of(models), 0.0
    head = np.asarray(models.target.head.kernel[...], np.float64)
    for row, column in np.ndindex(2, 2):
        states, first, _, truth, tokens, count = block_of(models, blocks, row, column)
        prior, length, likelihood = softmax(first @ weights["latent_mixture/prior/kernel"]), 0.0, 0.0
        for z in range(4):
            shift = silu(states @ weights["latent_mixture/down/kernel"]) @ weights["latent_mixture/up/kernel"][:, z]
            reach, chance = 1.0, 1.0
            for index in range(count):
                p, q = softmax(truth[index]), softmax((states[index] + shift[index]) @ head)
                reach *= np.minimum(p, q).sum()
                chance *= q[tokens[1 + index]]
                length += prior[z] * reach
            likelihood += prior[z] * chance
        total += (-length - 0.1 * np.log(likelihood)) / len(states)
    return total / 4


SLOW = {"xpress": slow_xpress, "dblast": slow_dblast}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name.endswith(", published") else name for name in CONFIGS]
)
def test_a_loss_equals_a_loop_over_anchors_and_slots(family):
    models = pair(family)
    blocks, found = scored(models.drafter, models.target, jnp.float32(0.3), family=family)
    expected = SLOW[family](models, blocks) if family in SLOW else slow_loss(family, models, 0.3)
    assert float(found.loss) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW)
def test_the_blocks_that_are_trained_are_those_that_decoding_drafts(family):
    """Every round's greedy drafts are the likeliest tokens of the packed block at its anchor; a refiner's, behind themselves."""
    models, length = pair(family), 7
    prompt = np.random.default_rng(6).integers(61, size=(1, length)).astype(np.int32)
    config = DecodeConfig.dflash(cache_length=64, has_trace=True)
    alone = generate(models, prompt, [length], jax.random.key(1), config=config, max_new_tokens=LENGTH - length)
    count = int(alone.num_rounds)
    emitted = np.asarray(alone.info.num_emitted)[:count, 0]
    anchors = jnp.asarray(length + np.cumsum(emitted) - emitted, jnp.int32)[None]
    drafts = alone.info.trace.block_tokens[None, :count, 0, 0, 1:]
    text = jnp.concatenate([jnp.asarray(prompt), alone.tokens], axis=1)

    @jax.jit
    def likeliest(drafter, target):
        blocks = packed_blocks(drafter, target, text, anchors)
        logits = loss_of(family)(drafter, target, blocks, jnp.ones(drafts.shape), jnp.float32(0)).logits
        return jnp.argmax(refined_logits(drafter, blocks, drafts) if family == "xpress" else logits, axis=-1)

    assert count > 2
    np.testing.assert_array_equal(likeliest(models.drafter, models.target), drafts)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in CONFIGS if not name.startswith("dspark")])
def test_gradients_equal_differences_and_none_flows_into_the_target(family):
    models = pair(family)
    weights = checkpoint.leaves(models.drafter)
    rng = np.random.default_rng(0)
    toward = {path: jnp.asarray(rng.standard_normal(value.shape), jnp.float32) for path, value in weights.items()}
    size = np.sqrt(sum(float(jnp.sum(value**2)) for value in toward.values()))

    def along(step):
        moved = {path: value + step / size * toward[path] for path, value in weights.items()}
        return scored(checkpoint.with_leaves(models.drafter, moved), models.target, jnp.float32(0.3), family=family)[1].loss

    check_grads(along, (jnp.float32(0.0),), order=1, modes=["rev"], eps=3e-2, rtol=2e-2)

    def of_target(target):
        return scored(models.drafter, target, jnp.float32(0.3), family=family)[1].loss

    gradient = checkpoint.leaves(jax.grad(of_target)(models.target))
    assert not any(np.asarray(value).any() for path, value in gradient.items() if path.startswith("layers/"))


@pytest.mark.slow
def test_dspark_learns_its_confidence_from_the_overlap_and_not_the_other_way_round():
    models = pair("dspark")
    weights = checkpoint.leaves(models.drafter)

    def loss(confidence):
        mine = {**weights, "confidence/output/kernel": confidence}
        return scored(checkpoint.with_leaves(models.drafter, mine), models.target, jnp.float32(0.3), family="dspark")[1].loss

    kernel = weights["confidence/output/kernel"]
    assert np.abs(jax.grad(loss)(kernel)).max() > 0
    check_grads(loss, (kernel,), order=1, modes=["rev"], eps=3e-2, rtol=2e-2)
    blocks, _ = scored(models.drafter, models.target, jnp.float32(0.3), family="dspark")

    def of_logits(logits):
        weights = slot_weights(blocks.is_inside, decay=DECAY)
        return FAMILIES["dspark"].loss(models.drafter, models.target, blocks._replace(logits=logits), weights, jnp.float32(0.3)).loss

    def without_confidence(logits):
        weights = slot_weights(blocks.is_inside, decay=DECAY)
        corrections = FAMILIES["dspark"].loss(models.drafter, models.target, blocks, weights, jnp.float32(0.3)).logits - blocks.logits
        truth = blocks.target_logits
        each = 0.1 * cross_entropy(logits + corrections, blocks.tokens[:, :, 1:]) + 1.8 * total_variation(logits + corrections, truth)
        return weighted_mean(each, weights)

    check_grads(without_confidence, (blocks.logits,), order=1, modes=["rev"], eps=1e-2, rtol=3e-2)
    np.testing.assert_allclose(jax.grad(of_logits)(blocks.logits), jax.grad(without_confidence)(blocks.logits), atol=1e-7)


@functools.cache
def chain():
    target = tiny_llama_config()
    return random_models(target, tiny_drafter_config(target), seed=3)


@functools.cache
def recorded(temperature=0.0):
    models = chain()
    starts = np.asarray([3, 6, 4])
    prompts = np.random.default_rng(4).integers(61, size=(3, 40)).astype(np.int32)
    return record_blocks(models, prompts, starts, temperature=temperature, key=jax.random.key(5)), starts


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_recorded_blocks_are_the_rounds_of_the_plain_chain(temperature):
    models = chain()
    found, starts = recorded(temperature)
    keys = row_keys(jax.random.key(5), 3)
    for row, start in enumerate(starts.tolist()):
        prompt = found.tokens[row : row + 1, :start]
        config = DecodeConfig.dflash(cache_length=64, has_trace=True)
        request = dict(sampling=make_sampling(1, temperature=temperature), max_new_tokens=40 - start)
        alone = generate(models, prompt, [start], keys[row : row + 1], config=config, **request)
        assert found.tokens[row, start:].tolist() == alone.tokens[0].tolist()
        count = int(alone.num_rounds)
        assert found.num_blocks[row] == count
        for place, proposal, accepted in zip(found.anchors[row], found.proposals[row], found.num_accepted[row], strict=True):
            behind = found.tokens[row, place + 1 :].tolist()
            assert behind[:accepted] == proposal[: min(accepted, len(behind))].tolist()  # a budget may cut accepted drafts
            assert accepted >= min(len(behind), 6) or behind[accepted] != proposal[accepted]
        emitted = np.asarray(alone.info.num_emitted)[:count, 0]
        assert found.anchors[row, :count].tolist() == (start + np.cumsum(emitted) - emitted).tolist()
        np.testing.assert_array_equal(found.proposals[row, :count], alone.info.trace.block_tokens[:count, 0, 0, 1:])
        np.testing.assert_array_equal(found.num_accepted[row, :count], alone.info.num_accepted[:count, 0])


@pytest.mark.slow
def test_the_target_scores_each_proposal_behind_the_text_and_the_proposals_before_it():
    target = chain().target
    found, _ = recorded()
    anchors, proposals = found.anchors[:, :3], found.proposals[:, :3]
    logits = jax.jit(proposed_logits)(target, jnp.asarray(found.tokens), jnp.asarray(anchors), jnp.asarray(proposals))
    for row in range(3):
        for column in range(3):
            text = [*found.tokens[row, : anchors[row, column] + 1].tolist(), *proposals[row, column].tolist()]
            tokens = jnp.asarray([text + [0] * (64 - len(text))], jnp.int32)
            output = jax.jit(target)(tokens, jnp.arange(64, dtype=jnp.int32)[None], prompt_mask(64))
            expected = target.logits(output.states)[0, anchors[row, column] : len(text) - 1]
            np.testing.assert_allclose(logits[row, column], expected, atol=2e-5)


@pytest.mark.slow
def test_draft_opd_divides_its_loss_between_accepted_and_discarded_drafts():
    models = chain()
    found, _ = recorded()
    rng = np.random.default_rng(2)
    anchors, proposals = jnp.asarray(found.anchors[:, :3]), jnp.asarray(found.proposals[:, :3])
    accepted = rng.integers(0, 7, size=(3, 3))
    tokens = jnp.asarray(found.tokens)
    blocks = packed_blocks(models.drafter, models.target, tokens, anchors)
    logits = proposed_logits(models.target, tokens, anchors, proposals)
    blocks = blocks._replace(proposed=Proposed(proposals, jnp.asarray(accepted, jnp.int32), logits))
    weights = slot_weights(blocks.is_inside, decay=DECAY)
    loss = FAMILIES["draft-opd"].loss(models.drafter, models.target, blocks, weights, jnp.float32(0.3)).loss
    prefixes = FAMILIES["draft-opd-prefixes"].loss(models.drafter, models.target, blocks, weights, jnp.float32(0.3)).loss
    sums, reached = np.zeros((2, 2)), np.zeros(2)
    for row in range(3):
        for column in range(3):
            for index in range(6):
                if found.anchors[row, column] + 1 + index >= 40:
                    continue
                p, q = (softmax(np.asarray(x[row, column, index], np.float64)) for x in (logits, blocks.logits))
                if index <= accepted[row, column]:
                    reached += (p * np.log(p / q)).sum(), 1
                if index < accepted[row, column]:
                    sums[0] += (p * np.log(p / q)).sum(), 1
                else:
                    weight = np.exp(-index / DECAY)
                    sums[1] += weight * (q * np.log(q / p)).sum(), weight
    assert float(loss) == pytest.approx((sums[0, 0] / sums[0, 1] + sums[1, 0] / sums[1, 1]) / 2, rel=2e-5)
    assert float(prefixes) == pytest.approx(reached[0] / reached[1], rel=2e-5)
    check_grads(
        lambda logits: (
            FAMILIES["draft-opd"].loss(models.drafter, models.target, blocks._replace(logits=logits), weights, jnp.float32(0)).loss
        ),
        (blocks.logits,),
        order=1,
        modes=["rev"],
        eps=1e-2,
        rtol=2e-2,
    )
