"""Slices of tensors in a process's memory: which elements they are, where they lie, and what they add to the digest."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.vllm.workers import Workers, whole_tensors
from etude.weights.slabs import counted, joined, patterns, slab_of, whole
from etude.weights.ulpd.chunk_grid import schema_of
from etude.weights.ulpd.digest import digest_part, weights_digest
from tests.helpers.forked_ranks import run
from tests.helpers.small_tensors import sliced, tensors


@st.composite
def views(draw):
    """The shape of a tensor, a view of its elements' numbers, and memory of that shape with strides of its own."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    numbers = torch.arange(int(np.prod(shape))).view(shape)
    view = numbers
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else 0
        kind = draw(st.sampled_from(["narrow", "select", "transpose", "split", "skip"]))
        if not view.dim():
            break
        size = view.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "select":
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "split" and size % 2 == 0:
            view = view.unflatten(dim, (2, size // 2))
        elif kind == "skip" and size > 1:
            view = view.unflatten(dim, (size, 1)).squeeze(dim + 1)
    order = draw(st.permutations(range(view.dim())))
    outer = [view.shape[i] for i in order]
    room = [size + draw(st.integers(0, 2)) for size in outer]
    memory = torch.full((int(np.prod(room)) + 3,), -1, dtype=torch.int64)[2:]
    memory = memory[: int(np.prod(room))].view(room)
    for dim, size in enumerate(outer):
        memory = memory.narrow(dim, 0, size)
    return shape, view, memory.permute([order.index(i) for i in range(view.dim())])


@given(views())
@settings(max_examples=300, deadline=None)
def test_a_slab_is_the_copy_that_it_was_made_of(case):
    shape, view, memory = case
    slab = slab_of(view, memory)
    assert slab is not None
    memory.copy_(view)  # each element's number
    numbers = torch.arange(int(np.prod(shape)))
    assert torch.equal(slab.of(numbers), slab.memory)
    inside, places = slab.locate(numbers.numpy())
    assert sorted(numbers.numpy()[inside].tolist()) == sorted(view.flatten().tolist())
    assert np.array_equal(slab.flat.numpy()[places], numbers.numpy()[inside])


@given(views())
@settings(max_examples=100, deadline=None)
def test_the_digests_of_single_elements_add_up_to_a_slabs(case):
    shape, view, memory = case
    values = torch.randn(shape).bfloat16()
    (spec,) = schema_of({"a": values}).tensors
    room = torch.empty_strided(memory.shape, memory.stride(), dtype=torch.bfloat16)
    slab = slab_of(view, room)
    slab.memory.copy_(slab.of(values))
    each = [digest_part(spec, values.view(-1)[i : i + 1], i) for i in view.flatten().tolist()]
    assert slab.digest(spec) % 2**64 == sum(each) % 2**64


def test_pieces_that_follow_each_other_are_one():
    tensor, memory = torch.empty(4, 6, 5), torch.empty(4, 6, 5)
    rows = [slab_of(tensor[e, i:stop], memory[e, i:stop]) for e in range(4) for i, stop in ((0, 2), (2, 5), (5, 6))]
    assert [slab.pattern for slab in joined(rows[::-1])] == [(0, (1,), (120,))]
    columns = [slab_of(tensor[e, :, 2:], memory[e, :, 1:4]) for e in range(4)]
    assert [slab.pattern for slab in joined(columns)] == [(2, (5, 1), (24, 3))]
    others = [slab_of(tensor[e, 1:3], memory[3 - e, :2]) for e in range(4)]
    assert len(joined(others)) == 4, "they lie in another order"


def test_an_element_counts_once_of_several_workers():
    tensor = torch.randn(8, 6).bfloat16()
    lives = [{"a": sliced(tensor, 1, rank, 2), "b": whole(tensor)} for rank in range(2)]
    words = [patterns(live) for live in lives]
    one, two = (counted(live, words, rank) for rank, live in enumerate(lives))
    assert [part.slabs[0].counted for part in (one["a"], one["b"], two["a"], two["b"])] == [True, True, True, False]
    with pytest.raises(ValueError, match="has 24 of 48 elements of a"):
        counted(lives[0], words[:1], 0)
    both = {"a": whole(tensor), "b": whole(tensor)}
    with pytest.raises(ValueError, match="has some elements of a in several places"):
        counted(both, [words[0], patterns(both)], 1)


def agreed(rank: int, count: int):
    """What a worker counts of tensors that it holds by columns, rows or as a whole, and the whole tensors."""
    of_all = tensors(3) | {"rows": tensors(4)["b"]}

    def watch():
        cuts = {"b": 1, "rows": 0}
        return {n: sliced(t, cuts[n], rank, count) if n in cuts else whole(t.clone()) for n, t in of_all.items()}

    workers = Workers(rank, count)
    live = workers.counted(watch)
    share = sum(s.digest(spec) for spec in schema_of(of_all).tensors for s in live[spec.name].slabs if s.counted)
    return share, weights_digest(whole_tensors(workers, live))


def refused(rank: int, count: int):
    def watch():
        if rank:
            raise KeyError("words")
        return {}

    try:
        Workers(rank, count).counted(watch)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def both(count: int):
    import torch.distributed as dist

    rank = dist.get_rank()
    return agreed(rank, count), refused(rank, count)


@pytest.mark.slow
@pytest.mark.smoke
def test_two_processes_agree_on_what_each_counts():
    results = run(both, 2, 2)
    right = weights_digest(tensors(3) | {"rows": tensors(4)["b"]})
    assert f"{sum(share for (share, _), _ in results) % 2**64:016x}" == right
    assert {digest for (_, digest), _ in results} == {right}
    assert {why for _, why in results} == {"UserError: worker 1 failed (KeyError: 'words'): look at the server's log"}
