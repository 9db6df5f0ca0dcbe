"""The division of a batch over ranks: each row once, equal numbers of passes, the budget, balance."""

import numpy as np
import pytest

from etude.trainer.rl.balance import divided
from etude.trainer.rl.plan import Shape, TokenRows, passes_of

SHAPE = Shape(pair=2e-4, head=0.05)
BUDGET = 4096


def rows(seed, groups=16, members=8, common=0):
    """Groups of rows of log-normal lengths (median 400 tokens), which share a prompt of `common` tokens."""
    noise = np.random.default_rng(seed)
    ids, sampled = [], []
    for _ in range(groups):
        prompt = noise.integers(0, 1000, common or 1 + int(noise.lognormal(4, 0.5)))
        for length in noise.lognormal(6, 0.7, members).astype(int) + 1:
            ids.append(np.concatenate([prompt, noise.integers(0, 1000, length)]))
            sampled.append(np.arange(len(prompt), len(prompt) + length))
    return TokenRows(tuple(ids), tuple(sampled))


def every_row(division):
    return sorted(row for rank in division.passes for some in rank for row in some)


@pytest.mark.parametrize("execution", ["packed", "rows"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_work_is_balanced(seed, ranks, execution):
    tokens = rows(seed)
    division = divided(tokens, execution, BUDGET, SHAPE, ranks)
    assert division == divided(tokens, execution, BUDGET, SHAPE, ranks), "each rank computes the same"
    assert every_row(division) == list(range(len(tokens.rows)))
    assert len(division.passes) == ranks
    assert len({len(passes) for passes in division.passes}) == 1
    assert division.imbalance <= 1.1
    if execution == "packed":
        costs = [passes_of(tokens, execution, passes, SHAPE).cost for passes in division.passes]
        assert max(cost.work for cost in costs) <= 1.1 * np.mean([cost.work for cost in costs]), "as passes are built"
        assert max(cost.held for cost in costs) <= max(BUDGET, *map(len, tokens.rows))


@pytest.mark.parametrize("common", [32, 2000])
def test_shared_prompts_are_computed_together_where_that_is_cheaper(common):
    """With a long prompt, rows of a group that are apart cost more than imbalance does."""
    tokens = rows(3, groups=8, members=4, common=common)
    division = divided(tokens, "packed", BUDGET, SHAPE, 4)
    assert every_row(division) == list(range(len(tokens.rows)))
    computed = sum(passes_of(tokens, "packed", passes, SHAPE).cost.tokens for passes in division.passes)
    least = tokens.tree().graph.length
    assert computed <= 1.35 * least


def test_a_row_beyond_the_budget_has_a_pass():
    noise = np.random.default_rng(0)
    lengths = (50, 9000, 70, 20, 30)
    tokens = TokenRows(tuple(noise.integers(0, 1000, n) for n in lengths), tuple(np.arange(1, n) for n in lengths))
    division = divided(tokens, "packed", 100, SHAPE, 2)
    assert every_row(division) == list(range(5))
    assert len({len(passes) for passes in division.passes}) == 1


@pytest.mark.parametrize("execution", ["packed", "rows"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_rows_than_ranks(execution, count):
    some = rows(1).some(range(count))
    division = divided(some, execution, BUDGET, SHAPE, 4)
    assert every_row(division) == list(range(count))
    assert len({len(passes) for passes in division.passes}) == 1
    assert len(division.passes[0]) == bool(count), "no rank waits for passes that nobody needs"
    for passes in division.passes:
        parts = passes_of(some, execution, passes, SHAPE).parts
        assert all(len(part.ids_T) for part in parts), "a pass has a token, of weight zero if it has no row"
