"""A pair is well, or the setting is named that makes it ill: each silent fault is put into the embedded pair and found again."""

from dataclasses import replace

import pytest

from reanchor_jax import pairs
from reanchor_jax.bench import doctor
from reanchor_jax.cli import main

FAULTS = {
    "taps lie one layer lower": lambda config: replace(config, target_layer_ids=tuple(tap + 1 for tap in config.target_layer_ids)),
    "a slot predicts its own place": lambda config: replace(config, is_shifted=True),
    "the mask token is 0": lambda config: replace(config, mask_token_id=300),
}


@pytest.fixture(scope="module")
def models():
    return pairs.load_pair("stories260k")


@pytest.mark.slow
def test_a_pair_in_order_is_well(models, capsys):
    assert main(["doctor", "--pair", "stories260k", "--max-new-tokens", "24"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("target: 5 layers of width 64, vocabulary 512")
    assert "output: dflash equals plain decoding" in told
    assert "output: reanchor equals plain decoding" in told
    assert told[-1] == "well"


@pytest.mark.slow
@pytest.mark.parametrize("cause", FAULTS)
def test_a_silent_fault_is_named(models, cause):
    config = models.drafter.config
    if cause.startswith("taps") and max(config.target_layer_ids) + 1 >= models.target.config.num_layers:
        cause, changed = "taps lie one layer higher", replace(config, target_layer_ids=tuple(tap - 1 for tap in config.target_layer_ids))
    else:
        changed = FAULTS[cause](config)
    if cause.startswith("the mask"):
        cause = f"the mask token is {config.mask_token_id}"
    ill = models._replace(drafter=doctor._with_config(models.drafter, changed))
    prompts = doctor.sampled_prompts(models, 1)
    tokenizer = type("Tokenizer", (), {"unk_token_id": config.mask_token_id, "__len__": lambda self: 512})()
    healthy = doctor.examine(models, prompts, floor=0.0, show_progress=False)
    report = doctor.examine(ill, prompts, tokenizer=tokenizer, floor=0.8 * healthy.taus["dflash"], show_progress=False)
    assert not report.is_well
    assert not any(report.divergences.values())  # the text is right all the same
    assert report.suspects[0].name == cause
    assert report.suspects[0].tau == pytest.approx(healthy.taus["dflash"])
    assert f"likely cause: {cause}; convert the drafter again with that setting" in doctor.report_lines(
        report, has_template=False, is_chat=False
    )


def test_what_no_setting_explains_is_said_so_with_what_to_try():
    report = doctor.Report(facts=[], divergences={"dflash": [2e-4]}, taus={"dflash": 1.1}, suspects=[doctor.Suspect("x", 1.2)], floor=1.5)
    lines = doctor.report_lines(report, has_template=True, is_chat=False)
    assert "output: dflash equals plain decoding, but for 1 near-ties of rounding" in lines
    assert any("try --chat" in line for line in lines)
    assert lines[-1] == "NOT well"
    wrong = report._replace(divergences={"dflash": [0.5]}, taus={"dflash": 3.0})
    assert (
        "DIFFERS from plain decoding where the target was sure (by 0.5 logits)"
        in doctor.report_lines(wrong, has_template=False, is_chat=True)[0]
    )
    assert not wrong.is_well
