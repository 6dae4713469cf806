"""Bench room: methods equal the library, figures are what they say, a difference is reported and not hidden."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_models

from reanchor_jax.bench import compare as comparison
from reanchor_jax.bench import tables
from reanchor_jax.bench.compare import BASELINE, Run, compare, paired_gain, results, top2_margin, write_run
from reanchor_jax.bench.measure import _sums_of_bits, measure
from reanchor_jax.bench.methods import METHODS, ROUND_FIELDS, Outcome, Request, begin, method_config, outcomes, run_rounds, stream
from reanchor_jax.decoding.config import RETAIN_POLICIES, Arm, Schedule
from reanchor_jax.decoding.loop import autoregress
from reanchor_jax.decoding.sampling import make_sampling
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.text import Prompt

_PROMPTS = [[3, 5, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [59]]


@pytest.fixture(scope="module")
def models():
    return tiny_models(2)


@pytest.fixture(scope="module")
def sampled(models):
    """Runs of three methods at temperature 0.9, and the Request."""
    request = Request(max_new_tokens=13, temperature=0.9, top_p=0.95, seed=5, batch_size=2)
    configs = {name: method_config(name, models, _PROMPTS, request=request) for name in (BASELINE, "dflash", "reanchor")}
    configs["reanchor"] = replace(configs["reanchor"], block_buckets=(7,), node_buckets=(49,))  # one size: less to compile
    return request, configs, compare(models, _PROMPTS, configs, request=request, show_progress=False)


def _outcome(num_emitted, num_accepted, tokens=None) -> Outcome:
    count = len(num_emitted)
    rounds = {name: [0] * count for name in ("num_offsets", "num_attached", "num_dropped", "num_plain", "is_shifted")}
    rounds |= {"num_emitted": num_emitted, "num_accepted": num_accepted, "num_nodes": [7] * count}
    return Outcome(tokens=tokens or list(range(1 + sum(num_emitted))), finish_reason="length", rounds=rounds)


def test_every_method_and_every_batch_equals_autoregress_with_the_prompt_s_own_key(models, sampled):
    request, _, runs = sampled
    assert [(run.method, run.first) for run in runs] == [(BASELINE, 0), ("dflash", 0), ("reanchor", 0)] + [
        ("dflash", 2),
        ("reanchor", 2),
        (BASELINE, 2),
    ]
    config = method_config(BASELINE, models, _PROMPTS, request=request)
    for index, prompt in enumerate(_PROMPTS):
        expected = autoregress(
            models,
            jnp.asarray([prompt], jnp.int32),
            jnp.asarray([len(prompt)], jnp.int32),
            jax.random.fold_in(jax.random.key(5), index)[None],
            config=config,
            sampling=make_sampling(1, temperature=0.9, top_p=0.95),
            max_new_tokens=13,
        )
        for run in runs:
            if run.first == index // 2 * 2:
                assert run.outcomes[index % 2].tokens == np.asarray(expected.tokens)[0].tolist(), (run.method, index)


def test_a_stream_grows_round_by_round_into_what_the_batch_gives(models):
    request = Request(max_new_tokens=11, stop_token_ids=(2, 4))
    config = method_config("dflash", models, _PROMPTS, request=request)
    seen = list(stream(models, _PROMPTS, 1, config=config, request=request))
    state, first = begin(models, _PROMPTS, [1], config=config, request=request)
    state, info = run_rounds(models, state, config=config, request=request)
    assert seen[-1] == outcomes(first, info, state, 1)[0]
    assert [outcome.finish_reason for outcome in seen[:-1]] == ["running"] * (len(seen) - 1)
    lengths = [len(outcome.tokens) for outcome in seen]
    assert lengths[0] == 1
    assert np.diff(lengths).tolist() == seen[-1].rounds["num_emitted"]


def test_figures_are_tokens_by_seconds_and_rounds(models):
    """By hand: autoregressive 8 tokens in 4 seconds, dflash the same 8 in 1 second by 2 + 3 rounds of one prompt each."""
    plain = [_outcome([1] * 5, [0] * 5), _outcome([1] * 3, [0] * 3)]
    fast = [_outcome([3, 2], [2, 6]), _outcome([1, 1, 1], [0, 0, 0])]
    runs = [
        Run("dflash", 1, 0.0, 9.0, 0.25, fast[1:]),
        Run(BASELINE, 0, 2.0, 1.0, 3.0, plain[:1]),
        Run("dflash", 0, 5.0, 1.5, 0.75, fast[:1]),
        Run(BASELINE, 1, 0.0, 1.0, 1.0, plain[1:]),
    ]
    figures = results(models, [[1], [2]], runs, request=Request(max_new_tokens=6))
    assert figures["methods"][BASELINE]["tokens_per_second"] == 2.0
    dflash = figures["methods"]["dflash"]
    assert dflash["tokens_per_second"] == 8.0
    assert figures["speedup"] == {BASELINE: 1.0, "dflash": 4.0}
    assert (dflash["prefill_seconds"], dflash["warmup_seconds"], dflash["target_passes"]) == (10.5, 5.0, 5)
    assert dflash["tau"] == pytest.approx((2.5 + 1.0) / 2)
    assert dflash["tau_pooled"] == pytest.approx(8 / 5)
    assert dflash["histogram"] == [3, 0, 1, 0, 0, 0, 1]
    assert dflash["ceiling_rate"] == pytest.approx(1 / 5)
    assert figures["identical"] is True


def test_the_gain_over_the_chain_is_paired_by_prompt():
    gain = paired_gain(np.array([3.0, 5.0, np.nan, 8.0]), np.array([2.0, 3.0, 4.0, 5.0]))
    assert gain == {"mean": pytest.approx(2.0), "standard_error": pytest.approx(1 / np.sqrt(3)), "relative": pytest.approx(0.6)}
    assert paired_gain(np.array([np.nan]), np.array([1.0])) is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_difference_is_reported_with_its_place_and_the_margin_there(models, temperature):
    request = Request(max_new_tokens=6, temperature=temperature, top_k=7, seed=3)
    prompts = [[9, 9], [4, 6, 5]]
    same = _outcome([1, 1, 1], [0, 0, 0], [7, 8, 11, 13])
    other = same._replace(tokens=[7, 8, 12, 13])
    runs = [Run(BASELINE, 0, 0.0, 1.0, 1.0, [same, same]), Run("dflash", 0, 0.0, 1.0, 1.0, [same, other])]
    figures = results(models, prompts, runs, request=request)
    assert figures["identical"] is False
    assert figures["methods"][BASELINE]["identical"] is True
    (found,) = figures["methods"]["dflash"]["divergences"]
    assert (found["prompt"], found["index"]) == (1, 2)
    # the oracle: logits of the whole prefix in one pass, divided and perturbed by hand
    prefix = [4, 6, 5, 7, 8]
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    scores = models.target.logits(models.target(jnp.asarray([prefix], jnp.int32), positions, prompt_mask(5)).states)[0, -1]
    if temperature:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 1), 5)
        kept = jnp.where(scores >= jnp.sort(scores)[-7], scores / temperature, -jnp.inf)
        scores = kept + jax.random.gumbel(key, scores.shape)
    first, second = np.sort(np.asarray(scores))[:-3:-1]
    assert found["margin"] == pytest.approx(float(first - second), abs=1e-4)
    assert "dflash, prompt 1: differs from autoregressive at token 2" in tables.divergence_lines(figures)[0]
    assert "NO, 1 differ" in tables.terminal_table(figures)


def test_the_margin_is_large_where_the_filters_leave_one_token(models):
    assert top2_margin(models, [3, 5], 0, request=Request(max_new_tokens=1, temperature=1.0, top_k=1)) > 1e30


def read_runs(file) -> list[Run]:
    return comparison.read_runs(file, num_prompts=3, batch_size=2)


def test_runs_survive_the_disk_and_a_line_cut_off(sampled, tmp_path):
    _, _, runs = sampled
    file = tmp_path / "runs.jsonl"
    assert read_runs(file) == []
    for run in runs:
        write_run(file, run)
    assert read_runs(file) == runs
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert read_runs(file) == runs[:-1]
    write_run(file, runs[-1])
    assert file.read_bytes() == whole
    file.write_bytes(whole + b"{}\n")
    with pytest.raises(ValueError, match="line 7 is not a run"):
        read_runs(file)


def _without(record, name):
    return {key: value for key, value in record.items() if key != name}


def _with_outcome(**changed):
    return lambda record: {**record, "outcomes": [{**record["outcomes"][0], **changed}]}


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda record: [record], "it must be an object of method, first"),
        (lambda record: _without(record, "first"), "it must be an object of method, first"),
        (lambda record: {**record, "more": 1}, "it must be an object of method, first"),
        (lambda record: {**record, "method": ["dflash"]}, "method must be a name"),
        *((lambda record, first=first: {**record, "first": first}, "first must be where a batch") for first in (-2, 1, 4, "2", 2.0, False)),
        *((lambda record, x=x: {**record, "decode_seconds": x}, "decode_seconds must be") for x in ("1", None, -1.0, True, float("nan"))),
        (lambda record: {**record, "outcomes": []}, "outcomes must be a list of 1, one a prompt"),
        (lambda record: {**record, "outcomes": {}}, "outcomes must be a list of 1, one a prompt"),
        (lambda record: {**record, "outcomes": [[]]}, "an outcome must hold tokens"),
        (_with_outcome(tokens=[]), "tokens must be one more than"),
        (_with_outcome(tokens=[1, "2", 3, 4]), "tokens must be ids"),
        (_with_outcome(tokens=[1, -2, 3, 4]), "tokens must be ids"),
        (_with_outcome(finish_reason=[]), "finish_reason must be a known one"),
        (_with_outcome(rounds={}), "rounds must be an object"),
        (_with_outcome(rounds=dict.fromkeys(ROUND_FIELDS, 3)), "rounds must hold lists of counts"),
        (_with_outcome(rounds={name: [1 << 40] for name in ROUND_FIELDS}), "rounds must hold lists of counts"),
        (_with_outcome(rounds={name: [1] * (1 + (name == "num_emitted")) for name in ROUND_FIELDS}), "must be equally long"),
    ],
)
def test_a_damaged_run_is_told_with_its_line_and_what_to_do(tmp_path, damage, rule):
    run = Run("dflash", 2, 0.0, 1.0, 1.0, [_outcome([2, 1], [1, 0])])
    file = tmp_path / "runs.jsonl"
    write_run(file, run._replace(method=BASELINE))
    write_run(file, run)
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{json.dumps(damage(json.loads(second)))}\n")
    before = file.read_bytes()
    with pytest.raises(ValueError, match=rf"runs.jsonl line 2 is not a run \(.*{rule}.*\); delete that line or choose another --out"):
        read_runs(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"\xff\x00\n", b"\xff\x00", b"[" * 100_000, b"\n", b"mine"])
def test_content_that_is_no_run_is_told_and_kept(tmp_path, content):
    file = tmp_path / "runs.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="line 1 is not a run"):
        read_runs(file)
    assert file.read_bytes() == content


def test_a_run_that_is_there_twice_is_told(sampled, tmp_path):
    for run in (*sampled[2], sampled[2][1]):
        write_run(tmp_path / "runs.jsonl", run)
    with pytest.raises(ValueError, match=r"line 7 is not a run \(it repeats the run of dflash at prompt 0\)"):
        read_runs(tmp_path / "runs.jsonl")


def test_runs_already_done_are_not_repeated(models, sampled):
    request, configs, runs = sampled
    new = []
    again = compare(models, _PROMPTS, configs, request=request, done=runs[:-1], on_run=new.append, show_progress=False)
    assert [(run.method, run.first) for run in new] == [(runs[-1].method, runs[-1].first)]
    assert [run.outcomes for run in again] == [run.outcomes for run in runs]


def test_names_of_methods_are_presets_and_policies(models):
    request = Request(max_new_tokens=2)
    configs = {name: method_config(name, models, _PROMPTS, request=request) for name in METHODS if name != "scheduled"}
    assert list(configs)[:3] == [BASELINE, "dflash", "reanchor"]
    assert configs["reanchor"].retain == "baseline"
    assert (configs["ddtree"].expand, configs["reanchor-tree"].expand) == ("marginal", "merge")
    policies = {name.removeprefix("reanchor-"): config.retain for name, config in configs.items() if name.startswith("reanchor-")}
    assert policies.pop("tree") == "suffix"
    assert all(name == retain for name, retain in policies.items())
    assert {config.retain for config in configs.values()} == set(RETAIN_POLICIES)


def test_the_scheduled_method_takes_its_arms_from_the_request(models):
    block = models.drafter.config.block_size
    arms = [Arm(num_blocks=0, num_nodes=1, seconds=((1.0,), (1.0,)), tokens=(1.0, 1.0))]
    arms.append(Arm(num_blocks=1, num_nodes=block, is_chain=True, seconds=((2.0,), (2.0,)), tokens=(3.0, 2.0)))
    schedule = Schedule(arms=tuple(arms), contexts=(0,), spread=0.3)
    assert method_config("scheduled", models, _PROMPTS, request=Request(max_new_tokens=2, schedule=schedule)).schedule == schedule
    with pytest.raises(ValueError, match="measure them with `reanchor-jax profile`"):
        method_config("scheduled", models, _PROMPTS, request=Request(max_new_tokens=2))
    with pytest.raises(ValueError, match="its profile holds what it may do"):
        method_config("scheduled:num_nodes=30", models, _PROMPTS, request=Request(max_new_tokens=2, schedule=schedule))


def test_a_methods_name_may_set_fields_of_its_config(models):
    request = Request(max_new_tokens=2, num_nodes=30, draft_choice="coupled")
    name = "reanchor:attach=random:is_second_tried=true:max_offsets=3"
    config = method_config(name, models, _PROMPTS, request=request)
    assert (config.attach, config.is_second_tried, config.max_offsets, config.num_nodes) == ("random", True, 3, 30)
    tree = method_config("reanchor-tree:num_nodes=20:reliability=0.25:draft_choice=argmax", models, _PROMPTS, request=request)
    assert (tree.num_nodes, tree.reliability, tree.draft_choice) == (20, 0.25, "argmax")
    assert method_config("dflash", models, _PROMPTS, request=request).num_nodes == 0


@pytest.mark.parametrize(
    ("name", "asked", "rule"),
    [
        ("eagle", {}, "unknown method 'eagle'; methods are autoregressive, dflash, reanchor"),
        ("reanchor:speed=9", {}, "sets 'speed'; options are retain, attach"),
        ("reanchor:num_nodes=many", {}, "num_nodes must be a whole number; got 'many'"),
        ("reanchor:num_nodes= 64", {}, "num_nodes must be a whole number; got ' 64'"),
        ("reanchor:num_nodes=99999", {}, r"method reanchor:num_nodes=99999: num_nodes must lie in 0..4096"),
        ("reanchor:num_nodes=64:num_nodes=32", {}, "sets an option twice"),
        ("reanchor-both:retain=suffix", {}, "sets an option twice"),
        ("reanchor-tree:expand=none", {}, "sets 'expand'; options are"),
        ("reanchor:reliability=0.5", {}, r"reliability \(0.5\) belongs to expand='merge'"),
        ("reanchor:", {}, "sets ''; options are"),
        ("", {}, "unknown method ''"),
        ("reanchor:is_second_tried=1", {}, "is_second_tried must be true or false; got '1'"),
        ("reanchor:attach=nearest", {}, "attach must be one of earliest"),
        ("autoregressive:num_nodes=9", {}, "plain decoding has no options; leave out num_nodes"),
        ("reanchor", {"num_nodes": 5}, r"num_nodes \(5\) must hold the baseline block of 7"),
        ("dflash", {"max_new_tokens": 502}, r"prompt 1 \(11 tokens\) \+ max_new_tokens \(502\) exceed the 512 positions"),
        ("dflash", {"cache_length": 64, "max_new_tokens": 54}, r"exceed cache_length \(64\)"),
    ],
)
def test_what_a_method_cannot_do_is_told(models, name, asked, rule):
    with pytest.raises(ValueError, match=rule):
        method_config(name, models, _PROMPTS, request=Request(**{"max_new_tokens": 3, **asked}))


def test_a_method_without_its_drafter_and_a_prompt_outside_the_vocabulary_are_told(models):
    request = Request(max_new_tokens=3)
    with pytest.raises(ValueError, match="dflash needs a drafter and there is none"):
        method_config("dflash", models._replace(drafter=None), _PROMPTS, request=request)
    with pytest.raises(ValueError, match=r"prompt 1 must hold .* 0\.\.60"):
        method_config("dflash", models, [[1], [61]], request=request)


def test_the_histogram_gathers_a_whole_block_and_more_in_its_last_line():
    figures = {"methods": {"dflash": {"histogram": [2, 1, 1]}, "reanchor": {"histogram": [1, 0, 0, 2, 1]}}}
    lines = tables.histograms(figures, ["dflash", "reanchor"], block_size=3, width=45).splitlines()
    assert lines == [
        "     dflash              reanchor",
        "  0  ████████     50.0%  ████         25.0%",
        "  1  ████         25.0%                0.0%",
        " 2+  ████         25.0%  ████████████ 75.0%",
    ]


@pytest.mark.parametrize("name", ["results.json", "tables.md", "runs.jsonl"])
def test_figures_that_cannot_be_written_are_told_before_anything_is_run(models, tmp_path, monkeypatch, name):
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: pytest.fail("something was run"))
    (tmp_path / name).mkdir()
    given = dict(request=Request(max_new_tokens=3), out=tmp_path, model_name="m", source="s")
    with pytest.raises(IsADirectoryError, match=name):
        measure(models, [Prompt(id="a", text=None, ids=[3, 5])], [BASELINE], **given)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_of_weights_see_a_change_a_swap_and_a_sign(dtype):
    leaf = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    swapped, changed, negated = leaf.copy(), leaf.copy(), leaf.copy()
    swapped[0, 1, 2], swapped[1, 2, 4] = leaf[1, 2, 4], leaf[0, 1, 2]
    changed[1, 0, 3] += 0.125
    negated[0, 0, 0] = -0.0
    alone = np.zeros((2, 3, 5), np.float32)
    alone[1, 0, 3] = 1.5
    leaves = {"a": leaf, "b": swapped, "c": changed, "d": negated, "e": alone}
    sums = _sums_of_bits({name: jnp.asarray(value, dtype) for name, value in leaves.items()})
    assert len({int(value) for value in sums.values()}) == 5
    bits = int(np.asarray(jnp.asarray(1.5, dtype)).view(np.uint16 if dtype == jnp.bfloat16 else np.uint32))
    assert int(sums["e"]) == (bits ^ bits >> 16) * (2 * 18 + 1) % 2**32


def test_markdown_shows_tau_beside_speedup_and_the_machine(models):
    runs = [Run(name, 0, 0.0, 1.0, seconds, [_outcome([2, 2], [1, 1])]) for name, seconds in ((BASELINE, 4.0), ("dflash", 1.0))]
    text = tables.markdown_tables(results(models, [[1]], runs, request=Request(max_new_tokens=5)), title="tiny")
    assert "| dflash | 2.00 / 4.00x | 2.00 | 0.00 |" in text
    assert "| dflash | 4 | 4.00x | 2.00 | 2 | 0.0% | yes |" in text
    assert f"jax {jax.__version__}" in text
    assert "float32" in text
