"""Rounds picked by cost: the pick against arithmetic by hand, generations that change between arms, profiles that are refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handmade import CHAIN, MERGED, PLAIN, arm, made_profile, schedule
from lossless import expect_equal, mixed_sampling, situation
from situations import BLOCK, CACHE_LENGTH, prompts

from reanchor_jax import DecodeConfig, acceptance_lengths, make_sampling, prefill, step, summarize
from reanchor_jax.bench import passes, profiles
from reanchor_jax.bench.profiles import ProfileConfig, measure_profile, profile_key, read_profile, write_profile
from reanchor_jax.decoding.config import Arm
from reanchor_jax.decoding.rounds import _read_backlog, run_round
from reanchor_jax.decoding.schedule import Acceptance, count, init_acceptance, pick_arm


def pick(found, *, acceptance=None, temperature=(0.0,), lengths=10, remaining=99, num_retained=1, num_unread=0, is_running=True):
    rows = len(temperature)

    def each(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    return int(
        pick_arm(
            found,
            init_acceptance(rows) if acceptance is None else acceptance,
            temperature=each(temperature, jnp.float32),
            lengths=each(lengths, jnp.int32),
            remaining=each(remaining, jnp.int32),
            num_retained=each(num_retained, jnp.int32),
            num_unread=each(num_unread, jnp.int32),
            num_places=9,
            is_running=each(is_running, bool),
        )
    )


def seen(accepted, promised):
    return Acceptance(accepted=jnp.asarray(accepted, jnp.float32), promised=jnp.asarray(promised, jnp.float32))


MUCH = seen([4e6], [4e6])  # so much of what was promised that neither the prior nor hope counts


def test_the_arm_of_most_tokens_a_second_is_picked():
    # plain 1 a second, chain 3 / 2 = 1.5, merged 5 / 4 = 1.25
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (3.0, 1.5)), arm(MERGED, 4.0, (5.0, 2.0)))
    assert pick(found, acceptance=MUCH) == 1
    # at temperature 1: 1, 0.75, 0.5; at 0.5 the chain brings (3 + 1.5) / 2 = 2.25 in 2 seconds
    assert pick(found, acceptance=MUCH, temperature=(1.0,)) == 0
    assert pick(found, acceptance=MUCH, temperature=(0.5,)) == 1
    assert pick(found, acceptance=MUCH, temperature=(7.0,)) == 0


def test_what_a_row_accepted_of_late_moves_the_pick():
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (3.0, 1.5)), arm(MERGED, 4.0, (5.0, 2.0)))
    assert pick(found, acceptance=seen([1e6], [4e6])) == 0  # a quarter of the drafts: 1, 1.5 / 2, 2 / 4
    assert pick(found, acceptance=seen([8e6], [4e6])) == 1  # twice: 1, 5 / 2, 9 / 4
    assert pick(found, acceptance=seen([0.0], [1e6])) == 0


def test_rows_are_added_up_and_finished_ones_left_out():
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (3.0, 3.0)))
    both = seen([0.4e6, 2e6], [1e6, 1e6])  # rates of 1.8 / 2 and 5 / 2
    assert pick(found, acceptance=both, temperature=(0.0, 0.0)) == 1
    assert pick(found, acceptance=both, temperature=(0.0, 0.0), is_running=(True, False)) == 0
    assert pick(found, acceptance=both, temperature=(0.0, 0.0), is_running=(False, True)) == 1


def test_nobody_drafts_more_than_is_left():
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 3.0, (4.0, 4.0)))
    assert pick(found, acceptance=MUCH, remaining=3) == 0  # 1 against min(4, 3) / 3: the first of equals
    assert pick(found, acceptance=MUCH, remaining=4) == 1


def test_costs_follow_the_context_and_whether_a_row_samples():
    found = schedule(
        arm(PLAIN, (1.0, 5.0), sampled=(1.0, 1.0)), arm(CHAIN, (2.0, 2.0), (2.5, 2.5), sampled=(9.0, 9.0)), contexts=(100, 500)
    )
    assert pick(found, acceptance=MUCH, lengths=500) == 1
    assert pick(found, acceptance=MUCH, lengths=100) == 1  # 1 against 1.25
    assert pick(found, acceptance=MUCH, lengths=500, temperature=(0.5,)) == 0
    close = schedule(arm(PLAIN, (1.0, 3.0)), arm(CHAIN, (3.0, 3.0), (2.0, 2.0)), contexts=(100, 500))
    # plain decoding passes 1.5 seconds, two thirds of a token in one, at 200 tokens
    assert pick(close, acceptance=MUCH, lengths=190) == pick(close, acceptance=MUCH, lengths=0) == 0
    assert pick(close, acceptance=MUCH, lengths=210) == pick(close, acceptance=MUCH, lengths=5000) == 1


def test_shifted_blocks_are_not_drafted_from_nothing():
    found = schedule(arm(CHAIN, 2.0, (2.0, 2.0)), arm(MERGED, 2.0, (5.0, 5.0)))
    assert pick(found, acceptance=MUCH) == 1
    assert pick(found, acceptance=MUCH, num_retained=0) == 0


def test_reading_what_was_decoded_plainly_is_paid_by_the_arms_that_draft():
    """2.4 tokens in 2 seconds; every 9 tokens to read take another round's 2 seconds, a tenth of them now."""
    found = schedule(arm(PLAIN, 1.1), arm(CHAIN, 2.0, (2.4, 2.4)))
    assert pick(found, acceptance=MUCH, num_unread=27) == 1  # 2.4 / 2.6 against 0.909
    assert pick(found, acceptance=MUCH, num_unread=28) == 0  # 2.4 / 2.8
    both = seen([4e6, 4e6], [4e6, 4e6])
    assert pick(found, acceptance=both, temperature=(0.0, 0.0), num_unread=(28, 0), is_running=(False, True)) == 1
    # however much there is to read, a round pays for one pass: 5 / 4 against 0.909, where many rounds are left
    good = schedule(arm(PLAIN, 1.1), arm(CHAIN, 2.0, (5.0, 5.0)))
    assert pick(good, acceptance=MUCH, num_unread=9000, remaining=10000) == 1


def test_what_is_left_pays_for_what_comes_first():
    good = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (5.0, 5.0)))
    # 14 passes of 2 seconds and rounds of 2 seconds: 30 for 5 tokens; over 10 rounds 48 for 50, over 12 rounds 52 for 60
    assert [pick(good, acceptance=MUCH, num_unread=126, remaining=left) for left in (5, 50, 60)] == [0, 1, 1]
    assert pick(good, acceptance=MUCH, num_unread=126, remaining=25) == 0
    led = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (1.5, 1.5)), arm(MERGED, 2.0, (4.0, 4.0)))
    assert pick(led, acceptance=MUCH, num_retained=0, remaining=3) == 0  # two rounds, 4 seconds
    assert pick(led, acceptance=MUCH, num_retained=0, remaining=30) == 1


def test_a_generation_begins_with_hope_and_gives_up_what_does_not_pay():
    """Spread 0.3 hopes for 1.3 times the drafts: 1 + 1.3 x 2 = 3.6 in 3.5 seconds against 1 a second."""
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 3.5, (3.0, 3.0)))
    state = init_acceptance(1)
    assert pick(found, acceptance=state) == 1
    lasted = 0
    while pick(found, acceptance=state) == 1:
        state = count(
            state, num_accepted=jnp.asarray([1]), promised=jnp.asarray([2.0]), num_plain=jnp.asarray([0]), is_running=jnp.asarray([True])
        )
        lasted += 1
    assert lasted == 1


def test_what_was_given_up_is_tried_again_when_the_counts_have_faded_and_hope_pays_for_reading():
    """Spread 0.5 hopes for 4.75 tokens, in 2 seconds for the round and 2 for reading; it is given up below 0.4 x 2.5 drafts."""
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (3.5, 3.5)), spread=0.5)
    state, picks, num_unread = init_acceptance(1), [], 0
    for _ in range(200):
        picks.append(pick(found, acceptance=state, num_unread=num_unread, remaining=9999))
        is_plain = picks[-1] == 0
        num_unread = num_unread + 9 if is_plain else 0
        state = count(
            state,
            num_accepted=jnp.asarray([0]),
            promised=jnp.asarray([2.5]),
            num_plain=jnp.asarray([9 if is_plain else 0]),
            is_running=jnp.asarray([True]),
        )
    given_up = picks.index(0)
    again = given_up + picks[given_up:].index(1)
    assert 2 < given_up < 10
    assert 100 < 9 * (again - given_up) < 1500


def test_counts_fade_and_finished_rows_keep_theirs():
    after = count(
        seen([10.0, 10.0, 10.0], [20.0, 20.0, 20.0]),
        num_accepted=jnp.asarray([4, 4, 0]),
        promised=jnp.asarray([3.0, 3.0, 3.0]),
        num_plain=jnp.asarray([0, 0, 7]),
        is_running=jnp.asarray([True, False, True]),
    )
    np.testing.assert_allclose(after.accepted, [13, 10, 10 * 0.997**7], rtol=1e-6)
    np.testing.assert_allclose(after.promised, [21, 20, 20 * 0.997**7], rtol=1e-6)


def test_a_chain_is_drafted_for_the_states_that_shifted_blocks_need():
    """Nothing is retained behind plain tokens, and the merged tree pays where the chain by itself does not."""
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (1.5, 1.5)), arm(MERGED, 2.0, (4.0, 4.0)))
    assert pick(found, acceptance=MUCH) == 2
    assert pick(found, acceptance=MUCH, num_retained=0) == 1
    # ten rounds: (1.5 + 9 x 2.2) tokens in 20 seconds are more than one a second, (1.5 + 9 x 2.05) fewer
    assert pick(schedule(*found.arms[:2], arm(MERGED, 2.0, (2.2, 2.2))), acceptance=MUCH, num_retained=0) == 1
    assert pick(schedule(*found.arms[:2], arm(MERGED, 2.0, (2.05, 2.05))), acceptance=MUCH, num_retained=0) == 0
    # and a chain that is the best by itself is worth no less because a tree is near
    best = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.0, (2.4, 2.4)), arm(MERGED, 9.0, (4.0, 4.0)))
    assert pick(best, acceptance=MUCH, num_retained=0) == 1


def cheap_in_turn(order=(PLAIN, CHAIN, MERGED), stretch=6):
    """Every arm is worth a token; which is cheap changes with the context, every few tokens, so that every generation takes them all."""
    contexts = tuple(range(CACHE_LENGTH))
    costs = [tuple(1.0 if context // stretch % 3 == turn else 9.0 for context in contexts) for turn in range(3)]
    return schedule(*(arm(kind, cost) for kind, cost in zip(order, costs, strict=True)), contexts=contexts)


IN_TURN = cheap_in_turn()


@pytest.mark.parametrize(
    ("name", "draft_choice"),
    [
        ("random", "argmax"),
        pytest.param("flat", "coupled", marks=pytest.mark.slow),
        pytest.param("often_right", "coupled", marks=pytest.mark.slow),
        pytest.param("often_right", "argmax", marks=pytest.mark.slow),
        pytest.param("random", "independent", marks=pytest.mark.slow),
    ],
)
def test_scheduled_generations_equal_plain_ones(name, draft_choice):
    config = DecodeConfig.scheduled(IN_TURN, draft_choice=draft_choice, cache_length=CACHE_LENGTH)
    got = expect_equal(situation(name), config, sampling=mixed_sampling())
    rounds = int(got.num_rounds)
    is_plain = np.asarray(got.info.num_plain)[:rounds].max(axis=1) > 0
    is_merged = ~is_plain & (np.asarray(got.info.num_nodes)[:rounds].max(axis=1) > BLOCK)
    assert is_plain.any()
    assert is_merged.any()
    assert (~is_plain & ~is_merged).any()
    assert not is_plain[np.argmax(is_plain) :].all()  # drafts follow plain tokens, for which the drafter reads what it missed


def test_a_drafter_that_is_never_right_is_given_up_and_one_that_is_goes_on():
    found = schedule(arm(PLAIN, 1.0), arm(CHAIN, 2.5, (3.0, 3.0)))
    config = DecodeConfig.scheduled(found, cache_length=CACHE_LENGTH)
    shares = []
    for name in ("always_wrong", "often_right"):
        got = expect_equal(situation(name), config, sampling=make_sampling(5))
        num_plain = np.asarray(got.info.num_plain)[: int(got.num_rounds)]
        assert not num_plain[0].any()
        shares.append(num_plain.sum() / np.asarray(got.info.num_emitted).sum())
    assert shares[0] > 0.7
    assert shares[1] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma4", "dspark"])
def test_scheduled_generations_of_other_families_equal_plain_ones(family):
    expect_equal(situation("random", family), DecodeConfig.scheduled(IN_TURN, cache_length=CACHE_LENGTH))


@pytest.mark.slow
def test_drafts_after_plain_tokens_are_those_of_a_drafter_that_read_them():
    """Reading the backlog brings the drafter's context to what it is where every token was drafted."""
    models, places = situation("random"), 2 * BLOCK - 1
    chain = arm(CHAIN, 1.0)
    both = schedule(arm(PLAIN, 1.0), chain)  # the first of equals is plain
    config = DecodeConfig.scheduled(both, cache_length=CACHE_LENGTH).resolve(BLOCK)
    tokens, lengths = prompts(3, seed=1)
    start, _ = jax.jit(prefill, static_argnames=("config", "max_new_tokens"))(
        models, tokens, lengths, jax.random.key(0), config=config, max_new_tokens=40
    )
    run = jax.jit(run_round, static_argnames="config")
    missed = start
    for _ in range(2):
        missed, _, info = run(models, missed, config=config)
        assert (np.asarray(info.num_plain) == places).all()
    assert (np.asarray(missed.lengths - missed.backlog.num_read) == 2 * places).all()
    read = jax.jit(_read_backlog, static_argnames="num_places")(*models, missed, jnp.bool_(True), num_places=places)
    assert (np.asarray(read.backlog.num_read) == np.asarray(read.lengths)).all()
    # chain rounds from the same start to the same length
    only = dataclasses.replace(config, schedule=dataclasses.replace(both, arms=(chain,)))
    drafted = start._replace(remaining=jnp.full_like(start.remaining, 2 * places))
    while (np.asarray(drafted.finish) == 0).any():
        drafted, _, info = run(models, drafted, config=only)
        assert not np.asarray(info.num_offsets).any()  # states are retained, and a chain drafts from none of them
    assert (np.asarray(drafted.lengths) == np.asarray(read.lengths)).all()
    for mine, theirs in zip(read.drafter_cache, drafted.drafter_cache, strict=True):
        for row, length in enumerate(np.asarray(read.lengths).tolist()):
            np.testing.assert_allclose(mine[row, :, :length], theirs[row, :, :length], atol=1e-4)


def test_plain_tokens_of_a_round_count_as_target_passes():
    config = DecodeConfig.scheduled(schedule(arm(PLAIN, 1.0), arm(CHAIN, 99.0, (2.0, 2.0))), cache_length=CACHE_LENGTH)
    got = expect_equal(situation("random"), config)
    rounds = int(got.num_rounds)
    info = jax.tree.map(lambda field: np.asarray(field)[:rounds], got.info)
    assert info.num_plain.max() > 1
    np.testing.assert_array_equal(info.num_plain, info.num_emitted)
    assert not info.num_offsets.any()
    summary = summarize([info], block_size=BLOCK)
    assert (summary.tau, summary.tau_pooled, summary.plain_rate, summary.mean_nodes) == (1, 1, 1, 1)
    assert summary.target_passes == int(np.asarray(got.lengths).sum()) - 5
    assert summary.histogram[0] == summary.target_passes
    assert acceptance_lengths(info, 0) == [1] * (int(got.lengths[0]) - 1)


def test_a_state_made_for_a_schedule_is_not_stepped_without_one():
    models = situation("random")
    config = DecodeConfig.scheduled(IN_TURN, cache_length=CACHE_LENGTH)
    without = dataclasses.replace(config, schedule=None)
    for made, other in ((config, without), (without, config)):
        begun = functools.partial(prefill, models, *prompts(3, seed=1), jax.random.key(0), config=made, max_new_tokens=9)
        state, _ = jax.eval_shape(begun)
        with pytest.raises(ValueError, match="prefilled with a schedule and this config has none, or the reverse"):
            step(models, state, config=other)


def test_a_schedule_that_never_drafts_keeps_no_context_for_the_drafter():
    config = DecodeConfig.scheduled(schedule(arm(PLAIN, 1.0)), cache_length=CACHE_LENGTH)
    assert config.resolve(BLOCK) == config.resolve(BLOCK).resolve(BLOCK) == DecodeConfig.autoregressive(cache_length=CACHE_LENGTH)
    expect_equal(situation("random"), config)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: schedule(), "at least one Arm"),
        (lambda: schedule(arm(CHAIN, 1.0), arm(CHAIN, 2.0)), "arms must differ"),
        (lambda: schedule(arm(PLAIN, 1.0), arm(MERGED, 2.0)), "one of a single block"),
        (lambda: schedule(arm(PLAIN, 1.0), contexts=(5, 5)), "strictly rising"),
        (lambda: schedule(arm(PLAIN, 1.0), contexts=(5, 9)), "each of the 2 contexts"),
        (lambda: schedule(arm(PLAIN, 1.0), contexts=(10**400,)), "strictly rising"),
        (lambda: schedule(arm(PLAIN, 1.0), spread=float("nan")), "spread must lie"),
        (lambda: schedule(arm(PLAIN, 1.0), spread=1e-25), "spread must lie"),
        (lambda: Arm(**PLAIN, seconds=5, tokens=(1.0, 1.0)), "two tuples of positive numbers"),
        (lambda: Arm(**PLAIN, seconds=[[1.0], [1.0]], tokens=(1.0, 1.0)), "two tuples of positive numbers"),
        (lambda: Arm(**PLAIN, seconds=((1.0,), 2.0), tokens=(1.0, 1.0)), "two tuples of positive numbers"),
        (lambda: Arm(**PLAIN, seconds=((1.0,), (1.0,)), tokens=1.0), "two numbers of at least 1"),
        (lambda: arm({"num_blocks": 1, "num_nodes": 5, "is_chain": "no"}, 1.0), "is_chain of an arm"),
        (lambda: ProfileConfig(rows=3), "strictly rising"),
        (lambda: made_profile(rows=(1, 5, 9)), "for each of the 3 numbers of rows"),
        (lambda: made_profile(arms=()), "for each of the 2 numbers of rows"),
        (lambda: made_profile(spread=None), "spread must lie in"),
        (lambda: made_profile(rows=(1,), arms=((arm(PLAIN, (1.0, 1.0)),),)), "the chain among them"),
        (lambda: made_profile().schedule(10**400), "num_rows must be"),
        (lambda: arm({**PLAIN, "is_chain": "x"}, 1.0), "is_chain of an arm"),
        (lambda: made_profile().schedule(1, "hot"), "temperature must be a number"),
        (lambda: made_profile().schedule(1, float("nan")), "temperature must be a number"),
        (lambda: arm(PLAIN, 0.0), "positive numbers"),
        (lambda: arm(PLAIN, float("inf")), "positive numbers"),
        (lambda: arm(CHAIN, 1.0, (0.5, 1.0)), "at least 1"),
        (lambda: arm(PLAIN, 1.0, (1.0, 1.5)), r"tokens must be \(1, 1\)"),
        (lambda: arm({"num_blocks": -1, "num_nodes": 1}, 1.0), "num_blocks of an arm"),
        (lambda: arm({"num_blocks": 0, "num_nodes": 7}, 1.0), "num_nodes must be 1"),
        (lambda: arm({"num_blocks": 2, "num_nodes": 7, "is_chain": True}, 1.0), "a chain is one block"),
        (lambda: DecodeConfig.dflash(schedule=IN_TURN), "expand='merge'"),
        (lambda: DecodeConfig.reanchor_tree(schedule="fast"), "must be a Schedule"),
        (lambda: DecodeConfig.scheduled(IN_TURN, has_trace=True), "has no trace"),
        (lambda: DecodeConfig.scheduled(None), "a Profile makes one"),
        (lambda: DecodeConfig.scheduled(made_profile()), "a Profile makes one"),
        (lambda: DecodeConfig.scheduled(IN_TURN).resolve(BLOCK + 1), "does not fit blocks of 6"),
        (lambda: DecodeConfig.scheduled(IN_TURN, num_nodes=12).resolve(BLOCK), "does not fit"),
        (lambda: DecodeConfig.scheduled(IN_TURN, max_offsets=1).resolve(BLOCK), "does not fit"),
        (lambda: ProfileConfig(rows=(2, 1)), "strictly rising"),
        (lambda: ProfileConfig(num_examples=1), "at least 2"),
    ],
)
def test_what_cannot_be_is_refused(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()


def test_a_schedule_keeps_the_arms_that_are_somewhere_the_best():
    found = made_profile()
    kinds = [(one.num_blocks, one.is_chain) for one in found.schedule(1, 0.0).arms]
    assert kinds == [(0, False), (1, True), (3, False)]  # plain for hopeless texts, the chain where nothing was retained
    # at temperature 1 the chain would bring 1 + 1.2 x 0.2 = 1.24 in 2 seconds at best
    assert [one.num_blocks for one in found.schedule(1, 1.0).arms] == [0]
    assert len(found.schedule(1).arms) == 3
    # one that is the best at neither end: rates at 0, 0.5 and 1 of 4, 2.5, 1 and 3, 2.75, 2.5 and 1.2, 2, 2.8
    between = (arm(PLAIN, 9.0), arm(CHAIN, 1.0, (4.0, 1.0)), arm(MERGED, 1.0, (3.0, 2.5)), arm({**MERGED, "num_nodes": 9}, 1.0, (1.2, 2.8)))
    found = made_profile(rows=(1,), contexts=(10,), arms=(between,), spread=0.01)
    assert arm(MERGED, 1.0, (3.0, 2.5)) in found.schedule(1).arms
    # one that is the best between the contexts, and at neither: rates at 10, 30 and 50 of 1.5, 0.75, 0.5 and 0.5, 0.75, 1.5 and 1.2
    crossing = (
        arm(PLAIN, (9.0, 9.0)),
        arm(CHAIN, (2.0, 6.0), (3.0, 3.0)),
        arm({"num_blocks": 1, "num_nodes": 7}, (6.0, 2.0), (3.0, 3.0)),
        arm(MERGED, (2.5, 2.5), (3.0, 3.0)),
    )
    found = made_profile(rows=(1,), contexts=(10, 50), arms=(crossing,), spread=0.01)
    assert MERGED["num_nodes"] in [one.num_nodes for one in found.schedule(1).arms]
    # a cheap tree of one block that leads to the merged one, though the chain and plain decoding bring more by themselves
    leading = (
        arm(PLAIN, 1.0),
        arm(CHAIN, 6.0, (2.0, 2.0)),
        arm({"num_blocks": 1, "num_nodes": 7}, 3.0, (2.0, 2.0)),
        arm(MERGED, 2.0, (3.0, 3.0)),
    )
    found = made_profile(rows=(1,), contexts=(10,), arms=(leading,), spread=0.01)
    assert 7 in [one.num_nodes for one in found.schedule(1).arms]


def test_seconds_are_interpolated_between_numbers_of_rows():
    found = made_profile()
    assert found.schedule(1).arms[0].seconds[0] == (1.0, 2.0)
    assert found.schedule(2).arms[0].seconds[0] == (1.5, 3.0)
    assert found.schedule(5).arms[0].seconds[0] == (3.0, 6.0)
    assert found.schedule(9).arms[0].seconds[0] == (5.0, 10.0)
    with pytest.raises(ValueError, match="num_rows must be"):
        found.schedule(0)
    single = made_profile(rows=(4,), arms=found.arms[:1])
    assert single.schedule(1).arms[0].seconds == single.schedule(9).arms[0].seconds == ((1.0, 2.0), (1.0, 2.0))


@functools.cache
def measured():
    texts = [[5, 9, 3], [7, 1, 2, 8], [4, 4]]
    config = ProfileConfig(rows=(2,), contexts=(40, 60), nodes=(BLOCK,), num_examples=3)
    return measure_profile(situation("often_right"), texts, config=config, show_progress=False)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(profiles, "_NEW_TOKENS", 20)
    monkeypatch.setattr(passes, "REPEATS", 2)


@pytest.mark.usefixtures("quick")
@pytest.mark.slow  # the command line measures one in the quick suite
def test_a_measured_profile_comes_back_from_its_file(tmp_path):
    found = measured()
    write_profile(tmp_path / "profile.json", found)
    assert read_profile(tmp_path / "profile.json", situation("often_right")) == found
    assert [(one.num_blocks, one.num_nodes) for one in found.arms[0]] == [(0, 1), (1, BLOCK), (1, BLOCK)]
    assert found.arms[0][0].tokens == (1.0, 1.0)  # plain decoding brings a token a pass
    assert found.arms[0][1].tokens[0] > 1.5  # often right
    assert found.contexts == (40, 60)
    DecodeConfig.scheduled(found.schedule(5), cache_length=CACHE_LENGTH).resolve(BLOCK)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"key": {"device": "another"}}, "device another"),
        ({"key": {"dtype": "bfloat16"}}, "measured with dtype bfloat16, here it is float32"),
        ({"key": {"versions": {"jax": "0.1"}}}, "measured with versions"),
        ({"format": 99}, "format is 99"),
        ({"arms": []}, "for each of the 1 numbers of rows"),
        ({"spread": "wide"}, "spread must be a number; got 'wide'; measure"),
        ({"spread": 0.0}, r"spread must lie in .*; got 0\.0; measure"),
        ({"rows": [1, "2"]}, "whole numbers"),
        ({"contexts": None}, "contexts must be a list; got None"),
        ({"format": True}, "format is True"),
        ({"arms": 3}, "arms must be a list; got 3"),
        ({"arms": [3]}, "arms must be lists"),
        ({"arms": [[{"num_blocks": 1}]]}, "objects of is_chain, num_blocks"),
        ({"chain": {"num_nodes": 99}}, "does not fit blocks of 5"),
        ({"chain": {"seconds": 3}}, "arm 1: seconds of an arm must be two tuples of positive numbers"),
        ({"chain": {"tokens": [1, [2]]}}, "two numbers of at least 1"),
    ],
)
def test_a_profile_that_does_not_hold_here_is_refused(tmp_path, change, rule):
    write_profile(tmp_path / "profile.json", measured())
    found = json.loads((tmp_path / "profile.json").read_text())
    if "key" in change:
        change = {"key": found["key"] | change["key"]}
    if "chain" in change:
        change = {"arms": [[one | (change["chain"] if one["is_chain"] else {}) for one in arms] for arms in found["arms"]]}
    (tmp_path / "profile.json").write_text(json.dumps(found | change))
    with pytest.raises(ValueError, match=rule):
        read_profile(tmp_path / "profile.json", situation("often_right"))


@pytest.mark.usefixtures("quick")
def test_a_profile_of_another_pair_or_dtype_is_refused(tmp_path):
    write_profile(tmp_path / "profile.json", measured())
    with pytest.raises(ValueError, match="measured with models"):
        read_profile(tmp_path / "profile.json", situation("random", "qwen3"))
    with pytest.raises(FileNotFoundError, match="reanchor-jax profile"):
        read_profile(tmp_path / "none.json", situation("random"))
    with pytest.raises(IsADirectoryError, match="is a directory"):
        read_profile(tmp_path, situation("random"))
    with pytest.raises(ValueError, match="have no drafter"):
        read_profile(tmp_path / "profile.json", situation("random")._replace(drafter=None))
    (tmp_path / "cut.json").write_text((tmp_path / "profile.json").read_text()[:50])
    with pytest.raises(ValueError, match="not valid JSON"):
        read_profile(tmp_path / "cut.json", situation("random"))
    assert profile_key(situation("random"))["models"] == profile_key(situation("flat"))["models"]  # shapes, not weights


def test_a_profile_needs_a_drafter_and_prompts_that_fit():
    models = situation("random")
    with pytest.raises(ValueError, match="needs a drafter"):
        measure_profile(models._replace(drafter=None), [[1], [2]], config=ProfileConfig())
    with pytest.raises(ValueError, match="nodes must hold the drafter's blocks of 5 tokens; got"):
        measure_profile(models, [[1], [2]], config=ProfileConfig(nodes=(3, 4)))
    with pytest.raises(ValueError, match="at least 2 prompts"):
        measure_profile(models, [[1]], config=ProfileConfig())
    with pytest.raises(ValueError, match="must fit"):
        measure_profile(models, [[1], [2] * models.target.config.max_positions], config=ProfileConfig())
