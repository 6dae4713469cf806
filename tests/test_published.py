"""The published models of the paper at full size, without weights: parameter counts, tensor names, a plan that uses every key once."""

import json
import struct

import numpy as np
import pytest

from reanchor_jax import checkpoint, huggingface
from reanchor_jax.config import check_pair
from reanchor_jax.convert.families import find_options
from reanchor_jax.convert.plan import plan, shapes, sources
from reanchor_jax.convert.tables import drafter_table, target_table

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TARGETS = {
    "Qwen3-4B": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
    "Qwen3-8B": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "gemma-4-12B": {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma4_unified_text",
            "vocab_size": 262144,
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "intermediate_size": 15360,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
            "sliding_window": 1024,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    },
}


def drafter(target, architecture="DFlashDraftModel", *, block_size=16, mask, taps, layers=5, dflash=(), **overrides):
    text = TARGETS[target].get("text_config", TARGETS[target])
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": text["intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "num_target_layers": text["num_hidden_layers"],
        "block_size": block_size,
        **overrides,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps, **dict(dflash)},
    }


_TAPS = [1, 9, 17, 25, 33]
_DOMINO = {"projector_type": "domino", "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True, "pure_draft_prefix_len": 1}
_DSPARK = {
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "layer_types": ["full_attention"] * 5,
    "final_logit_softcapping": 30.0,
    "rope_parameters": TARGETS["gemma-4-12B"]["text_config"]["rope_parameters"],
}
_GEMMA_TAPS = [5, 17, 29, 41, 46]
DRAFTERS = {
    "z-lab/Qwen3-4B-DFlash-b16": ("Qwen3-4B", drafter("Qwen3-4B", mask=151669, taps=_TAPS)),
    "z-lab/Qwen3-8B-DFlash-b16": ("Qwen3-8B", drafter("Qwen3-8B", mask=151669, taps=_TAPS)),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": (
        "Llama-3.1-8B",
        drafter("Llama-3.1-8B", block_size=10, mask=128002, taps=[1, 8, 15, 22, 29]),
    ),
    "z-lab/gemma4-12B-it-DFlash": (
        "gemma-4-12B",
        drafter(
            "gemma-4-12B",
            mask=4,
            taps=[1, 10, 19, 27, 36, 45],
            intermediate_size=7680,
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            sliding_window=2048,
            final_logit_softcapping=30.0,
        ),
    ),
    "Huang2020/Qwen3-8B-Domino-b16": ("Qwen3-8B", drafter("Qwen3-8B", "DominoDraftModel", mask=151669, taps=_TAPS, dflash=_DOMINO)),
    "deepseek-ai/dspark_qwen3_4b_block7": ("Qwen3-4B", drafter("Qwen3-4B", "Qwen3DSparkModel", mask=151669, taps=_TAPS, **_DSPARK)),
    "deepseek-ai/dflash_qwen3_4b_block7": (
        "Qwen3-4B",
        drafter("Qwen3-4B", "Qwen3DSparkModel", mask=151669, taps=_TAPS, block_size=7, markov_rank=0),
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": (
        "gemma-4-12B",
        drafter("gemma-4-12B", "Gemma4DSparkModel", mask=4, taps=_GEMMA_TAPS, **_DSPARK, **_GEMMA),
    ),
    "AngelSlim/Qwen3-8b-dflare": (
        "Qwen3-8B",
        drafter("Qwen3-8B", "QwenDFlareDraftModel", mask=151669, taps=list(range(1, 34, 4)), layers=7),
    ),
}


def target_tensors(config, prefix):
    """Keys and shapes as published."""
    text = config.get("text_config", config)
    width, heads = text["hidden_size"], text["num_attention_heads"]
    is_gemma = "text_config" in config
    found = {f"{prefix}embed_tokens.weight": [text["vocab_size"], width], f"{prefix}norm.weight": [width]}
    if not text["tie_word_embeddings"]:
        found["lm_head.weight"] = [text["vocab_size"], width]
    for index in range(text["num_hidden_layers"]):
        is_full = is_gemma and text["layer_types"][index] == "full_attention"
        size = text.get("head_dim") or width // heads
        size, groups = (text["global_head_dim"], text["num_global_key_value_heads"]) if is_full else (size, text["num_key_value_heads"])
        found |= layer_tensors(f"{prefix}layers.{index}.", width, heads, groups, size, text["intermediate_size"], is_gemma, is_full)
        if text.get("model_type") == "llama":
            del found[f"{prefix}layers.{index}.self_attn.q_norm.weight"], found[f"{prefix}layers.{index}.self_attn.k_norm.weight"]
    if is_gemma:
        found |= {"model.embed_vision.patch_dense.weight": [width, 6912], "model.embed_audio.embedding_projection.weight": [width, 640]}
    return found


def layer_tensors(prefix, width, heads, groups, size, mlp, is_gemma, is_full):
    found = {
        f"{prefix}self_attn.q_proj.weight": [heads * size, width],
        f"{prefix}self_attn.k_proj.weight": [groups * size, width],
        f"{prefix}self_attn.v_proj.weight": [groups * size, width],
        f"{prefix}self_attn.o_proj.weight": [width, heads * size],
        f"{prefix}self_attn.q_norm.weight": [size],
        f"{prefix}self_attn.k_norm.weight": [size],
        f"{prefix}mlp.gate_proj.weight": [mlp, width],
        f"{prefix}mlp.up_proj.weight": [mlp, width],
        f"{prefix}mlp.down_proj.weight": [width, mlp],
        f"{prefix}input_layernorm.weight": [width],
        f"{prefix}post_attention_layernorm.weight": [width],
    }
    if is_gemma:
        found |= {f"{prefix}{name}_feedforward_layernorm.weight": [width] for name in ("pre", "post")} | {f"{prefix}layer_scalar": [1]}
    if is_full:
        del found[f"{prefix}self_attn.v_proj.weight"]
    return found


def drafter_tensors(config):
    """Keys and shapes as published."""
    width, mlp, taps = config["hidden_size"], config["intermediate_size"], len(config["dflash_config"]["target_layer_ids"])
    vocabulary, architecture = config["vocab_size"], config["architectures"][0]
    is_gemma, is_dflare = architecture == "Gemma4DSparkModel", architecture == "QwenDFlareDraftModel"
    size, groups = (512, 1) if is_gemma else (config["head_dim"], config["num_key_value_heads"])
    found = {"norm.weight": [width], "hidden_norm.weight": [width]}
    found |= {"layer_fusion_weights": [config["num_hidden_layers"], taps]} if is_dflare else {"fc.weight": [width, taps * width]}
    for index in range(config["num_hidden_layers"]):
        heads = config["num_attention_heads"]
        found |= layer_tensors(f"layers.{index}.", width, heads, groups, size, mlp, is_gemma, is_gemma)
        if is_dflare:
            found |= {f"layers.{index}.self_attn.{name}_proj_target.weight": [groups * size, width] for name in "kv"}
    if "DSpark" in architecture:
        found |= {"embed_tokens.weight": [vocabulary, width], "lm_head.weight": [vocabulary, width]}
    if config.get("markov_rank"):
        found |= {f"markov_head.markov_{name}.weight": [vocabulary, 256] for name in ("w1", "w2")}
        found |= {"confidence_head.proj.weight": [1, width + 256], "confidence_head.proj.bias": [1]}
    if architecture == "DominoDraftModel":
        found |= {"prefix_gru.weight_ih_l0": [3072, width], "prefix_gru.weight_hh_l0": [3072, 1024]}
        found |= {"embed_proj.0.weight": [256, width + 1024], "embed_proj.2.weight": [vocabulary, 256]}
    return found


def write_sparse(directory, tensors, num_files=3):
    """Safetensors files with full headers and no stored bytes behind them, and their index."""
    directory.mkdir(parents=True)
    weight_map = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        header, end = {}, 0
        for key in sorted(tensors)[number::num_files]:
            begin, end = end, end + 2 * int(np.prod(tensors[key]))
            header[key] = {"dtype": "BF16", "shape": tensors[key], "data_offsets": [begin, end]}
            weight_map[key] = name
        text = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def count(module):
    return sum(int(np.prod(leaf.shape)) for leaf in checkpoint.leaves(module).values())


def num_tensors(module, table):
    return sum(len(sources(leaf, table)) for leaf in checkpoint.leaves(module))


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-4B", 4.02), ("Qwen3-8B", 8.19), ("Llama-3.1-8B", 8.03), ("gemma-4-12B", 11.91)])
def test_every_key_of_a_published_target_is_used_once(tmp_path, name, billions):
    config = huggingface.read_target(TARGETS[name])
    model = checkpoint.build_target(config, "bfloat16")
    assert count(model) / 1e9 == pytest.approx(billions, abs=0.005)
    write_sparse(tmp_path / name, target_tensors(TARGETS[name], "model.language_model." if "gemma" in name else "model."))
    moves, problems = plan(tmp_path / name, checkpoint.leaves(model), target_table(config))
    assert problems == []
    assert len(moves) == num_tensors(model, target_table(config))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_key_of_a_published_drafter_is_used_once(tmp_path, name):
    target, given = DRAFTERS[name]
    tensors = drafter_tensors(given)
    write_sparse(tmp_path / "drafter", tensors)
    given = {**given, huggingface.OPTIONS: find_options(given, shapes(tmp_path / "drafter"))}
    config = huggingface.read_drafter(given)
    check_pair(huggingface.read_target(TARGETS[target]), config)
    model = checkpoint.build_drafter(config, "bfloat16")
    moves, problems = plan(tmp_path / "drafter", checkpoint.leaves(model), drafter_table(config))
    assert problems == []
    assert len(moves) == num_tensors(model, drafter_table(config)) == len(tensors)
    assert config.is_shifted == ("Domino" in name or "block7" in name)
    assert config.num_drafts == {16: 16 if config.is_shifted else 15, 10: 9, 7: 7}[config.num_slots]


@pytest.mark.parametrize(
    ("name", "billions", "published"),
    [
        ("z-lab/Qwen3-4B-DFlash-b16", 0.537, 58),
        ("z-lab/Qwen3-8B-DFlash-b16", 1.05, 58),
        ("z-lab/gemma4-12B-it-DFlash", 0.728, 58),
        ("AngelSlim/Qwen3-8b-dflare", 1.4, 94),
    ],
)
def test_published_drafters_have_the_known_sizes(name, billions, published):
    config = huggingface.read_drafter(DRAFTERS[name][1])
    model = checkpoint.build_drafter(config, "bfloat16")
    assert count(model) / 1e9 == pytest.approx(billions, rel=0.01)
    assert num_tensors(model, drafter_table(config)) == published
