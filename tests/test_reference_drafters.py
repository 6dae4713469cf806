"""The reference drafters hold: a block equals its steps, PyPI dflash and transformers agree, files have the published names and shapes."""

import json

import pytest

torch = pytest.importorskip("torch")
reference_drafters = pytest.importorskip("reference_drafters")
reference_heads = pytest.importorskip("reference_heads")
make, PACKAGINGS = reference_drafters.make, reference_drafters.PACKAGINGS

TARGET = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 5}
POSITION, ANCHOR = 19, 5
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}

VARIANTS = [
    *((name, {}) for name in PACKAGINGS),
    *(("domino", {"shift_label": shift, "pure_draft_prefix_len": length}) for shift in (True, False) for length in (0, 1, 2)),
    ("domino", {"projector_type": "causal_v5", "key_prefix": "logit_head."}),
    ("dspark-deepspec", {"markov_head_type": "gated"}),
    ("dspark-deepspec", {"markov_head_type": "rnn", "confidence_head_with_markov": False}),
    ("dspark-deepspec", {"enable_confidence_head": False}),
    ("dspark-specforge", {"markov_head_type": "rnn", "rope_scaling": None}),
    ("dspark-speculators", {"sample_from_anchor": None, "markov_head_type": "gated"}),
    ("dspark-speculators", {"sample_from_anchor": False, "draft_vocab_size": 37}),
    ("dspark-speculators", {"own_embedding": False, **SLIDING, "sliding_window_non_causal": True}),
    ("dspark-modelopt", {"markov_head_type": "rnn"}),
    ("dspark-angelspec", {"has_native_names": False}),
    ("gemma4-dspark", {"markov_head_type": "gated"}),
    ("dflash", {**SLIDING, "is_causal": False}),
]
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda value: value if isinstance(value, str) else str(value))


def build(name, *, seed=3, **options):
    return make(name, TARGET, seed, **options)


def inputs(seed=7, *, num_taps=4):
    """Taps [T E*D] with garbage at and after the anchor, target embedding [V D], target head [V D]."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(POSITION + 3, num_taps * 24, generator=generator)
    taps[POSITION:] = torch.nan
    embed = torch.randn(61, 24, generator=generator)
    return taps, embed, torch.randn(61, 24, generator=generator) * 24**-0.5


def draft(reference, taps, embed, head):
    return reference.draft(taps, ANCHOR, POSITION, embed, head)


def close(one, other, atol=1e-5):
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


@every_variant
def test_a_block_in_one_go_equals_step_by_step(name, options):
    taps, embed, head = inputs()
    reference = build(name, **options)
    tokens, logits, confidences = draft(reference, taps, embed, head)
    assert tokens.shape == (reference.num_drafts,)
    assert torch.isfinite(logits).all()
    block = torch.cat([torch.tensor([ANCHOR]), tokens])
    close(reference.teacher_forced(taps, block, POSITION, embed, head), logits)
    assert (confidences is None) != reference.spec.has_confidence_head
    if confidences is not None:
        assert confidences.shape == tokens.shape
        assert ((confidences > 0) & (confidences < 1)).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [("domino", {"pure_draft_prefix_len": 2}), *(("dspark-deepspec", {"markov_head_type": kind}) for kind in ("vanilla", "gated", "rnn"))],
)
def test_the_block_form_of_a_head_equals_its_steps_for_arbitrary_tokens(name, options):
    reference = build(name, **options)
    head, embed = reference._logit_head, inputs()[1]
    generator = torch.Generator().manual_seed(11)
    tokens, z = torch.randint(61, [9], generator=generator), torch.randn(9, 24, generator=generator)
    state, steps = None, []
    for index in range(9):
        correction, state = head.step(index, tokens[index], z[index], state, embed)
        steps.append(correction)
    block = head.block(tokens, z, embed)
    close(block, torch.stack(steps))
    assert (block[-2:].std() > 0.1).all()  # corrections that could not be seen would prove nothing
    if options.get("markov_head_type") == "rnn" or name == "domino":
        changed = head.block(tokens.roll(1), z, embed)[-1] - block[-1]
        assert changed.abs().max() > 1e-3


def test_the_handwritten_gru_step_equals_torch_gru():
    gru = build("domino").drafter.logit_head.prefix_gru
    assert {name: tuple(weight.shape) for name, weight in gru.named_parameters()} == {"weight_ih_l0": (39, 24), "weight_hh_l0": (39, 13)}
    x, state = torch.randn(8, 24), torch.zeros(13)
    states = gru(x[None])[0][0]
    for row, expected in zip(x, states, strict=True):
        state = reference_heads.gru_step(gru, row, state)
        close(state, expected)


@pytest.mark.parametrize("layout", ["dflash", "dflash-new"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        SLIDING,
        {**SLIDING, "is_causal": False},
        {**SLIDING, "is_causal": True},
        {"rope_scaling": YARN, "target_layer_ids": [3, 0]},
        {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 1.5},
    ],
    ids=["full", "causal", "sliding", "sliding_both_ways", "sliding_causal", "yarn", "scales"],
)
def test_dflash_files_are_read_and_computed_alike_by_pypi_dflash(tmp_path, layout, options):
    dflash = pytest.importorskip("dflash.model")
    reference = build(layout, **options)
    reference.save(tmp_path)
    model, info = dflash.DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert model.block_size == reference.spec.block_size
    assert model.mask_token_id == reference.spec.mask_token_id
    assert tuple(model.target_layer_ids) == reference.spec.target_layer_ids
    taps, embed, head = inputs(num_taps=len(reference.spec.target_layer_ids))
    context = taps[None, :POSITION]
    slots = torch.tensor([ANCHOR] + [reference.spec.mask_token_id] * 6)
    with torch.no_grad():
        close(reference.features(taps[:POSITION]), model.hidden_norm(model.fc(context))[0])
        block = (embed[slots] * reference.spec.input_embedding_scale)[None]
        states = model.eval()(torch.arange(POSITION + 7)[None], noise_embedding=block, target_hidden=context)[0]
        close(reference.block_states(taps, ANCHOR, POSITION, embed), states, atol=1e-4)
        linear = torch.nn.Linear(24, 61, bias=False)
        linear.weight.copy_(head)
        logits = model.compute_logits(states[1:], linear)
    close(reference.base_logits(states, head), logits)
    tokens, drafted, _ = draft(reference, taps, embed, head)
    close(drafted, logits, atol=1e-4)
    assert torch.equal(tokens, logits.argmax(-1))


def huggingface_gemma4(reference):
    """Transformers' Gemma-4 text stack with the reference's layers, norm and embedding."""
    gemma4 = pytest.importorskip("transformers.models.gemma4_unified.modeling_gemma4_unified")
    configuration = pytest.importorskip("transformers.models.gemma4_unified.configuration_gemma4_unified")
    config = {key: value for key, value in reference.config.items() if key not in ("architectures", "model_type")}
    config["rope_parameters"] = {key: value for key, value in config["rope_parameters"].items() if isinstance(value, dict)}
    model = gemma4.Gemma4UnifiedTextModel(configuration.Gemma4UnifiedTextConfig(**config, attn_implementation="eager"))
    assert model.load_state_dict(reference.tensors, strict=False).missing_keys == []
    return model.eval()


def everything_visible(model, ids):
    mask = torch.zeros(1, 1, len(ids), len(ids))
    with torch.no_grad():
        return model(input_ids=ids[None], attention_mask={"full_attention": mask, "sliding_attention": mask}).last_hidden_state[0]


def test_the_gemma4_stack_without_context_equals_transformers():
    reference = build("gemma4-dspark")
    ids = torch.tensor([ANCHOR] + [reference.spec.mask_token_id] * 6)
    states = everything_visible(huggingface_gemma4(reference), ids)
    close(reference.block_states(inputs()[0], ANCHOR, 0, None), states)


def test_a_gemma4_layer_attends_to_its_context_as_transformers_attends_to_earlier_tokens():
    """With the earlier tokens' embeddings as taps, and fusion and context norm chosen to give what a layer makes of them."""
    reference = build("gemma4-dspark", num_hidden_layers=1)
    backbone = reference.drafter.backbone
    backbone.fc.weight.copy_(torch.eye(24, 96))
    backbone.hidden_norm.weight.copy_(backbone.layers[0].input_layernorm.weight)
    earlier = torch.randint(61, [POSITION], generator=torch.Generator().manual_seed(13))
    ids = torch.cat([earlier, torch.tensor([ANCHOR] + [reference.spec.mask_token_id] * 6)])
    states = everything_visible(huggingface_gemma4(reference), ids)[POSITION:]
    taps = torch.zeros(POSITION, 96)
    taps[:, :24] = reference.tensors["embed_tokens.weight"][earlier] * 24**0.5
    close(reference.block_states(taps, ANCHOR, POSITION, None), states)


@pytest.mark.parametrize(
    ("name", "options", "first_slot", "num_drafts"),
    [
        ("dflash", {}, 1, 6),
        ("dflash-new", {}, 1, 6),
        ("dflare", {}, 1, 6),
        ("dflare-angelspec", {}, 1, 6),
        ("domino", {"shift_label": True}, 0, 7),
        ("domino", {"shift_label": False}, 1, 6),
        ("dspark-deepspec", {}, 0, 7),
        ("dflash-block7", {}, 0, 7),
        ("gemma4-dspark", {}, 0, 7),
        ("gemma4-block7", {}, 0, 7),
        ("dspark-specforge", {}, 0, 7),
        ("dspark-modelopt", {}, 0, 7),
        ("dspark-speculators", {"sample_from_anchor": True}, 0, 7),
        ("dspark-speculators", {"sample_from_anchor": False}, 1, 6),
        ("dspark-speculators", {"sample_from_anchor": None}, 1, 6),
        ("dspark-angelspec", {}, 1, 6),
    ],
)
def test_each_family_drafts_from_its_slots(name, options, first_slot, num_drafts):
    taps, embed, head = inputs()
    reference = build(name, **options)
    states = reference.block_states(taps, ANCHOR, POSITION, embed)
    assert states.shape == (7, 24)
    every_slot = build(name, **options)
    every_slot.first_slot = 0
    close(reference.base_logits(states, head), every_slot.base_logits(states, head)[first_slot:])
    assert (reference.first_slot, reference.num_drafts) == (first_slot, num_drafts)
    assert len(draft(reference, taps, embed, head)[0]) == num_drafts


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_domino_leaves_its_first_drafts_to_the_backbone(shift_label, length):
    taps, embed, head = inputs()
    reference = build("domino", shift_label=shift_label, pure_draft_prefix_len=length)
    base = reference.base_logits(reference.block_states(taps, ANCHOR, POSITION, embed), head)
    corrections = draft(reference, taps, embed, head)[1] - base
    assert (corrections[:length] == 0).all()
    assert (corrections[length:].abs().amax(1) > 1e-2).all()


def test_the_softcap_bends_base_logits_and_not_the_markov_bias():
    reference = build("gemma4-dspark")
    states = reference.block_states(inputs()[0], ANCHOR, POSITION, None)
    raw = states @ reference.tensors["lm_head.weight"].T
    capped = 2.5 * torch.tanh(raw / 2.5)
    assert (raw - capped).abs().max() > 0.1
    previous = torch.tensor([ANCHOR, 3, 60, 2, 2, 17, 8])
    bias = reference.tensors["markov_head.markov_w1.weight"][previous] @ reference.tensors["markov_head.markov_w2.weight"].T
    close(reference.teacher_forced(inputs()[0], previous, POSITION, None, None), capped + bias)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_the_state_then_the_token_before(with_markov):
    taps, _, _ = inputs()
    reference = build("dspark-deepspec", confidence_head_with_markov=with_markov)
    tokens, _, confidences = draft(reference, taps, None, None)
    states = reference.block_states(taps, ANCHOR, POSITION, None)
    before = torch.cat([torch.tensor([ANCHOR]), tokens[:-1]])
    seen = torch.cat([states, reference.tensors["markov_head.markov_w1.weight"][before]], dim=1) if with_markov else states
    logits = seen @ reference.tensors["confidence_head.proj.weight"][0] + reference.tensors["confidence_head.proj.bias"]
    close(confidences, 1 / (1 + torch.exp(-logits)))


def test_dflare_fuses_per_layer_then_norms():
    reference = build("dflare")
    taps = inputs()[0][:POSITION]
    features = reference.features(taps)
    assert len(features) == 3
    shares = reference.tensors["layer_fusion_weights"].exp()
    shares = shares / shares.sum(1, keepdim=True)
    for share, given in zip(shares, features, strict=True):
        fused = sum(weight * tap for weight, tap in zip(share, taps.split(24, dim=1), strict=True))
        fused = fused / fused.square().mean(1, keepdim=True).sqrt()
        close(given, fused * reference.tensors["hidden_norm.weight"], atol=1e-4)


def test_dflare_that_picks_one_tap_and_projects_both_sources_alike_is_dflash():
    taps, embed, _ = inputs()
    dflare, dflash = build("dflare"), build("dflash", seed=5)
    dflare.drafter.load_state_dict(dflash.drafter.state_dict(), strict=False)
    for layer in dflare.drafter.backbone.layers:
        layer.self_attn.k_proj_target.weight.copy_(layer.self_attn.k_proj.weight)
        layer.self_attn.v_proj_target.weight.copy_(layer.self_attn.v_proj.weight)
    dflare.drafter.backbone.layer_fusion_weights.copy_(torch.tensor([0.0, 0.0, 1e4, 0.0]))
    dflash.drafter.backbone.fc.weight.copy_(torch.eye(96)[48:72])
    close(dflare.block_states(taps, ANCHOR, POSITION, embed), dflash.block_states(taps, ANCHOR, POSITION, embed))


@pytest.mark.parametrize("name", PACKAGINGS)
def test_own_embeddings_and_heads_win_over_the_target_s(name):
    taps, embed, head = inputs()
    reference = build(name)
    logits = draft(reference, taps, embed, head)[1]
    assert (reference.spec.has_embedding, reference.spec.has_lm_head) == (
        "embed_tokens.weight" in reference.tensors,
        "lm_head.weight" in reference.tensors,
    )
    assert reference.spec.has_embedding == torch.equal(
        draft(reference, taps, None if reference.spec.has_embedding else embed + 1, head)[1], logits
    )
    assert reference.spec.has_lm_head == torch.equal(
        draft(reference, taps, embed, None if reference.spec.has_lm_head else head + 1)[1], logits
    )


def test_a_reduced_vocabulary_drafts_target_ids():
    taps, embed, head = inputs()
    reference = build("dspark-speculators", draft_vocab_size=37)
    shapes = {
        name: tuple(reference.tensors[name].shape)
        for name in ("lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    }
    assert list(shapes.values()) == [(37, 24), (61, 11), (37, 11)]
    d2t, t2d = reference.tensors["d2t"], reference.tensors["t2d"]
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (torch.int64, torch.bool, (61,))
    kept = torch.arange(37) + d2t
    assert torch.equal(kept, t2d.nonzero()[:, 0])
    tokens, logits, _ = draft(reference, taps, embed, head)
    assert logits.shape == (7, 37)
    assert torch.equal(tokens, kept[logits.argmax(1)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("domino", {}),
        ("dspark-deepspec", {"markov_head_type": "gated"}),
        ("dspark-deepspec", {"markov_head_type": "rnn"}),
        ("gemma4-dspark", {}),
        ("dflare", {}),
    ],
)
def test_every_weight_matters(name, options):
    taps, embed, head = inputs()
    reference = build(name, **options)
    _, logits, confidences = draft(reference, taps, embed, head)
    for parameter, tensor in reference.drafter.state_dict().items():
        if parameter.endswith("layers.2.layer_scalar"):
            continue  # the final norm cancels the last layer's scale
        kept = tensor.clone()
        tensor += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(17))
        _, changed, changed_confidences = draft(reference, taps, embed, head)
        tensor.copy_(kept)
        difference = (changed - logits).abs().max()
        if confidences is not None:
            difference = torch.maximum(difference, (changed_confidences - confidences).abs().max())
        assert difference > 1e-3, parameter


@pytest.mark.parametrize("name", PACKAGINGS)
def test_bfloat16_files_hold_the_weights_the_results_are_of(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    reference = build(name, dtype="bfloat16")
    reference.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == reference.config
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    computed = list(reference.drafter.state_dict().values())
    for one, other in zip(reference.tensors, computed, strict=True):
        assert torch.equal(stored[one].float(), other)


def test_what_no_checkpoint_has_is_refused():
    with pytest.raises(TypeError, match=r"unknown options \['markov_rank'\]"):
        build("dflash", markov_rank=5)
    with pytest.raises(TypeError, match="rope_scaling"):
        build("gemma4-dspark", rope_scaling=YARN)
    with pytest.raises(ValueError, match="first state is ambiguous"):
        build("dspark-speculators", sample_from_anchor=None, markov_head_type="rnn")
    with pytest.raises(ValueError, match="needs markov_rank > 0"):
        build("dspark-deepspec", markov_rank=0, confidence_head_with_markov=True)
    with pytest.raises(ValueError, match="taps has 22 rows"):
        build("dflash").block_states(inputs()[0], ANCHOR, 23, inputs()[1])


# Names and shapes with one layer: V 61, D 24, 4 taps, 6 and 2 heads of 10 (Gemma: 6 and 1 of 16), F 34, rank 11, GRU 13, bottleneck 9.
_FUSED = {"fc.weight": (24, 96), "hidden_norm.weight": (24,), "norm.weight": (24,)}
_LAYER = {
    "layers.0.input_layernorm.weight": (24,),
    "layers.0.post_attention_layernorm.weight": (24,),
    "layers.0.self_attn.q_proj.weight": (60, 24),
    "layers.0.self_attn.k_proj.weight": (20, 24),
    "layers.0.self_attn.v_proj.weight": (20, 24),
    "layers.0.self_attn.o_proj.weight": (24, 60),
    "layers.0.self_attn.q_norm.weight": (10,),
    "layers.0.self_attn.k_norm.weight": (10,),
    "layers.0.mlp.gate_proj.weight": (34, 24),
    "layers.0.mlp.up_proj.weight": (34, 24),
    "layers.0.mlp.down_proj.weight": (24, 34),
}
_DFLASH = _FUSED | _LAYER
_DOMINO = {
    "prefix_gru.weight_ih_l0": (39, 24),
    "prefix_gru.weight_hh_l0": (39, 13),
    "embed_proj.0.weight": (9, 37),
    "embed_proj.2.weight": (61, 9),
}
_MARKOV = {"markov_head.markov_w1.weight": (61, 11), "markov_head.markov_w2.weight": (61, 11)}
_GATED = _MARKOV | {"markov_head.gate_proj.weight": (11, 35), "markov_head.gate_proj.bias": (11,)}
_RNN = _MARKOV | {"markov_head.joint_proj.weight": (33, 46), "markov_head.joint_proj.bias": (33,)}
_CONFIDENCE = {"confidence_head.proj.weight": (1, 35), "confidence_head.proj.bias": (1,)}
_OWN = {"embed_tokens.weight": (61, 24), "lm_head.weight": (61, 24)}
_GEMMA = {name: shape for name, shape in _DFLASH.items() if "v_proj" not in name} | {
    "layers.0.pre_feedforward_layernorm.weight": (24,),
    "layers.0.post_feedforward_layernorm.weight": (24,),
    "layers.0.self_attn.q_proj.weight": (96, 24),
    "layers.0.self_attn.k_proj.weight": (16, 24),
    "layers.0.self_attn.o_proj.weight": (24, 96),
    "layers.0.self_attn.q_norm.weight": (16,),
    "layers.0.self_attn.k_norm.weight": (16,),
    "layers.0.layer_scalar": (1,),
}
_DFLARE_LAYER = _LAYER | {
    "layer_fusion_weights": (1, 4),
    "layers.0.self_attn.k_proj_target.weight": (20, 24),
    "layers.0.self_attn.v_proj_target.weight": (20, 24),
}
_DFLARE = _DFLARE_LAYER | {"hidden_norm.weight": (24,), "norm.weight": (24,)}
_ANGELSPEC = _DFLARE_LAYER | {"context_norm.weight": (24,), "final_norm.weight": (24,), "embed_tokens.weight": (61, 24)}
_BARE_GATED = {"markov_w1.weight": (61, 11), "markov_w2.weight": (61, 11), "gate_proj.weight": (11, 35), "gate_proj.bias": (11,)}
_BARE_CONFIDENCE = {"confidence_proj.weight": (1, 35), "confidence_proj.bias": (1,)}
_REDUCED = {"lm_head.weight": (37, 24), "markov_head.markov_w2.weight": (37, 11), "d2t": (37,), "t2d": (61,)}


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("dflash", {}, _DFLASH),
        ("dflash-new", {}, _DFLASH),
        ("domino", {}, _DFLASH | _DOMINO),
        ("domino", {"key_prefix": "logit_head."}, _DFLASH | {f"logit_head.{name}": shape for name, shape in _DOMINO.items()}),
        ("dspark-deepspec", {}, _DFLASH | _OWN | _MARKOV | _CONFIDENCE),
        ("dspark-deepspec", {"markov_head_type": "gated"}, _DFLASH | _OWN | _GATED | _CONFIDENCE),
        (
            "dspark-deepspec",
            {"markov_head_type": "rnn", "confidence_head_with_markov": False},
            _DFLASH | _OWN | _RNN | _CONFIDENCE | {"confidence_head.proj.weight": (1, 24)},
        ),
        ("dflash-block7", {}, _DFLASH | _OWN),
        ("dspark-specforge", {}, _DFLASH | _MARKOV | _CONFIDENCE),
        ("dspark-speculators", {}, _DFLASH | _OWN | _MARKOV | _CONFIDENCE),
        ("dspark-speculators", {"draft_vocab_size": 37}, _DFLASH | _OWN | _MARKOV | _CONFIDENCE | _REDUCED),
        ("dspark-speculators", {"own_embedding": False}, _DFLASH | _MARKOV | _CONFIDENCE),
        ("dspark-speculators", {"own_embedding": False, "draft_vocab_size": 37}, _DFLASH | _MARKOV | _CONFIDENCE | _REDUCED),
        ("dspark-modelopt", {"markov_head_type": "gated"}, _DFLASH | _BARE_GATED | _BARE_CONFIDENCE),
        ("dspark-angelspec", {}, _ANGELSPEC | _MARKOV | _CONFIDENCE),
        ("dspark-angelspec", {"has_native_names": False}, _DFLARE | {"embed_tokens.weight": (61, 24)} | _MARKOV | _CONFIDENCE),
        ("gemma4-dspark", {}, _GEMMA | _OWN | _MARKOV | _CONFIDENCE),
        ("gemma4-block7", {}, _GEMMA | _OWN),
        ("dflare", {}, _DFLARE),
        ("dflare-angelspec", {}, _ANGELSPEC),
    ],
)
def test_tensors_have_the_published_names_and_shapes(name, options, published):
    reference = build(name, num_hidden_layers=1, **options)
    assert {key: tuple(tensor.shape) for key, tensor in reference.tensors.items()} == published


@pytest.mark.parametrize(
    ("name", "options", "stated"),
    [
        ("dflash", {}, {"block_size": 7, "rope_theta": 3000.0, "num_target_layers": 5, "rope_scaling": None}),
        ("dflash-new", {"is_causal": False}, {"is_causal": False, "rope_parameters": {"rope_theta": 3000.0, "rope_type": "default"}}),
        ("domino", {"projector_type": "causal_v5"}, {"architectures": ["DominoDraftModel"], "emb_dim": 9, "block_size": 7}),
        ("dspark-deepspec", {}, {"architectures": ["Qwen3DSparkModel"], "markov_rank": 11, "target_layer_ids": [0, 1, 2, 3]}),
        ("dflash-block7", {}, {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False}),
        ("dspark-speculators", {}, {"aux_hidden_state_layer_ids": [1, 2, 3, 4], "sample_from_anchor": True}),
        ("gemma4-dspark", {}, {"global_head_dim": 16, "head_dim": 10, "num_key_value_heads": 2, "num_global_key_value_heads": 1}),
        ("dflare", {}, {"architectures": ["QwenDFlareDraftModel"], "num_target_layers": 5}),
        ("dflare-angelspec", {}, {"model_arch": "dflare", "num_target_layers": 4, "target_num_hidden_layers": 5}),
        ("dspark-angelspec", {}, {"model_type": "dspark", "model_arch": "dflare", "num_target_layers": 4}),
    ],
)
def test_configs_state_what_the_published_ones_do(name, options, stated):
    config = build(name, **options).config
    assert {key: config[key] for key in stated} == stated


def test_nested_configs_hold_what_their_packagers_nest():
    nested = {
        name: build(name).config["dflash_config"] for name in ("dflash", "dflash-new", "domino", "dspark-specforge", "dspark-modelopt")
    }
    assert nested["dflash"] == {"mask_token_id": 59, "target_layer_ids": [0, 1, 2, 3]}
    assert nested["dflash-new"] == nested["dflash"] | {"block_size": 7}
    assert nested["domino"].keys() - nested["dflash"] == {
        "projector_type",
        "pure_draft_prefix_len",
        "emb_dim",
        "gru_hidden_dim",
        "shift_label",
    }
    assert nested["dspark-specforge"]["projector_type"] == nested["dspark-modelopt"]["projector_type"] == "dspark"
    assert "use_confidence_head" in nested["dspark-modelopt"]
    assert "enable_confidence_head" in nested["dspark-specforge"]
    speculators = build("dspark-speculators", sample_from_anchor=None).config
    assert "sample_from_anchor" not in speculators
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert "markov_head_type" not in build("dflash-block7").config
    plain = build("dspark-speculators", markov_rank=0, enable_confidence_head=False).config
    assert (plain["markov_rank"], plain["markov_head_type"], plain["confidence_head_with_markov"]) == (0, "vanilla", False)
