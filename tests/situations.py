"""Small pairs in which drafts are never right, often right, or right by chance; one shape a family, so they share compilations.

In: a family of targets (llama, qwen3, gemma4) or drafters, a seed.
Out: Models, prompts, and configs without buckets (each takes seconds to compile).
    Dimension 0 of every embedding holds one constant, so the sign of a norm's scale there says which token a head prefers.
"""

import jax.numpy as jnp
import numpy as np
from tiny import (
    FAMILIES,
    UNPUBLISHED,
    random_models,
    tiny_drafter_config,
    tiny_family_config,
    tiny_gemma4_config,
    tiny_llama_config,
    tiny_qwen3_config,
)

from reanchor_jax import DecodeConfig, checkpoint
from reanchor_jax.models.drafter import Models

BLOCK = 5
FAVOURITE = 7  # token that dimension 0 speaks for
CACHE_LENGTH = 64
_CONSTANT = 1000.0


def small_models(seed: int, *, family: str = "llama", target_family: str | None = None, vocab_size: int = 61) -> Models:
    """A random pair of two target layers, drafting BLOCK - 1 tokens.

    llama: full attention. qwen3, gemma4: a sliding and a full layer in target and drafter, windows of 9 and 3.
    domino, dspark, dflare, dspark_dflare, gemma4_dspark, xpress, dblast, xpress_dblast: a drafter of that family for a target_family, by
    default Gemma-4 for gemma4_dspark and Llama for the others.
    """
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    if family in FAMILIES or family in UNPUBLISHED:
        target_family = target_family or ("gemma4" if family == "gemma4_dspark" else "llama")
        make_target = {"llama": tiny_llama_config, "qwen3": tiny_qwen3_config, "gemma4": tiny_gemma4_config}[target_family]
        windows = {} if target_family == "llama" else {"sliding_window": 9, **kinds}
        target = make_target(num_hidden_layers=2, vocab_size=vocab_size, tie_word_embeddings=False, **windows)
        is_shifted = family in ("domino", "dspark", "gemma4_dspark", "xpress_dblast")
        drafter = tiny_family_config(family, target, block_size=BLOCK - is_shifted, target_layer_ids=[0, 1])
    elif family == "gemma4":
        target = tiny_gemma4_config(num_hidden_layers=2, vocab_size=vocab_size, tie_word_embeddings=False, **kinds)
        drafter = tiny_drafter_config(target, block_size=BLOCK, target_layer_ids=[1], sliding_window=3, **kinds)
    elif family == "llama":
        target = tiny_llama_config(num_hidden_layers=2, vocab_size=vocab_size)
        drafter = tiny_drafter_config(
            target, block_size=BLOCK, num_hidden_layers=1, layer_types=["full_attention"], target_layer_ids=[0, 1]
        )
    else:
        target = tiny_qwen3_config(num_hidden_layers=2, vocab_size=vocab_size, tie_word_embeddings=False, sliding_window=9, **kinds)
        drafter = tiny_drafter_config(target, block_size=BLOCK, target_layer_ids=[1], sliding_window=3, **kinds)
    return random_models(target, drafter, seed=seed)


def small_config(retain: str, draft_choice: str) -> DecodeConfig:
    """A speculative config without further buckets; `both` has less room than it could use, so it drops nodes and offsets."""
    if retain == "none":
        return DecodeConfig.dflash(draft_choice=draft_choice, cache_length=CACHE_LENGTH)
    chain = BLOCK - 1
    offsets, nodes = {
        "baseline": (chain, 3 * BLOCK),
        "suffix": (chain, 3 * BLOCK),
        "deepest": (2 * chain, 5 * BLOCK),
        "both": (BLOCK, 2 * BLOCK - 2),
        "descendants": (BLOCK, 4 * BLOCK),
    }[retain]
    return DecodeConfig.reanchor(
        retain=retain,
        draft_choice=draft_choice,
        cache_length=CACHE_LENGTH,
        max_offsets=offsets,
        num_nodes=nodes,
        block_buckets=(),
        node_buckets=(),
    )


def flat(models: Models, *, scale: float = 0.05) -> Models:
    """Nearly uniform logits: at temperature 1 the noise decides, so coupled drafts are mostly right and any others by chance."""
    values = checkpoint.leaves(models.target)
    return models._replace(target=_with(models.target, {"head/kernel": scale * values["head/kernel"]}))


def often_right(models: Models, *, logit: float = 6.0) -> Models:
    """Target and drafter share a favourite token: many drafts are right, at temperature 0 too, and other tokens lie in between."""
    return _with_favourite(models, target_logit=logit, drafter_logit=logit)


def always_wrong(models: Models) -> Models:
    """The drafter drafts the favourite and nothing else, and the target never emits it (odds below e^-100 a token at temperature 1)."""
    return _with_favourite(models, target_logit=-200.0, drafter_logit=200.0)


def _with_favourite(models: Models, *, target_logit: float, drafter_logit: float) -> Models:
    width = models.target.config.width
    values = checkpoint.leaves(models.target)
    embedding, head = np.array(values["embedding/embedding"]), np.array(values["head/kernel"])
    embedding *= np.sqrt(width)  # about 1, as in the streams of the layers
    embedding[:, 0] = _CONSTANT
    head[0], head[:, FAVOURITE] = 0, 0
    head[0, FAVOURITE] = 1

    def norms(module, logit):
        """Scales behind streams that the constant dominates: the others are brought back to their size, the constant itself is cut out."""
        scales = {}
        for name, scale in checkpoint.leaves(module).items():
            if name == "norm/scale" or name.endswith(("attention_norm/scale", "mlp_norm/scale")):
                scales[name] = np.array(scale) * np.float32(_CONSTANT / np.sqrt(width))
                scales[name][0] = 0
        scales["norm/scale"][0] = logit / np.sqrt(width)  # behind a norm, dimension 0 holds about sqrt(width)
        return {name: jnp.asarray(scale) for name, scale in scales.items()}

    fusion = np.array(checkpoint.leaves(models.drafter)["fusion/kernel"])
    fusion[::width] = 0
    changes = {"embedding/embedding": jnp.asarray(embedding), "head/kernel": jnp.asarray(head)}
    return Models(
        target=_with(models.target, changes | norms(models.target, target_logit)),
        drafter=_with(models.drafter, {"fusion/kernel": jnp.asarray(fusion)} | norms(models.drafter, drafter_logit)),
    )


def _with(module, changes):
    values = checkpoint.leaves(module)
    assert changes.keys() <= values.keys()
    return checkpoint.with_leaves(module, values | changes)


def prompts(num_rows: int, *, seed: int = 0, vocab_size: int = 61, longest: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded prompts of 1..longest tokens, and their lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, size=num_rows).astype(np.int32)
    tokens = rng.integers(vocab_size, size=(num_rows, longest)).astype(np.int32)
    return np.where(np.arange(longest)[None] < lengths[:, None], tokens, 0), lengths
