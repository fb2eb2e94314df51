"""One run, described: what the user writes (flags or TOML), what the engine runs.

The fields are the flags, the keys of a configuration file and the words of the documentation. Which combinations cannot
be is said in rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from . import balance as dealing
from . import frozen
from .errors import PlanError, listed, nearest
from .facts import ModelFacts, ParameterFact
from .layout import balanced
from .mesh import AXES, Mesh
from .schedule import RUNS, make, method, placement_with_loss

LocalTransport = Literal["auto", "shared", "torch"]


class Plan(BaseModel):
    """A run. Rows are sequences of `seq` tokens; `batch` counts the rows of one step over all ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, strict=True, allow_inf_nan=False)

    model: str = Field(
        "llama-tiny", description="A preset, a directory with a config.json (and weights, if it has any), or a hub id."
    )
    data: str = Field(
        "stdlib",
        description="A text file, a directory of text files, or 'stdlib' (Python's own sources).",
    )
    vocabulary: int = Field(
        0, ge=0, description="Rows of the vocabulary, to add some to those that the model has, drawn; 0: its own."
    )
    tokenizer: Literal["auto", "model", "bpe", "bytes"] = Field(
        "auto",
        description="The model's own, BPE trained once on the data, or plain bytes; auto: the model's own when its "
        "weights are real, else bpe.",
    )
    packing: Literal["stream", "sorted"] = Field(
        "stream", description="Rows cut from the documents as they come, or whole documents, in steps of even cost."
    )
    data_order: Literal["global", "own"] = Field(
        "global", description="One order of the rows, dealt to the dp ranks, or one for each, through all of the data."
    )
    ranks: int = Field(0, ge=0, description="How many ranks; 0: dp x tp x pp.")
    dp: int = Field(1, ge=1, description="Data parallel degree.")
    dp_method: Literal["ddp", "master"] = Field(
        "ddp", description="How dp ranks share their work: as equals, or for comparison all through rank 0."
    )
    tp: int = Field(1, ge=1, description="Tensor parallel degree.")
    sp: bool | Literal["auto"] = Field(
        "auto",
        description="Sequence parallelism: between attention and MLP each tp rank has its own tokens of every row; "
        "auto: where the model allows it and tp divides seq.",
    )
    pp: int = Field(1, ge=1, description="Pipeline parallel degree.")
    zero: int = Field(
        0,
        ge=0,
        le=3,
        description="What dp ranks share out, not copy: 1 optimizer state, 2 gradients too, 3 weights too.",
    )
    replicas: int = Field(
        1,
        ge=1,
        description="ZeRO: how many times the dp ranks have everything between them; each is cut over the rest.",
    )
    keep_gathered: Literal["auto", "yes", "no"] = Field(
        "auto", description="ZeRO-3: whether weights stay gathered until the step ends; auto: in pipelines of several "
        "microbatches."
    )  # fmt: skip
    reduce_every: Literal["auto", "step", "microbatch"] = Field(
        "auto", description="ZeRO-2 and -3: when gradients are summed, and let go; auto: a step in pipelines, else a "
        "microbatch."
    )  # fmt: skip
    schedule: str = Field("1f1b", description=f"Pipeline schedule: {listed(RUNS)}.")
    chunks: int = Field(0, ge=0, description="Pipeline stages on each rank; 0: the least that the schedule takes.")
    schedule_limit: float = Field(
        1.0,
        gt=0,
        description="auto: what a rank may keep for backward, as a multiple of what 1f1b's fullest rank keeps.",
    )
    loss_at: Literal["last", "first"] = Field(
        "last", description="Pipeline rank that computes the loss: the last, or for comparison the first."
    )
    split_backward: bool = Field(
        False, description="Part every backward in two also where the schedule does not ask for it, to time the halves."
    )
    balance: str = Field(
        "uniform",
        description="What is even over the stages: blocks (uniform), parameters or cost; or each one's blocks: 5,6,6,5.",
    )
    microbatches: int = Field(1, ge=1, description="Microbatches a step on each data parallel rank.")
    recompute: Literal["none", "full", "attention"] = Field(
        "none", description="What backward computes again and forward does not keep: blocks, or their attention."
    )
    recompute_every: int = Field(1, ge=1, description="Which blocks are recomputed: every so many, from the first on.")
    loss_chunks: int = Field(
        1,
        ge=1,
        description="In how many parts, one after the other, a microbatch's logits are made and let go; 1: all at once.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of each target that is spread over the whole vocabulary; 0: none."
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared logarithm of the soft-max's sum, which keeps logits small; 0: none.",
    )
    freeze: str = Field(
        "", description="Parameters that are not trained: patterns of names, 'model.embed_tokens.*,*norm*' say."
    )
    train_only: str = Field("", description="The only parameters that are trained, likewise; what freeze names is not.")
    batch: int = Field(8, ge=1, description="Rows in one step, over all ranks.")
    seq: int = Field(128, ge=1, description="Tokens in a row.")
    steps: int = Field(50, ge=1, description="Optimizer steps; the data starts over in a new order when it ends.")
    epochs: int = Field(0, ge=0, description="Passes over the data, in place of steps (0: count steps).")
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Shape of the decay after warm-up."
    )
    warmup: int = Field(0, ge=0, description="Steps in which the learning rate rises to its peak.")
    lr_floor: float = Field(0.1, ge=0, le=1, description="Last learning rate as a share of the peak.")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's decay; norms and biases have none.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second moment.")
    clip: float = Field(1.0, ge=0, description="Largest global gradient norm (0: no clipping).")
    compute: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Type of compute; the optimizer's weights and their state stay fp32."
    )
    accumulate: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Type in which gradients are kept and added up; auto: fp32."
    )
    reduce: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Type in which gradients are summed over ranks; auto: the one in which they are kept."
    )
    loss_scale: str = Field(
        "auto",
        description="What the loss is multiplied by for backward: a number, or dynamic; auto: dynamic in fp16, else 1.",
    )
    initial_loss_scale: float = Field(
        2.0**16, ge=1, le=2.0**24, description="dynamic: the loss scale of the first step."
    )
    loss_scale_window: int = Field(
        2000, ge=1, description="dynamic: steps in a row without overflow after which the loss scale doubles."
    )
    max_skips: int = Field(
        20, ge=1, description="fp16: steps in a row that may overflow, and are skipped, before the run ends."
    )
    attention: Literal["plait", "own"] = Field(
        "plait", description="plait's attention, or the model's own as transformers writes it."
    )
    bucket_mb: float = Field(25.0, gt=0, description="Megabytes of gradient reduced over dp in one call.")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations on held-out text (0: none).")
    eval_share: float = Field(
        0.01, gt=0, lt=1, description="Share of the documents that is held out when eval_every asks for it."
    )
    eval_data: str = Field("", description="A text to evaluate on in the place of a held-out share: as for data.")
    sample_every: int = Field(0, ge=0, description="Steps between samples of text from the prompts (0: none).")
    save_every: int = Field(
        0, ge=0, description="Steps between checkpoints, of which the last step leaves one, too (0: none)."
    )
    keep: int = Field(2, ge=0, description="How many checkpoints stay, the newest (0: all).")
    save_method: Literal["async", "sync"] = Field(
        "async", description="Who writes checkpoints: a process beside each rank, from a copy, or the rank itself."
    )
    seed: int = Field(7, ge=0, description="Seed of the weights and of the data's order.")
    hang_timeout: float = Field(600.0, gt=0, le=1e6, description="Seconds for which a rank may wait for others.")
    comm_check: bool = Field(False, description="Compare every call with the other ranks' before it is made.")
    local_transport: LocalTransport = Field(
        "auto",
        description="What carries bytes between CPU ranks of one host: memory that they share, or torch.distributed "
        "(Gloo); auto: shared memory where it can be.",
    )

    @field_validator("model", "data")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if not value:
            raise ValueError("give a name")
        return value

    @field_validator("sp", mode="before")
    @classmethod
    def _is_yes_or_no(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "auto":
            raise ValueError("give true, false or auto")
        return value

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _is_a_scale(cls, value: Any) -> str:
        """As it is written: a number in a file of keys is as good as one in a flag."""
        text = str(value)
        if text not in ("auto", "dynamic"):
            try:
                number = 0.0 if isinstance(value, bool) else float(text)
            except ValueError:
                number = 0.0
            if not 0 < number < inf:
                raise ValueError("give a number above 0, dynamic or auto")
        return text

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple((axis, getattr(self, axis)) for axis in AXES), self.replicas)

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def stages_per_rank(self) -> int:
        return self.chunks or method(self.schedule).chunks[0]

    @property
    def stages(self) -> int:
        """The pipeline's stages that have blocks: pp ranks with so many each."""
        return self.pp * self.stages_per_rank

    @property
    def placement(self) -> tuple[int, ...]:
        """The place on the pp axis of every stage: those with blocks, then the loss's where it is one of its own."""
        placement = method(self.schedule).place(self.pp, self.stages_per_rank)
        return placement_with_loss(placement) if self.loss_at == "first" else placement

    @property
    def loss_stage(self) -> int:
        """The stage that has the loss: the last with blocks, or one of its own after it."""
        return len(self.placement) - 1

    @property
    def microbatch_rows(self) -> tuple[int, ...]:
        """The rows of every microbatch of a data parallel rank: they differ by at most one, larger first."""
        spans = (balanced(self.batch // self.dp, self.microbatches, number) for number in range(self.microbatches))
        return tuple(stop - start for start, stop in spans)

    @property
    def accumulates(self) -> str:
        """The type in which gradients are kept and added up."""
        return "fp32" if self.accumulate == "auto" else self.accumulate

    @property
    def reduces(self) -> str:
        """The type in which gradients are summed over ranks."""
        return self.accumulates if self.reduce == "auto" else self.reduce

    @property
    def skips(self) -> bool:
        """Whether a step that overflows is skipped, and not the run's end: what fp16 cannot hold may be the scale's."""
        return self.compute == "fp16"

    @property
    def scales_dynamically(self) -> bool:
        return self.loss_scale == "dynamic" or (self.loss_scale == "auto" and self.skips)

    @property
    def first_loss_scale(self) -> float:
        """What the first step multiplies its loss by."""
        if self.scales_dynamically:
            return self.initial_loss_scale
        return 1.0 if self.loss_scale == "auto" else float(self.loss_scale)

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @property
    def keeps_gathered(self) -> bool:
        """Whether ZeRO-3 gathers a unit once a step, and not for every forward and backward."""
        if self.keep_gathered != "auto":
            return self.keep_gathered == "yes"
        return self.pp > 1 and self.microbatches > 1

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients leave after each microbatch, and whole ones are never kept."""
        if self.zero < 2:
            return False
        if self.reduce_every != "auto":
            return self.reduce_every == "microbatch"
        return self.stages == 1 and not self.splits

    @property
    def splits(self) -> bool:
        """Whether backwards are in two halves, or may be where the schedule is searched for."""
        if self.split_backward or method(self.schedule).searched:
            return True
        return make(self.schedule, self.pp, self.microbatches, self.chunks).splits

    def recomputes(self, block: int | None) -> bool:
        """Whether backward computes a block (or its attention) again."""
        return self.recompute != "none" and block is not None and block % self.recompute_every == 0

    def trains(self, fact: ParameterFact) -> bool:
        """Whether a parameter is trained, and not frozen."""
        return frozen.trains(self.freeze, self.train_only, fact)

    @property
    def chunks_loss(self) -> bool:
        """Whether logits are made for some tokens at a time, and never kept."""
        return self.loss_chunks > 1

    def tokens_at_once(self, tokens: int) -> list[int]:
        """How many of a microbatch's tokens each chunk of its loss has: they differ by at most one, larger first."""
        count = min(self.loss_chunks, tokens)
        return [stop - start for start, stop in (balanced(tokens, count, number) for number in range(count))]

    @property
    def held_out(self) -> float:
        """The share of the documents that training does not read."""
        return self.eval_share if self.eval_every and not self.eval_data else 0.0

    def __init__(self, *, source: str = "the plan", **values: Any) -> None:
        """Unknown keys and impossible values are a `PlanError`: one sentence that begins with `source`."""
        for key in values:
            if key not in type(self).model_fields:
                raise PlanError(f"{source} has an unknown key '{key}'.{nearest(key, type(self).model_fields)}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            why = first["msg"].lower().removeprefix("value error, ")
            raise PlanError(f"{source}: {first['loc'][0]} cannot be {first['input']!r}: {why}.") from None

    @classmethod
    def read(cls, values: Mapping[str, Any], *, source: str = "the plan") -> Plan:
        """A plan from keys and values that stand in `source`."""
        if "source" in values:  # a key of no plan, and the name of a parameter here
            raise PlanError(f"{source} has an unknown key 'source'.")
        return cls(source=source, **values)


def stage_blocks(plan: Plan, facts: ModelFacts) -> list[tuple[int, int]]:
    """(first, one after the last) block of every stage that has any, as the plan's balance deals them (balance.py)."""
    if plan.balance == dealing.UNIFORM:
        return [balanced(facts.blocks, plan.stages, stage) for stage in range(plan.stages)]
    sizes = dealing.written(plan.balance)
    if sizes is None:
        sizes = dealing.dealt(dealing.weights(facts, plan.balance, plan.seq), plan.stages)
    return list(pairwise([0, *accumulate(sizes)]))


def cuts_rows(plan: Plan, facts: ModelFacts) -> bool:
    """Whether tp ranks have tokens of their own between the branches of blocks."""
    if plan.sp == "auto":
        return plan.tp > 1 and not facts.whole_rows and plan.seq % plan.tp == 0
    return plan.sp


def tokens_at(plan: Plan, facts: ModelFacts, seq: int) -> tuple[int, ...]:
    """How many tokens of a row each place of tp has between blocks: all, or with sp so many, larger first."""
    if not cuts_rows(plan, facts):
        return (seq,) * plan.tp
    return tuple(stop - start for start, stop in (balanced(seq, plan.tp, place) for place in range(plan.tp)))


def width_after(plan: Plan, facts: ModelFacts, stage: int, *, tp: int) -> int:
    """What a stage gives to the next, in elements a token at a place `tp` of that axis: hidden states, or from the last
    stage that has blocks the logits, which stay cut."""
    if stage < plan.stages - 1:
        return facts.widths[stage_blocks(plan, facts)[stage][1] - 1] if facts.widths else facts.hidden
    if plan.tp == 1 or facts.head_weight.cut is None:
        return facts.vocabulary
    start, stop = balanced(facts.vocabulary, plan.tp, tp)
    return stop - start


def shape_after(plan: Plan, facts: ModelFacts, stage: int, *, rows: int, seq: int, tp: int) -> tuple[int, int, int]:
    """Of what a stage gives to the next for a microbatch of `rows` of `seq` tokens. The last one that has blocks gives
    all of its tokens."""
    tokens = tokens_at(plan, facts, seq)[tp] if stage < plan.stages - 1 else seq
    return rows, tokens, width_after(plan, facts, stage, tp=tp)


def stage_of_block(plan: Plan, facts: ModelFacts, block: int) -> int:
    for stage, (start, stop) in enumerate(stage_blocks(plan, facts)):
        if start <= block < stop:
            return stage
    raise ValueError(f"block {block} is not among {facts.blocks}")
