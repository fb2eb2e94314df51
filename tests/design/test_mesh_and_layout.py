"""Meshes and layouts against brute force: counting arrays over the whole tensor, one array a rank."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.layout import Box, Cut, Layout, balanced, box_shape, elements, moves, overlap
from plait.design.mesh import AXES, Mesh

meshes = st.builds(
    lambda names, sizes: Mesh(tuple(zip(names, sizes, strict=False))),
    st.permutations(AXES).flatmap(lambda names: st.integers(1, 3).map(lambda count: names[:count])),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, units: tuple[int, ...], quanta: tuple[int, ...]) -> Layout:
    """Any layout of a tensor of `units` x `quanta` elements a dim: any axes cut any dims in any order, some dims more
    than once, the tensor held on some places of pp or on all."""
    stages = None
    free = [name for name in draw(st.permutations(mesh.names)) if draw(st.booleans())]
    if draw(st.booleans()):
        places = st.integers(0, mesh.degree("pp") - 1 if "pp" in mesh.names else 0)
        stages = tuple(sorted(draw(st.sets(places, min_size=1))))
        free = [name for name in free if name != "pp"]
    cuts = []
    while free and units:
        count = draw(st.integers(1, len(free)))
        dim = draw(st.integers(0, len(units) - 1))
        cuts.append(Cut(dim, tuple(free[:count]), quanta[dim]))
        free = free[count:]
    return Layout(tuple(u * q for u, q in zip(units, quanta, strict=True)), tuple(cuts), stages)


@st.composite
def cases(draw: st.DrawFn, count: int) -> list[tuple[Mesh, Layout]]:
    """`count` layouts of one tensor, each on its own mesh; dims may be empty, or smaller than the rank count."""
    units = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    quanta = tuple(draw(st.integers(1, 3)) for _ in units)
    found = [draw(meshes) for _ in range(count)]
    return [(mesh, draw(layouts(mesh, units, quanta))) for mesh in found]


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


# --- mesh


@given(meshes)
def test_rank_and_coordinate_are_inverses(mesh: Mesh) -> None:
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(**place) for place in places] == list(range(mesh.size))
    # The last axis varies fastest: ranks in order are coordinates in lexicographic order.
    assert [tuple(place.values()) for place in places] == list(itertools.product(*(range(n) for _, n in mesh.axes)))


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks(mesh: Mesh, names: set[str]) -> None:
    """Each rank is in one group; two ranks share a group exactly when they agree on every other axis."""
    chosen = sorted(names & set(mesh.names))
    groups = mesh.groups(*chosen)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    assert {len(group) for group in groups} == {mesh.degree(*chosen)}
    for group in groups:
        assert list(group) == sorted(group)
        for rank in group:
            assert mesh.group(rank, *chosen) == group
        others = {tuple(v for n, v in mesh.coordinate(rank).items() if n not in chosen) for rank in group}
        assert len(others) == 1


def test_the_mesh_of_its_own_docstring() -> None:
    mesh = Mesh((("pp", 2), ("dp", 2), ("tp", 2)))
    assert mesh.group(0, "tp") == (0, 1)
    assert mesh.group(0, "pp") == (0, 4)
    assert mesh.group(5, "dp", "pp") == (1, 3, 5, 7)
    assert str(mesh) == "pp 2 x dp 2 x tp 2"


def test_meshes_refuse_what_is_not_there() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    with pytest.raises(ValueError, match="rank 6"):
        mesh.coordinate(6)
    with pytest.raises(ValueError, match="no axis"):
        mesh.rank(pp=0)
    with pytest.raises(ValueError, match="no place 3"):
        mesh.rank(tp=3)
    with pytest.raises(ValueError, match="no axis"):
        mesh.group(0, "tensor")
    with pytest.raises(ValueError, match="size 0"):
        Mesh((("tp", 0),))
    with pytest.raises(ValueError, match="different"):
        Mesh((("tp", 2), ("tp", 2)))


# --- layouts


@given(st.integers(0, 50), st.integers(1, 60))
def test_balanced_sizes_differ_by_at_most_one(length: int, pieces: int) -> None:
    spans = [balanced(length, pieces, index) for index in range(pieces)]
    sizes = [stop - start for start, stop in spans]
    assert [start for start, _ in spans] == [0, *itertools.accumulate(sizes)][:-1]
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(cases(1))
def test_every_element_is_held_once_a_copy(case: list[tuple[Mesh, Layout]]) -> None:
    """Copies are the ranks that differ on axes that do not cut: every element is held by exactly that many."""
    [(mesh, layout)] = case
    held = np.zeros(layout.shape, dtype=int)
    first = np.zeros(layout.shape, dtype=int)
    for rank, box in layout.holders(mesh):
        held[at(box)] += 1
        if layout.is_first_copy(mesh, rank):
            first[at(box)] += 1
        assert layout.local_shape(mesh, rank) == box_shape(box) == held[at(box)].shape
        assert elements(box) == held[at(box)].size
    ranks = sum(layout.holds(mesh, rank) for rank in range(mesh.size))
    copies = ranks // math.prod(mesh.degree(axis) for axis in layout.cut_axes)
    assert (held == copies).all()
    assert (first == 1).all()


@given(cases(1))
def test_slices_are_whole_quanta_and_balanced(case: list[tuple[Mesh, Layout]]) -> None:
    """Dim by dim: boundaries stand at multiples of the quantum, and one cut gives sizes at most one quantum apart."""
    [(mesh, layout)] = case
    boxes = [box for _, box in layout.holders(mesh)]
    for dim in range(len(layout.shape)):
        cuts = [cut for cut in layout.cuts if cut.dim == dim]
        for cut in cuts:
            assert all(edge % cut.quantum == 0 for box in boxes for edge in box[dim])
        if len(cuts) == 1:
            sizes = [box[dim][1] - box[dim][0] for box in boxes]
            assert max(sizes) - min(sizes) in (0, cuts[0].quantum)


def test_nine_heads_in_groups_of_three_on_two_ranks() -> None:
    layout = Layout((9, 4), (Cut(0, ("tp",), 3),))
    assert [layout.local_shape(Mesh((("tp", 2),)), rank) for rank in range(2)] == [(6, 4), (3, 4)]


def test_a_dim_smaller_than_the_rank_count_leaves_empty_slices() -> None:
    layout, mesh = Layout((2,), (Cut(0, ("tp",)),)), Mesh((("tp", 4),))
    assert [layout.box(mesh, rank) for rank in range(4)] == [((0, 1),), ((1, 2),), ((2, 2),), ((2, 2),)]


def test_a_scalar_has_one_first_copy() -> None:
    layout, mesh = Layout(()), Mesh((("dp", 2), ("tp", 2)))
    assert [layout.box(mesh, rank) for rank in range(4)] == [()] * 4
    assert [layout.is_first_copy(mesh, rank) for rank in range(4)] == [True, False, False, False]
    assert overlap((), ()) == ()
    assert elements(()) == 1


@given(cases(1))
def test_undo_is_the_inverse_of_then(case: list[tuple[Mesh, Layout]]) -> None:
    [(mesh, layout)] = case
    peeled = layout
    for cut in reversed(layout.cuts):
        outer = peeled.undo()
        assert outer.then(cut) == peeled
        # Undoing a cut is an all-gather over its axes: the slices of the group are the outer slice, in order.
        for rank, box in outer.holders(mesh):
            inner = [peeled.box(mesh, other) for other in mesh.group(rank, *cut.axes)]
            spans = sorted({b[cut.dim] for b in inner if b is not None and b[cut.dim][0] < b[cut.dim][1]})
            assert sum(stop - start for start, stop in spans) == box[cut.dim][1] - box[cut.dim][0]
        peeled = outer
    with pytest.raises(ValueError, match="no cut"):
        peeled.undo()


def test_layouts_refuse_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="dim 1"):
        Layout((4,), (Cut(1, ("tp",)),))
    with pytest.raises(ValueError, match="not made of 3s"):
        Layout((4,), (Cut(0, ("tp",), 3),))
    with pytest.raises(ValueError, match="twice"):
        Layout((4, 4), (Cut(0, ("tp",)), Cut(1, ("tp",))))
    mesh = Mesh((("dp", 2), ("tp", 2)))
    with pytest.raises(ValueError, match="parts a quantum"):
        Layout((6,), (Cut(0, ("dp",)), Cut(0, ("tp",), 2))).box(mesh, 0)
    with pytest.raises(ValueError, match="cannot move"):
        moves(Layout((4,)), mesh, Layout((5,)), mesh)


# --- moves


@settings(max_examples=300)
@given(cases(2))
def test_moves_reshard_exactly(case: list[tuple[Mesh, Layout]]) -> None:
    """Carried out on one array a rank, between any two layouts on any two meshes: each rank gets its slice, each
    element once, from a rank that has it, and from itself whenever it has it."""
    (old_mesh, old), (new_mesh, new) = case
    whole = np.arange(1, math.prod(old.shape) + 1).reshape(old.shape)

    def slices(layout: Layout, mesh: Mesh) -> dict[int, np.ndarray]:
        """Each rank's slice in an array of the whole's shape, with zeros elsewhere."""
        found = {}
        for rank, box in layout.holders(mesh):
            found[rank] = np.zeros_like(whole)
            found[rank][at(box)] = whole[at(box)]
        return found

    before, after = slices(old, old_mesh), slices(new, new_mesh)
    arrived = {rank: np.zeros_like(whole) for rank in after}
    times = {rank: np.zeros_like(whole) for rank in after}
    for move in moves(old, old_mesh, new, new_mesh):
        assert elements(move.box) > 0
        sent = before[move.source][at(move.box)]
        arrived[move.target][at(move.box)] = sent
        times[move.target][at(move.box)] += 1
        if move.source != move.target and move.target in before:
            assert (before[move.target][at(move.box)] == 0).all()
    for rank, expected in after.items():
        np.testing.assert_array_equal(arrived[rank], expected)
        np.testing.assert_array_equal(times[rank], (expected > 0).astype(int))


@given(cases(1))
def test_staying_moves_nothing(case: list[tuple[Mesh, Layout]]) -> None:
    [(mesh, layout)] = case
    assert all(move.source == move.target for move in moves(layout, mesh, layout, mesh))


def test_copies_share_the_work_of_giving() -> None:
    """One rank's whole tensor on four copies goes to eight ranks: no copy gives more than two."""
    small, large = Mesh((("dp", 4),)), Mesh((("dp", 8),))
    found = moves(Layout((4,)), small, Layout((4,)), large)
    assert sorted(move.source for move in found) == [0, 0, 1, 1, 2, 2, 3, 3]
