"""The planner against exhaustive search."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.errors import ConfigError
from flower_plugin.heads.allocation import allocate, best_single

SECONDS = st.floats(0.001, 10, allow_nan=False)
CURVES = st.integers(1, 9).flatmap(
    lambda groups: st.tuples(
        st.just(groups),
        st.lists(st.lists(SECONDS, max_size=groups + 1).map(lambda c: [0.0, *c]), min_size=1, max_size=4),
    )
)


def exhaustive(curves, groups):
    shares = itertools.product(*(range(min(len(curve), groups + 1)) for curve in curves))
    times = [max(c[h] for c, h in zip(curves, share, strict=True)) for share in shares if sum(share) == groups]
    return min(times, default=None)


@given(CURVES)
def test_the_makespan_is_the_smallest_there_is(case):
    groups, curves = case
    best = exhaustive(curves, groups)
    if best is None:
        with pytest.raises(ConfigError, match="take fewer"):
            allocate(curves, groups)
        return
    made = allocate(curves, groups)
    assert made.seconds == best
    assert sum(made.counts) == groups
    assert max(c[h] for c, h in zip(curves, made.counts, strict=True)) == made.seconds
    assert [hi - lo for lo, hi in made.ranges] == list(made.counts)
    assert made.ranges[0][0] == 0
    assert made.ranges[-1][1] == groups


@given(CURVES)
def test_never_worse_than_the_best_single_backend(case):
    groups, curves = case
    single = best_single(curves, groups)
    if single is not None:
        assert allocate(curves, groups).seconds <= single.seconds


def test_a_curve_that_falls_is_used_where_it_is_low():
    # Two groups take longer than three: the rule h_b(T) alone would not see that they cannot be two.
    assert allocate([[0, 1, 9, 2], [0, 1, 9, 9]], 4).counts == (3, 1)


def test_a_backend_without_memory_is_left_out():
    assert allocate([[0.0], [0, 1, 2, 3]], 3).counts == (0, 3)


def test_more_backends_than_groups():
    made = allocate([[0, 3], [0, 1], [0, 2]], 1)
    assert made.counts == (0, 1, 0)


@pytest.mark.parametrize("curves", [[], [[]], [[1.0, 2.0]], [[0, float("nan")]], [[0, -1]]])
def test_what_is_no_profile_is_refused(curves):
    with pytest.raises(ConfigError):
        allocate(curves, 1)
