"""check_replicas and check_consistent: errors instead of ranks that silently train different models."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from .digest import dtype_text
from .errors import ShardInitError
from .exchange import Exchange
from .holdings import holdings_of
from .merge import Tables, exchange_tables, merged, show_ranks
from .mismatch import raise_for_mismatches
from .program import Played
from .stream import resolve_seed

if TYPE_CHECKING:
    from .plan import Entry, Plan

_MOST_SHOWN = 10


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_SHOWN])
    return shown + (f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else "")


def _check_lists(exchange: Exchange, lists: list[set[str]], list_of_rank: list[int], what: str) -> None:
    """Ranks list the same tensors, or have none in common (pipeline stages)."""
    for a in range(len(lists)):
        for b in range(a):
            if lists[a] == lists[b] or not lists[a] & lists[b]:
                continue
            ranks_a, ranks_b = (
                show_ranks(exchange.global_ranks([rank for rank, number in enumerate(list_of_rank) if number == one]))
                for one in (a, b)
            )
            lacking = lists[b] - lists[a] or lists[a] - lists[b]
            has, lacks = (ranks_b, ranks_a) if lists[b] - lists[a] else (ranks_a, ranks_b)
            raise ShardInitError(
                f"{exchange.what}: ranks of the group must {what} the same tensors, or none in common as the stages "
                f"of a pipeline; but ranks {has} {what} {_listed(list(lacking))}, which ranks {lacks} lack. Where "
                "stages share tensors, pass the group of the ranks that replicate one another."
            )


def _check_tables(exchange: Exchange, tables: Tables) -> None:
    lists = [{name for names, _, _ in table for name in names} for table in tables.tables]
    _check_lists(exchange, lists, tables.table_of_rank, "hold")


def check_replicas(model: Any, group: Any = None, *, timeout: float | None = None) -> None:
    """Checks that ranks which hold the same elements of a tensor hold the same bits: DDP and HSDP replicas,
    replicated DTensors, data-parallel tables, buffers.

    Costs what a fingerprint costs: digests of the local memory, a header and 40 bytes for each tensor. Buffers that a
    state_dict leaves out count.

    Args:
        model: a model, a state dict or a tensor, as for fingerprint. Every rank of the group must call.
        group: None is the default group. Ranks must list the same tensors, or none in common.
        timeout: seconds that each of the collectives may take, 120 by default.

    Raises:
        ReplicaMismatchError: names each tensor, the ranks on each side, and the first element that differs.
        ShardInitError: a rank is missing, fails, or lists other tensors, dtypes or shapes.
    """
    exchange = Exchange("check_replicas", group, timeout=timeout)
    holdings, tables = exchange_tables(exchange, lambda: holdings_of(model, non_persistent=True))
    differing, count = [], 0
    for tensor in merged(exchange, tables):
        count += 1
        if not tensor.agrees:
            differing.append(tensor)
    _check_tables(exchange, tables)
    raise_for_mismatches(exchange, holdings, differing, count)


def _program_text(entry: Entry) -> str:
    """What decides a tensor's values, on any machine. Exact steps count by the bits of their numbers."""
    program = entry.program
    steps = getattr(program, "steps", None)
    if steps is not None:
        return ";".join(f"{step.region}{step.op}{step.bits.hex()}" for step in steps)
    if isinstance(program, Played):
        constants = [
            (key, hashlib.sha256(data.numpy().tobytes()).hexdigest()) for key, data in sorted(program.constants.items())
        ]
        return repr((program.ops, program.out, program.num_bytes, constants))
    return program.describe()


def plan_digests(plan: Plan) -> dict[str, str]:
    """A digest of each entry's name, aliases, shape, dtype and program; equal plans have equal ones."""
    return {
        entry.name: hashlib.sha256(
            repr((entry.aliases, entry.kind, entry.shape, dtype_text(entry.dtype), _program_text(entry))).encode()
        ).hexdigest()[:16]
        for entry in plan.entries.values()
    }


def _played(plan: Plan) -> bool:
    return any(isinstance(entry.program, Played) for entry in plan.entries.values())


def check_consistent(
    model: nn.Module,
    seed: int | None = None,
    plan: Plan | None = None,
    group: Any = None,
    *,
    timeout: float | None = None,
) -> None:
    """Checks, before or after an init, that the ranks make one model: equal seeds, plans and stream versions, the same
    tensors in the model, and, where the plan plays tensors with torch's own operations, equal torch builds and CPU
    capabilities.

    Costs one all_gather of 40 bytes where everything is equal.

    Args:
        model: may still be on meta. Every rank of the group must call.
        seed: as for init_model_; None is the process default.
        plan: what record(model) gave; None records it here.
        group: None is the default group. Models may be stages of a pipeline: then they have no tensor in common.
        timeout: seconds that each of the collectives may take, 120 by default.

    Raises:
        ShardInitError: a rank is missing or fails, or something differs; it says what, with each side's ranks.
    """
    from .record import record

    exchange = Exchange("check_consistent", group, timeout=timeout)
    failure: Exception | None = None
    facts: dict[str, Any] = {}
    digests: dict[str, str] = {}
    try:
        key = resolve_seed(seed, warn_for="check_consistent")
        plan = record(model) if plan is None else plan
        digests = plan_digests(plan)
        names = sorted({name for one in holdings_of(model, non_persistent=True) for name in one.names})
        facts = {"seed": key, "stream version": plan.stream_version, "names": names}
        if _played(plan):
            facts["torch build"] = f"{torch.__version__} ({torch.version.git_version})"
            facts["CPU capability"] = torch.backends.cpu.get_cpu_capability()
    except Exception as error:  # the others must hear of it, whatever it is
        failure = error
    own = {"failed": f"{type(failure).__name__}: {failure}" if failure else "", "facts": facts, "plan": digests}
    texts, number_of_rank = exchange.gather_distinct(json.dumps(own, sort_keys=True).encode())
    distinct = [json.loads(text) for text in texts]
    answers = [distinct[number] for number in number_of_rank]
    if failure is not None:
        raise failure
    failed = [rank for rank, answer in enumerate(answers) if answer["failed"]]
    if failed:
        raise ShardInitError(
            f"check_consistent: every rank must be able to take part, but ranks {_shown(exchange, failed)} failed: "
            f"{answers[failed[0]]['failed']}"
        )
    problems = []
    for fact in ("seed", "stream version", "torch build", "CPU capability"):
        sides = _sides({rank: answer["facts"].get(fact, "none needed") for rank, answer in enumerate(answers)})
        if len(sides) > 1:
            shown = ", ".join(f"{value} on ranks {_shown(exchange, ranks)}" for value, ranks in sides.items())
            problems.append(f"{fact}: {shown}")
    if len(distinct) > 1:
        problems += _plan_problems(exchange, [answer["plan"] for answer in answers])
    if problems:
        raise ShardInitError("check_consistent: the ranks must agree, but differ in " + "; ".join(problems))
    _check_lists(exchange, [set(answer["facts"]["names"]) for answer in distinct], number_of_rank, "hold")


def _shown(exchange: Exchange, ranks: list[int]) -> str:
    return show_ranks(exchange.global_ranks(ranks))


def _sides(value_of_rank: dict[int, Any]) -> dict[Any, list[int]]:
    """The ranks of each value, most first."""
    found: dict[Any, list[int]] = {}
    for rank, value in value_of_rank.items():
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _plan_problems(exchange: Exchange, plans: list[dict[str, str]]) -> list[str]:
    """Entries that differ between plans that have them; plans of pipeline stages need not have the same ones."""
    names = sorted(set().union(*plans))
    problems = []
    for name in names:
        sides = _sides({rank: plan[name] for rank, plan in enumerate(plans) if name in plan})
        if len(sides) > 1:
            shown = " | ".join(_shown(exchange, side) for side in sides.values())
            problems.append(f"the plan of {name} (ranks {shown})")
    if len(problems) > _MOST_SHOWN:
        problems = [*problems[:_MOST_SHOWN], f"and {len(problems) - _MOST_SHOWN} more plans"]
    return problems
