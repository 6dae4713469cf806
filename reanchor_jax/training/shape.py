"""The shape of a drafter to be trained, as the config.json of its family.

In: sizes, the target's config, a family.
Out: a config.json as z-lab and the families' authors write it.
Source: `reanchor_jax.huggingface` reads it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from reanchor_jax import huggingface
from reanchor_jax.config import TargetConfig
from reanchor_jax.training.families import FAMILIES


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Shape of the drafter.

    mask_token_id: an id that never occurs in text. num_layers: drafter layers. num_heads: query heads.
    num_kv_heads: key/value heads; by default num_heads. head_size: width of a head; by default the target's width / num_heads.
    mlp_width: by default 4 times the target's width. block_size: slots of a drafting pass, the anchor's included.
    window: context tokens a block sees; 0 is all of them. target_layer_ids: tapped layers; by default all, or 5 spread evenly of more.
    causal_size: width of a causal head's state (Domino) or embedding (DSpark), rank of a refiner (xPress) or a mixture (DBLast).
    causal_width: inner width of Domino's output map or of a refiner's MLPs.
    """

    mask_token_id: int
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_size: int | None = None
    mlp_width: int | None = None
    block_size: int = 16
    window: int = 64
    target_layer_ids: tuple[int, ...] | None = None
    causal_size: int = 32
    causal_width: int = 64

    def __post_init__(self):
        least = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": 2, "mlp_width": 1, "block_size": 2, "window": 0}
        least |= {"causal_size": 1, "causal_width": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}; got {value}.")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads}).")
        if self.head_size is not None and self.head_size % 2:
            raise ValueError(f"head_size must be even, for rotary embeddings turn pairs; got {self.head_size}.")

    def huggingface(self, target: TargetConfig, family: str) -> dict[str, Any]:
        """The `config.json` dict of a drafter of this shape and family for a target. Raises ValueError as DrafterConfig."""
        taps = self.target_layer_ids
        if taps is None:
            taps = tuple(np.unique(np.linspace(0, target.num_layers - 1, min(5, target.num_layers)).round().astype(int)).tolist())
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": target.vocab_size,
            "hidden_size": target.width,
            "intermediate_size": self.mlp_width or 4 * target.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self.head_size or max(target.width // self.num_heads // 2 * 2, 2),  # rotary turns pairs
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": target.max_positions,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["sliding_attention" if self.window else "full_attention"] * self.num_layers,
            "use_sliding_window": bool(self.window),
            "sliding_window": self.window or None,
            "max_window_layers": 0,
            "is_causal": False,
            "block_size": self.block_size,
            "num_target_layers": target.num_layers,
            "tie_word_embeddings": True,
            "dtype": "float32",
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(taps)},
        }
        own = dict(FAMILIES[family].settings(self.causal_size, self.causal_width))
        config["dflash_config"] |= own.pop("dflash_config", {})
        config |= own
        huggingface.read_drafter(config)
        return config
