"""`etude live plan`: how many accounts and tasks a release needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from etude.errors import UserError
from etude.evals.sequential import LookPlan, accounts_per_arm, defended_margin, plan_looks


def add(plan: argparse.ArgumentParser) -> None:
    """Flags of `etude live plan`."""
    plan.add_argument("--base", type=float, required=True, help="share of accounts that are satisfied now, e.g. 0.5")
    wanted = plan.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--lift", type=float, help="rise of that share to be shown, e.g. 0.05 for five points")
    wanted.add_argument("--accounts", type=int, help="accounts of each arm that there are; prints the lift they show")
    plan.add_argument("--alpha", type=float, default=0.05, help="probability of a false finding (default: 0.05)")
    plan.add_argument("--power", type=float, default=0.8, help="probability to find a true lift (default: 0.8)")
    plan.add_argument("--looks", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0], metavar="SHARE",
                      help="shares of the accounts after which to look, rising to 1 (default: quarters)")  # fmt: skip
    plan.add_argument("--tasks", type=int, help="tasks of the frozen suite; prints the margin that it can defend")
    plan.add_argument("--discordant", type=float, default=0.1, metavar="SHARE",
                      help="share of tasks that only one of two versions passes (default: 0.1)")  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints the plan. Raises UserError."""
    try:
        plan = plan_looks(arguments.looks, arguments.alpha, arguments.power)
        lift = arguments.lift if arguments.accounts is None else _smallest_lift(arguments, plan)
        accounts = accounts_per_arm(arguments.base, lift, plan)
    except ValueError as e:
        raise UserError(f"no such plan: {e}") from None
    figures: dict[str, Any] = {"lift": lift, "accounts_per_arm": accounts, "expected_share": plan.expected}
    looks = zip(plan.fractions, plan.bounds, strict=True)
    figures["looks"] = [{"accounts": round(share * accounts), "z": bound} for share, bound in looks]
    if arguments.tasks is not None:
        figures["margin"] = _margin(arguments.tasks, arguments.discordant, plan)
    print(f"A rise from {arguments.base:.1%} to {arguments.base + lift:.1%} is found with probability "
          f"{plan.power:.0%} by {accounts:,} accounts in each arm, {plan.inflation:.1%} of what one look at the end "
          f"takes; if it is true, by {plan.expected / plan.inflation:.0%} of them on average.")  # fmt: skip
    print("\n| look | accounts in each arm | better if z is above |\n|---|---|---|")
    for number, look in enumerate(figures["looks"], 1):
        print(f"| {number} | {look['accounts']:,} | {look['z']:.3f} |")
    if arguments.tasks is not None:
        print(f"\nA suite of {arguments.tasks:,} tasks, {arguments.discordant:.0%} of which one of two versions alone "
              f"passes, defends a margin of {100 * figures['margin']:.1f} points.")  # fmt: skip
    if arguments.json:
        print(json.dumps(figures))


def _margin(tasks: int, discordant: float, plan: LookPlan) -> float:
    if tasks < 1 or not 0 < discordant <= 1:
        raise UserError(
            f"a suite has tasks, and a share of them differs: got {tasks} tasks and a share of {discordant}"
        )
    return defended_margin(tasks, discordant, plan.alpha, plan.power)


def _smallest_lift(arguments: argparse.Namespace, plan: LookPlan) -> float:
    """The smallest lift in hundredths of a point that the accounts show. Raises ValueError, or UserError for none."""
    if arguments.accounts < 1:
        raise UserError(f"--accounts {arguments.accounts}: an arm has accounts")
    last = int((1 - arguments.base) * 10_000 - 1e-9)
    low, high = 0, max(0, last)
    if not high or accounts_per_arm(arguments.base, high / 10_000, plan) > arguments.accounts:
        raise UserError(f"{arguments.accounts:,} accounts in each arm show no lift from {arguments.base:.1%}; wait for "
                        f"more, or take a lower --power")  # fmt: skip
    while high - low > 1:
        middle = (low + high) // 2
        found = accounts_per_arm(arguments.base, middle / 10_000, plan) <= arguments.accounts
        low, high = (low, middle) if found else (middle, high)
    return high / 10_000
