"""Which plans cannot be: each rule is one function that returns None or a sentence, with the numbers and a way out. All
of them are asked before any rank starts."""

from __future__ import annotations

from collections.abc import Callable

from . import balance as dealing
from . import frozen
from .errors import PlanError, divisors, listed
from .facts import ModelFacts, ParameterFact
from .plan import Plan
from .precision import BITS
from .schedule import method, suitable
from .styles import style

Rule = Callable[[Plan, ModelFacts], str | None]


def degrees_make_the_ranks(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.ranks in (0, plan.world):
        return None
    rest = plan.tp * plan.pp
    if plan.ranks % rest == 0:
        way = f"set dp {plan.ranks // rest}, or start {plan.world} ranks"
    else:
        legal = listed(divisors(plan.ranks))
        way = f"start {plan.world} ranks, or choose degrees whose product is {plan.ranks} (each one of {legal})"
    product = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} = {plan.world}"
    return f"{product} ranks are described, but {plan.ranks} are asked for: {way}."


def batch_divides(plan: Plan, facts: ModelFacts) -> str | None:
    """A data parallel rank has as many rows as every other, and each of its microbatches at least one."""
    least = plan.dp * plan.microbatches
    if plan.batch < least:
        product = f"dp {plan.dp} x microbatches {plan.microbatches} = {least}"
        fewer, rest = divmod(plan.batch, plan.dp)
        way = f", or microbatches {fewer} or less" if fewer and not rest else ""
        return f"batch {plan.batch} < {product}: set batch {least}{way}."
    if plan.batch % plan.dp:
        above = -(-plan.batch // plan.dp) * plan.dp
        return f"batch {plan.batch} does not divide into dp {plan.dp} equal parts: set batch {above}."
    return None


def schedule_is_known(plan: Plan, facts: ModelFacts) -> str | None:
    try:
        if why := method(plan.schedule).no_run:
            return f"The schedule {plan.schedule} is for plait schedule only. It {why}."
        suitable(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    except PlanError as error:
        return str(error)
    return None


def limit_is_for_a_search(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.schedule_limit == 1 or method(plan.schedule).searched:
        return None
    return (
        f"schedule_limit {plan.schedule_limit:g} is the limit of a search, but {plan.schedule} is not searched for: "
        "set schedule auto, or schedule_limit 1."
    )


def blocks_fill_stages(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.stages <= facts.blocks:
        return None
    have, each = facts.blocks, plan.stages_per_rank
    if each > 1:
        fewer = (
            f"set pp {have // each} or less"
            if have >= each
            else f"set schedule 1f1b, chunks 0, pp {min(plan.pp, have)}"
        )
        return (
            f"pp {plan.pp} x {each} stages a rank = {plan.stages} stages need a block each, but the model has {have} "
            f"blocks: {fewer}."
        )
    return f"pp {plan.pp} stages need a block each, but the model has {have} blocks: set pp {have} or less."


def blocks_are_dealt(plan: Plan, facts: ModelFacts) -> str | None:
    return dealing.refusal(plan.balance, plan.stages, facts.blocks)


def tensors_can_be_cut(plan: Plan, facts: ModelFacts) -> str | None:
    """tp cuts attention by whole groups (one KV head and its query heads), or a KV head's query heads among the ranks
    that have a copy of it; MLPs by columns, the vocabulary by rows."""
    if plan.tp == 1:
        return None
    if all(parameter.style is None for parameter in facts.parameters):
        return (
            f"tp {plan.tp} cuts by a model's tensor plan, and a {facts.family} model has none: set tp 1, and pp or dp."
        )
    for parameter in facts.parameters:
        if parameter.style is not None:
            style(parameter.style, parameter.module)  # refuses what is not carried out, by name
        why = _uncut(parameter, facts, plan.tp)
        if why is not None:
            return f"{why}: this model takes tp {listed(legal_tp(facts))}."
    return None


def rows_can_be_cut(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.sp in ("auto", False):
        return None
    if facts.whole_rows:
        return f"sp deals the tokens of a row to tp ranks, but {facts.whole_rows}: set sp false."
    if plan.tp == 1:
        return "sp deals the tokens of a row to tp ranks, and tp is 1: set sp false, or tp 2 or more."
    if plan.seq < plan.tp:
        return f"sp deals the {plan.seq} tokens of a row to {plan.tp} ranks: set sp false, or seq {plan.tp} or more."
    return None


def _uncut(parameter: ParameterFact, facts: ModelFacts, tp: int) -> str | None:
    """Why so many ranks cannot each have something of a parameter."""
    for piece in parameter.pieces if parameter.cut is not None else ():
        if piece.quanta >= tp:
            continue
        if piece.grain is None:
            what = {facts.vocabulary: "vocabulary rows"}.get(piece.length, "columns")
            if piece.quantum > 1:
                what = "groups of heads, side by side,"
            return f"tp {tp} is more than the {piece.quanta} {what} of {parameter.name}"
        group = facts.heads // facts.kv_heads
        has = f"the {facts.kv_heads} KV heads ({facts.heads} heads in groups of {group}) of {parameter.name}"
        if tp % facts.kv_heads:
            return (
                f"tp {tp} is more than {has}, and no multiple of them, so that some would be on more ranks than others"
            )
        if tp > facts.heads:
            return f"tp {tp} is more than the {facts.heads} heads that read {has}"
    return None


def master_is_alone_with_its_ranks(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.dp_method == "ddp":
        return None
    if plan.dp == 1:
        return "dp_method master deals out to dp ranks, and dp is 1: set dp 2 or more."
    others = {
        "tp": 1, "pp": 1, "zero": 0, "loss_chunks": 1, "schedule": "1f1b", "chunks": 0, "split_backward": False,
        "data_order": "global", "reduce": "auto",
    }  # fmt: skip
    for field, value in others.items():
        given = getattr(plan, field)
        if given != value:
            return (
                f"dp_method master is the plain form alone, and {field} is {given}: set {field} "
                f"{str(value).lower() if isinstance(value, bool) else value}, or dp_method ddp."
            )
    return None


def orders_are_of_several(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.data_order == "global" or plan.dp > 1:
        return None
    return "data_order own gives each dp rank an order of its own, and dp is 1: set data_order global, or dp 2 or more."


def sequence_fits(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.seq <= facts.positions:
        return None
    have = facts.positions
    return f"seq {plan.seq} is longer than the {have} positions of this model: set seq {have} or less."


def shares_are_of_several(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.zero and plan.dp == 1:
        return f"zero {plan.zero} shares out what dp ranks hold copies of, and dp is 1: set dp 2 or more, or zero 0."
    if plan.replicas > 1:
        if not plan.zero:
            return (
                f"replicas {plan.replicas} is for zero 1 and above; without zero every dp rank is one: set replicas 1."
            )
        legal = [degree for degree in divisors(plan.dp) if degree < plan.dp]
        if plan.replicas not in legal:
            return (
                f"replicas {plan.replicas} does not leave 2 or more of dp {plan.dp} ranks to share: set replicas "
                f"{listed(legal)}."
            )
    for field, least, given in (("keep_gathered", 3, plan.keep_gathered), ("reduce_every", 2, plan.reduce_every)):
        if given != "auto" and plan.zero < least:
            return f"{field} {given} is for zero {least} and above, but zero is {plan.zero}: leave it auto."
    if plan.reduce_every == "microbatch" and (plan.stages_per_rank > 1 or plan.splits):
        return (
            f"reduce_every microbatch needs whole backwards of one stage a rank, but {plan.schedule} has "
            f"{plan.stages_per_rank} stages a rank{', each backward in two' * plan.splits}: set reduce_every step, or "
            "schedule 1f1b."
        )
    return None


def something_trains(plan: Plan, facts: ModelFacts) -> str | None:
    return frozen.refusal(plan.freeze, plan.train_only, facts)


def recomputation_has_something(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.recompute == "none" and plan.recompute_every > 1:
        return f"recompute_every {plan.recompute_every} chooses blocks, but recompute is none: set recompute full."
    if plan.recompute == "attention" and not facts.heads:
        return "recompute attention is for transformers, and a plain list's children are not known: set recompute full."
    return None


def loss_is_in_chunks(plan: Plan, facts: ModelFacts) -> str | None:
    if not plan.chunks_loss:
        return None
    given = f"loss_chunks {plan.loss_chunks}"
    if not facts.head:
        return f"{given} multiplies by a head's weight, and a plain list does not say which that is: set loss_chunks 1."
    if facts.whole_logits:
        return f"{given} never has whole logits, but {facts.whole_logits}: set loss_chunks 1."
    if plan.loss_at == "first":
        return f"{given} never has whole logits, but loss_at first sends them to another rank: set loss_at last."
    least = min(plan.microbatch_rows) * plan.seq
    if plan.loss_chunks > least:
        return f"{given} is more than the {least} tokens of a microbatch: set loss_chunks {least} or less."
    return None


def sums_keep_what_they_add(plan: Plan, facts: ModelFacts) -> str | None:
    compute, accumulate, reduce = plan.compute, plan.accumulates, plan.reduces
    if accumulate == "bf16" and compute != "bf16":
        return (
            f"accumulate bf16 keeps 8 bits of every sum, of gradients that compute {compute} gives "
            f"{BITS[compute]} bits: set accumulate fp32, or compute bf16."
        )
    if plan.dp == 1 and plan.reduce != "auto":
        return f"reduce {reduce} is for sums over dp ranks, and dp is 1: set reduce auto, or dp 2 or more."
    if reduce == "fp16" and compute != "fp16":
        return (
            f"reduce fp16 loses gradients below 6e-8 and above 65504, and compute {compute} does not scale its loss for "
            "that: set reduce bf16, or compute fp16."
        )
    return None


def scale_is_for_fp16(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.loss_scale == "dynamic" and not plan.skips:
        return (
            f"loss_scale dynamic follows what overflows in fp16, but compute is {plan.compute}, which reaches 3e38: set "
            "loss_scale auto, or compute fp16."
        )
    for field, value in (
        ("initial_loss_scale", plan.initial_loss_scale),
        ("loss_scale_window", plan.loss_scale_window),
    ):
        if not plan.scales_dynamically and value != Plan.model_fields[field].default:
            other = "set loss_scale dynamic" if plan.skips else "set compute fp16"
            way = f"leave it {Plan.model_fields[field].default:g}, or {other}"
            return f"{field} {value:g} is for a dynamic loss scale, but this one is {plan.first_loss_scale:g}: {way}."
    if not plan.skips and plan.max_skips != Plan.model_fields["max_skips"].default:
        return (
            f"max_skips {plan.max_skips} counts steps that overflow in fp16, but compute is {plan.compute}: leave it "
            f"{Plan.model_fields['max_skips'].default}, or set compute fp16."
        )
    return None


def warm_up_ends(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.epochs or plan.warmup <= plan.steps:
        return None
    return f"warmup {plan.warmup} is longer than the run of steps {plan.steps}: set warmup {plan.steps} or less."


def own_attention_drops_nothing(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.attention == "plait" or not facts.attention_dropout:
        return None
    return (
        f"attention own draws its dropout (attention_dropout {facts.attention_dropout}) in an order that depends on the "
        "layout: set attention plait, or attention_dropout 0 in the model's config."
    )


def tied_ends_are_cut_alike(plan: Plan, facts: ModelFacts) -> str | None:
    """Of one weight that two modules use a tp rank has one slice."""
    for parameter in facts.parameters if plan.tp > 1 else ():
        cuts = [style(name, module).cuts if name else "none" for module, name in parameter.tied]
        own = style(parameter.style, parameter.module).cuts if parameter.style else "none"
        if any(other != own for other in cuts):
            names = f"{parameter.style or 'no style'} and {parameter.tied[0][1] or 'no style'}"
            return (
                f"{parameter.module} and {parameter.tied[0][0]} use one weight, which their styles ({names}) cut in two "
                "ways: set tp 1."
            )
    return None


def model_can(plan: Plan, facts: ModelFacts) -> str | None:
    """What a family's class does not go with: a field with a value, or a degree above 1."""
    for choice, why in facts.cannot:
        field, _, value = choice.partition(" ")
        given = getattr(plan, field)
        if given == value or (not value and given > 1):
            return f"{field} {given} does not go with this {facts.family} model, {why}."
    return None


def evaluation_is_asked_for(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.eval_every or not plan.eval_data:
        return None
    return f"eval_data {plan.eval_data} is named, but eval_every 0 never reads it: set eval_every 50, say."


RULES: tuple[Rule, ...] = (
    degrees_make_the_ranks, schedule_is_known, limit_is_for_a_search, batch_divides, blocks_fill_stages,
    blocks_are_dealt, tensors_can_be_cut, rows_can_be_cut, shares_are_of_several, something_trains,
    recomputation_has_something,
    loss_is_in_chunks, master_is_alone_with_its_ranks, orders_are_of_several, sums_keep_what_they_add,
    scale_is_for_fp16, sequence_fits, warm_up_ends, own_attention_drops_nothing, evaluation_is_asked_for,
    tied_ends_are_cut_alike, model_can,
)  # fmt: skip


def legal_tp(facts: ModelFacts) -> list[int]:
    """Every tp degree up to 64 with which each rank has something of whatever the model's tensor plan cuts."""
    return [t for t in range(1, 65) if all(_uncut(parameter, facts, t) is None for parameter in facts.parameters)]


def validate(plan: Plan, facts: ModelFacts) -> None:
    """Raises a `PlanError` with the first rule's sentence that does not hold."""
    for rule in RULES:
        sentence = rule(plan, facts)
        if sentence:
            raise PlanError(sentence)
