"""Describe a decoding round by a frozen record; every rule about its values is checked here, before any tracing.

In: keyword arguments.
Out: DecodeConfig, Schedule, and the names their fields may hold.
Source: ReAnchor section 3 and its ablations; `expand` after DDTree (arXiv 2604.12989).
"""

import reprlib
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from reanchor_jax.config import CACHE_CHUNK
from reanchor_jax.fields import LARGEST, is_integer, is_number, is_positive

RetainPolicy = Literal["none", "baseline", "suffix", "deepest", "both", "descendants"]
AttachRule = Literal["earliest", "longest_prefix", "random", "original_offset", "original_offset_match"]
Extent = Literal["both", "in_block", "extension"]
Expand = Literal["none", "marginal", "merge"]
DraftChoice = Literal["argmax", "independent", "coupled"]

ATTACH_RULES: tuple[AttachRule, ...] = get_args(AttachRule)
EXTENTS: tuple[Extent, ...] = get_args(Extent)
EXPANSIONS: tuple[Expand, ...] = get_args(Expand)
RETAIN_POLICIES: tuple[RetainPolicy, ...] = get_args(RetainPolicy)
DRAFT_CHOICES: tuple[DraftChoice, ...] = get_args(DraftChoice)
_MOST_NODES = 4096


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend a round, with what it costs and what it brings.

    num_blocks: blocks drafted, the baseline included; 0 decodes plainly, one token a target pass.
    num_nodes: trie nodes verified, anchor included; 1 of plain decoding.
    is_chain: whether the baseline's own tokens are verified, instead of a tree of the likeliest.
    seconds: of a round where all rows are greedy, and where one samples, at each of the schedule's contexts; of plain decoding, of a pass.
    tokens: committed in a round at temperature 0 and at 1, bonus included; 1 of plain decoding.
    """

    num_blocks: int
    num_nodes: int
    is_chain: bool = False
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    tokens: tuple[float, float]

    def __post_init__(self):
        if not isinstance(self.is_chain, bool):
            raise ValueError(f"is_chain of an arm must be True or False; got {self.is_chain!r}.")
        for name, least in (("num_blocks", 0), ("num_nodes", 1)):
            value = getattr(self, name)
            if not (is_integer(value) and least <= value <= _MOST_NODES):
                raise ValueError(f"{name} of an arm must lie in {least}..{_MOST_NODES}; got {value!r}.")
        if not self.num_blocks and self.num_nodes != 1:
            raise ValueError(f"an arm of no blocks decodes one token a pass, so num_nodes must be 1; got {self.num_nodes}.")
        if self.is_chain and self.num_blocks != 1:
            raise ValueError(f"a chain is one block; got num_blocks {self.num_blocks}.")
        is_typed = isinstance(self.seconds, tuple) and len(self.seconds) == 2 and all(isinstance(row, tuple) for row in self.seconds)
        if not is_typed or not all(map(is_positive, (*self.seconds[0], *self.seconds[1]))):
            raise ValueError(f"seconds of an arm must be two tuples of positive numbers; got {reprlib.repr(self.seconds)}.")
        is_typed = isinstance(self.tokens, tuple) and len(self.tokens) == 2
        if not is_typed or not all(is_positive(value) and value >= 1 for value in self.tokens):
            raise ValueError(f"tokens of an arm must be two numbers of at least 1; got {reprlib.repr(self.tokens)}.")
        if not self.num_blocks and self.tokens != (1, 1):
            raise ValueError(f"an arm of no blocks brings one token a pass, so tokens must be (1, 1); got {self.tokens}.")

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What tells it from other arms, whatever they were measured to cost and bring."""
        return self.num_blocks, self.num_nodes, self.is_chain


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Arms among which every round takes the one that promises most tokens a second, for one number of rows.

    contexts: committed tokens at which seconds were measured, rising; what lies between is interpolated.
    spread: standard deviation, over prompts, of accepted drafts beside what an arm's `tokens` promise; 0.3 means by 30 %.
    """

    arms: tuple[Arm, ...]
    contexts: tuple[int, ...]
    spread: float

    def __post_init__(self):
        if not isinstance(self.arms, tuple) or not self.arms or not all(isinstance(arm, Arm) for arm in self.arms):
            raise ValueError(f"arms must be a tuple of at least one Arm; got {reprlib.repr(self.arms)}.")
        kinds = [arm.kind for arm in self.arms]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"arms must differ; got {kinds}.")
        if any(arm.num_blocks for arm in self.arms) and not any(arm.num_blocks == 1 for arm in self.arms):
            raise ValueError("arms that draft shifted blocks need one of a single block beside them, for rounds that retained nothing.")
        is_typed = isinstance(self.contexts, tuple) and all(map(is_integer, self.contexts))
        if (
            not is_typed
            or not self.contexts
            or self.contexts[0] < 0
            or self.contexts[-1] > LARGEST
            or list(self.contexts) != sorted(set(self.contexts))
        ):
            raise ValueError(f"contexts must be a tuple of strictly rising integers of at least 0; got {self.contexts!r}.")
        if any(len(seconds) != len(self.contexts) for arm in self.arms for seconds in arm.seconds):
            raise ValueError(f"every arm must have seconds for each of the {len(self.contexts)} contexts.")
        if not (is_number(self.spread) and 0.001 <= self.spread <= 10):
            raise ValueError(f"spread must lie in 0.001..10; got {self.spread!r}.")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What a decoding round does; static under `jit`. Use a preset and override what you need.

    is_speculative: False means one target token a round and no drafter.
    retain: which rejected nodes' states condition shifted blocks in the next round.
    attach: where a shifted block joins the baseline: at the earliest token equal to its anchor (the paper's), at the one whose continuation
        agrees longest, at a random one, or at its own offset, whether or not the tokens match there.
    is_second_tried: a block whose anchor the baseline does not hold joins where it is the baseline's second choice.
    extent: what of shifted blocks is kept: `in_block` drops nodes beyond the baseline's end, `extension` all others.
    expand: which candidates are verified: `none` takes each block's own tokens; `marginal` the likeliest prefixes under the baseline's
        distributions (DDTree), `merge` those of the baseline and of all shifted blocks in one order.
    reliability: what a prefix that goes over to a shifted block is worth beside one that goes on in the baseline, from 0 (never) to 1.
    num_ranks: tokens of each slot that `expand` looks at; 0 means 16, or the vocabulary if that is smaller.
    max_offsets: most shifted blocks a round drafts; 0 means as many as the policy can retain (see `resolve`).
    num_nodes: trie capacity, anchor included; 0 means the block size for the plain chain, 64 with `expand`, else the tokens of all blocks,
        at most 256 and at most the square of the block size.
    draft_choice: how draft tokens are picked from drafter logits at temperature > 0: `coupled` draws them with the noise with which the
        target will draw at their place, `independent` with their own (the paper's), `argmax` takes the likeliest.
    min_confidence: blocks are cut before the first token that a drafter with a confidence head trusts less; 0 cuts nothing.
    steps_per_second: target passes per second with 1, 2, ... tokens (`confidence.read_cost_table`): blocks are cut where verifying more
        costs more than it is expected to bring; empty cuts nothing.
    schedule: arms among which each round takes the cheapest for what it promises (`bench.profiles` measures them); None takes max_offsets
        and num_nodes in every round.
    has_trace: the StepInfo of every round holds what was proposed and what the target said to each node (`statistics.Trace`).
    cache_length: most tokens (prompt + generated) a row can hold.
    prefill_chunk: prompt tokens a prefill pass takes; a multiple of 64.
    block_buckets, node_buckets: numbers of blocks and nodes at which a round is compiled besides the full ones (1 + max_offsets blocks,
        num_nodes nodes); the smallest that fits all rows is picked on the device. Each costs compile time and saves work in small rounds.
    """

    is_speculative: bool = True
    retain: RetainPolicy = "none"
    attach: AttachRule = "earliest"
    is_second_tried: bool = False
    extent: Extent = "both"
    expand: Expand = "none"
    reliability: float = 1.0
    num_ranks: int = 0
    max_offsets: int = 0
    num_nodes: int = 0
    draft_choice: DraftChoice = "coupled"
    min_confidence: float = 0.0
    steps_per_second: tuple[float, ...] = ()
    schedule: Schedule | None = None
    has_trace: bool = False
    cache_length: int = 1024
    prefill_chunk: int = 64
    block_buckets: tuple[int, ...] = (1, 4, 16)
    node_buckets: tuple[int, ...] = (16, 64, 128)

    def __post_init__(self):
        choices = {
            "retain": RETAIN_POLICIES,
            "attach": ATTACH_RULES,
            "extent": EXTENTS,
            "expand": EXPANSIONS,
            "draft_choice": DRAFT_CHOICES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")
        for name in ("is_speculative", "is_second_tried", "has_trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        for name in ("num_ranks", "max_offsets", "num_nodes", "cache_length", "prefill_chunk"):
            value = getattr(self, name)
            if isinstance(value, np.integer):  # `lengths.max() + 100` is one
                object.__setattr__(self, name, int(value))
            elif not is_integer(value):
                raise ValueError(f"{name} must be an integer; got {value!r}.")
        if self.is_second_tried and self.attach.startswith("original_offset"):
            raise ValueError(f"is_second_tried needs a rule that looks for tokens; attach={self.attach!r} places blocks by their offset.")
        if self.max_offsets < 0:
            raise ValueError(f"max_offsets must be 0 or more; got {self.max_offsets}.")
        if self.max_offsets and self.retain == "none":
            raise ValueError(
                f"max_offsets ({self.max_offsets}) needs retained states; set retain to one of {', '.join(RETAIN_POLICIES[1:])}."
            )
        self._check_expand()
        self._check_schedule()
        if self.retain == "none" and (self.attach != "earliest" or self.is_second_tried or self.extent != "both"):
            raise ValueError(
                "attach, is_second_tried and extent say what becomes of shifted blocks, and without retained states there are none; "
                f"set retain to one of {', '.join(RETAIN_POLICIES[1:])}, or leave them out."
            )
        if not 0 <= self.num_nodes <= _MOST_NODES:
            raise ValueError(f"num_nodes must lie in 0..{_MOST_NODES}, its masks are square; got {reprlib.repr(self.num_nodes)}.")
        if not self.is_speculative and (self.retain != "none" or self.num_nodes):
            raise ValueError("a config with is_speculative=False takes neither retain nor num_nodes; leave them out.")
        if not (is_number(self.min_confidence) and 0 <= self.min_confidence < 1):
            raise ValueError(f"min_confidence must lie in [0, 1); got {self.min_confidence!r}.")
        if not isinstance(self.steps_per_second, tuple) or not all(map(is_positive, self.steps_per_second)):
            raise ValueError(f"steps_per_second must be a tuple of positive numbers, all finite; got {self.steps_per_second!r}.")
        if self.is_cut and (self.is_second_tried or self.attach == "original_offset"):
            raise ValueError(
                "min_confidence and steps_per_second value a shifted block by the baseline token at its site, which these blocks "
                "replace; leave out is_second_tried and attach='original_offset', or the cut."
            )
        if self.min_confidence and self.steps_per_second:
            raise ValueError("min_confidence and steps_per_second both cut blocks; set one of them.")
        if not self.is_speculative and (self.min_confidence or self.steps_per_second):
            raise ValueError("a config with is_speculative=False drafts nothing to cut; leave out min_confidence and steps_per_second.")
        if not self.is_speculative and self.has_trace:
            raise ValueError("a config with is_speculative=False proposes nothing to trace; leave out has_trace.")
        if self.cache_length < 1:
            raise ValueError(f"cache_length must be at least 1; got {self.cache_length}.")
        if self.prefill_chunk < 1 or self.prefill_chunk % CACHE_CHUNK:
            raise ValueError(f"prefill_chunk must be a positive multiple of {CACHE_CHUNK}; got {self.prefill_chunk}.")
        for name in ("block_buckets", "node_buckets"):
            buckets = getattr(self, name)
            is_typed = isinstance(buckets, tuple) and all(map(is_integer, buckets))
            if not is_typed or (buckets and buckets[0] < 1) or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} must be a tuple of strictly rising positive integers; got {buckets!r}.")

    def _check_expand(self) -> None:
        if self.num_ranks < 0:
            raise ValueError(f"num_ranks must be 0 or more; got {self.num_ranks}.")
        if not (is_number(self.reliability) and 0 <= self.reliability <= 1):
            raise ValueError(f"reliability must lie in [0, 1]; got {self.reliability!r}.")
        if self.expand == "none" and self.num_ranks:
            raise ValueError(f"num_ranks ({self.num_ranks}) belongs to trees; set expand to marginal or merge, or leave it out.")
        if self.expand != "merge" and self.reliability != 1:
            raise ValueError(f"reliability ({self.reliability}) belongs to expand='merge'; set that, or leave it out.")
        if self.expand == "none":
            return
        if not self.is_speculative:
            raise ValueError(f"expand={self.expand!r} needs drafts; leave it out of a config with is_speculative=False.")
        if self.expand == "marginal" and self.retain != "none":
            raise ValueError(f"expand='marginal' drafts no shifted blocks, so retain={self.retain!r} has no use; take expand='merge'.")
        if self.expand == "merge" and self.retain == "none":
            raise ValueError(f"expand='merge' needs retained states; set retain to one of {', '.join(RETAIN_POLICIES[1:])}.")
        if self.attach != "earliest" or self.is_second_tried or self.extent != "both":
            raise ValueError(
                f"expand={self.expand!r} attaches blocks at every prefix that holds their anchor token; leave out attach, is_second_tried "
                "and extent."
            )
        if self.is_cut:
            raise ValueError(f"expand={self.expand!r} takes a number of nodes; leave out min_confidence and steps_per_second.")

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        if not isinstance(self.schedule, Schedule):
            raise ValueError(f"schedule must be a Schedule or None; got {reprlib.repr(self.schedule)}.")
        if self.expand != "merge":
            raise ValueError(f"a schedule picks among trees, so it needs expand='merge'; got {self.expand!r}; take the preset scheduled.")
        if self.has_trace:
            raise ValueError("a scheduled round may propose nothing, so it has no trace; leave out has_trace or the schedule.")

    @property
    def is_cut(self) -> bool:
        """Whether blocks are cut by the drafter's confidence."""
        return self.min_confidence > 0 or bool(self.steps_per_second)

    @classmethod
    def autoregressive(cls, **overrides) -> "DecodeConfig":
        """One target token a round: the baseline every claim is measured against."""
        return cls(**{"is_speculative": False, **overrides})

    @classmethod
    def dflash(cls, **overrides) -> "DecodeConfig":
        """The drafter's own chain: one block a round, nothing retained."""
        return cls(**overrides)

    @classmethod
    def reanchor(cls, **overrides) -> "DecodeConfig":
        """The paper's ReAnchor: states of the rejected baseline are retained, and every one of them drafts a shifted block."""
        return cls(**{"retain": "baseline", **overrides})

    @classmethod
    def ddtree(cls, num_nodes: int = 64, **overrides) -> "DecodeConfig":
        """DDTree: the likeliest num_nodes prefixes under the baseline block's distributions, anchor included.

        Unlike the paper, trees of two blocks or more take the chain of likeliest tokens first; num_ranks tokens of a slot count.
        """
        return cls(**{"expand": "marginal", "num_nodes": num_nodes, **overrides})

    @classmethod
    def reanchor_tree(cls, num_nodes: int = 64, **overrides) -> "DecodeConfig":
        """The likeliest num_nodes prefixes of the baseline block and of blocks shifted from its rejected states, in one order."""
        return cls(**{"expand": "merge", "retain": "suffix", "num_nodes": num_nodes, **overrides})

    @classmethod
    def scheduled(cls, schedule: Schedule, **overrides) -> "DecodeConfig":
        """Every round takes the arm that promises most tokens a second: a merged tree, a smaller one, the chain, or plain decoding."""
        if not isinstance(schedule, Schedule):
            raise ValueError(
                f"schedule must be a Schedule; got {type(schedule).__name__}; a Profile makes one: profile.schedule(num_rows)."
            )
        most_nodes = max(arm.num_nodes for arm in schedule.arms)
        offsets = max(arm.num_blocks for arm in schedule.arms) - 1
        sizes = {"num_nodes": 0 if most_nodes == 1 else most_nodes, "max_offsets": max(offsets, 1)}
        return cls(**{"expand": "merge", "retain": "suffix", "schedule": schedule, **sizes, **overrides})

    def resolve(self, block_size: int) -> "DecodeConfig":
        """Fill what depends on the drafter's block size B; a resolved config resolves to itself.

        A policy retains at most B-1 nodes (`baseline`, `suffix`), 2B-2 (`deepest`, `descendants`) or 3B-3 (`both`); with expand='merge' B/2
        unless told otherwise.
        A schedule that never drafts is plain decoding. Raises ValueError if num_nodes cannot hold the baseline block, for more max_offsets
        than that (of `descendants`: than nodes), and for arms of a schedule that do not fit.
        """
        if not self.is_speculative:
            return self
        if self.schedule is not None and not any(arm.num_blocks for arm in self.schedule.arms):
            return DecodeConfig.autoregressive(cache_length=self.cache_length, prefill_chunk=self.prefill_chunk)
        chains = {"none": 0, "baseline": 1, "suffix": 1, "deepest": 2, "both": 3, "descendants": 2}[self.retain]
        # of a merged tree the first offsets bring all of the gain: eight of blocks of 16 as much as fifteen
        offsets = self.max_offsets or (block_size // 2 if self.expand == "merge" else chains * (block_size - 1))
        default = 64 if self.expand != "none" else min(block_size * min(1 + offsets, block_size), 256)
        nodes = self.num_nodes or max(default, block_size)
        if nodes < block_size:
            raise ValueError(f"num_nodes ({nodes}) must hold the baseline block of {block_size} tokens; raise it to at least {block_size}.")
        most = nodes - 1 if self.retain == "descendants" else chains * (block_size - 1)
        if offsets > most:
            raise ValueError(
                f"max_offsets ({offsets}) exceeds the {most} nodes that retain={self.retain!r} can keep here; lower it, or leave it out."
            )
        for arm in () if self.schedule is None else self.schedule.arms:
            least = 1 if not arm.num_blocks else block_size
            if not least <= arm.num_nodes <= nodes or arm.num_blocks > 1 + offsets or (arm.is_chain and arm.num_nodes != block_size):
                raise ValueError(
                    f"an arm of the schedule ({arm.num_blocks} blocks, {arm.num_nodes} nodes) does not fit blocks of {block_size} tokens, "
                    f"{nodes} nodes and {offsets} offsets; measure a profile with this drafter, or raise num_nodes and max_offsets."
                )
        return replace(
            self,
            max_offsets=offsets,
            num_nodes=nodes,
            block_buckets=_with_full(self.block_buckets, 1 + offsets),
            node_buckets=_with_full(self.node_buckets, nodes),
        )


def _with_full(buckets: tuple[int, ...], full: int) -> tuple[int, ...]:
    return (*(size for size in buckets if size < full), full)
