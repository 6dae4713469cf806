"""Tell a drafter's family from its tensors first and its config second, and hold one against the other.

In: the config dict and the tensor shapes of a drafter checkpoint.
Out: the options of DrafterConfig that its weights show, to be kept with its config.
Source: tensor names of the published drafters; config strings of packagers are unreliable.
"""

import math
from collections.abc import Mapping
from typing import Any

from reanchor_jax import huggingface

from .tables import DRAFTER_ALIASES, DRAFTER_PREFIXES, Table, bare

_SPELLING = Table(prefix="", prefixes=DRAFTER_PREFIXES, aliases=DRAFTER_ALIASES, rules=(), repeats={}, ignored=())
# what is known and not implemented: a part of a tensor's name, its name, what to do
_KNOWN = (
    ("candidate_selector.", "DFlash 2", "use the target's first DFlash drafter"),
    ("attention_conv.", "DFlash 2", "use the target's first DFlash drafter"),
    ("hidden_correction.", "a drafter with hidden correction (DFly, TreeFlash)", "use a DFlare drafter"),
    ("mtp.0.main_proj", "a DeepSeek-V4 bundle", "use a drafter published apart from its target"),
    ("midlayer.", "an EAGLE drafter", "use a DFlash-family drafter of the same target"),
    ("weight_scale", "a quantised checkpoint", "use its bfloat16 original"),
    ("weight_packed", "a quantised checkpoint", "use its bfloat16 original"),
    ("qweight", "a quantised checkpoint", "use its bfloat16 original"),
    (".scales", "a quantised checkpoint", "use its bfloat16 original"),
)


def find_options(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of `huggingface.read_options`, corrected by what the tensors show and by what the caller knows.

    shapes: of every tensor, by key. given: `is_shifted`, `num_drafts`, `temperatures`, which win.
    Raises ValueError where the config states what the tensors deny, where a family is known but not implemented, and where the tensors
    show a head of which the config does not say how it is aligned.
    """
    for key in shapes:
        for part, name, advice in _KNOWN:
            if part in key:
                raise ValueError(f"{key}: this is {name}, which is not supported yet; {advice}.")
    told = huggingface.read_options(config)
    found = {bare(key, _SPELLING): shape for key, shape in shapes.items()}
    for name in ("prefix_gru.weight_hh_l0", "embed_proj.0.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"):
        if len(found.get(name, (0, 0))) != 2:
            raise ValueError(f"{name} must be a matrix; the checkpoint holds one of shape {list(found[name])}.")
    if len(found.get("d2t", (0,))) != 1:
        raise ValueError(f"d2t must be a list of differences; the checkpoint holds one of shape {list(found['d2t'])}.")
    if "layer_fusion_weights" in found and "fc.weight" in found:
        raise ValueError("layer_fusion_weights beside fc: this is DFly, which is not supported yet; use a DFlare drafter.")
    options = {
        **told,
        "fusion": "per_layer" if "layer_fusion_weights" in found else "concatenated",
        "head": _head(found, told),
        "confidence": _confidence(found, told, width=found.get("norm.weight", (0,))[0]),
        "has_embedding": "embed_tokens.weight" in found,
        "has_head": "lm_head.weight" in found,
        "draft_vocab_size": found["d2t"][0] if "d2t" in found else None,
    }
    given = dict(given or {})
    if given.get("num_drafts", 1) < 1:
        raise ValueError(f"num_drafts (--num-drafts) must be at least 1; got {given['num_drafts']}.")
    temperatures = given.pop("temperatures", None)
    if temperatures is not None and options["confidence"] is None:
        raise ValueError("temperatures calibrate a confidence head; this drafter has none.")
    if temperatures is not None and not all(type(one) in (int, float) and 0 < one < math.inf for one in temperatures):
        raise ValueError(f"temperatures (--calibration) must be positive finite numbers; got {temperatures}.")
    if temperatures is not None:
        options["confidence"] = {**options["confidence"], "temperatures": list(temperatures)}
    _compare(config, told, options, is_aligned="is_shifted" in given)
    return {**options, **given}


def _head(found: Mapping[str, tuple[int, ...]], told: Mapping[str, Any]) -> dict[str, Any] | None:
    if "prefix_gru.weight_hh_l0" in found:
        inner = found.get("embed_proj.0.weight", (0,))[0]
        plain = (told["head"] or {}).get("num_plain", 0)
        return {"kind": "gru", "size": found["prefix_gru.weight_hh_l0"][1], "inner_size": inner, "num_plain": plain}
    if "markov_head.markov_w1.weight" in found:
        kind = "gated_markov" if "markov_head.gate_proj.weight" in found else "markov"
        kind = "rnn_markov" if "markov_head.joint_proj.weight" in found else kind
        return {"kind": kind, "size": found["markov_head.markov_w1.weight"][1], "inner_size": 0, "num_plain": 0}
    return None


def _confidence(found: Mapping[str, tuple[int, ...]], told: Mapping[str, Any], *, width: int) -> dict[str, Any] | None:
    weight = found.get("confidence_head.proj.weight")
    if weight is None:
        return None
    temperatures = (told["confidence"] or {}).get("temperatures", [])
    return {"reads_previous": weight[1] > width, "has_bias": "confidence_head.proj.bias" in found, "temperatures": temperatures}


def _compare(config: Mapping[str, Any], told: Mapping[str, Any], options: Mapping[str, Any], *, is_aligned: bool) -> None:
    """Refuse a config that names what the tensors do not have, or another kind or size of it; silence is no contradiction."""
    for name in ("head", "confidence"):
        said, has = told[name], options[name]
        if said is None:
            continue
        if has is None:
            raise ValueError(f"config.json describes a {name} ({said}) of which the checkpoint holds no tensor; fix config.json.")
        compared = ("kind", "size", "inner_size") if name == "head" else ()
        wrong = [f"{field} is {said[field]} in config.json, {has[field]} in the tensors" for field in compared if said[field] != has[field]]
        if wrong:
            raise ValueError(f"the drafter's {name}: {'; '.join(wrong)}; fix config.json.")
    if told["fusion"] == "per_layer" and options["fusion"] != "per_layer":
        raise ValueError("config.json describes a DFlare drafter but the checkpoint holds no layer_fusion_weights; fix config.json.")
    if options["head"] is not None and told["head"] is None and not (is_aligned or huggingface.states_alignment(config)):
        raise ValueError(
            f"the checkpoint holds a {options['head']['kind']} head that config.json does not describe, so it is not known which position "
            "a slot predicts; pass --alignment next (the token after its own position) or own, as its authors say."
        )
