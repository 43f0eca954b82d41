"""Which blocks are tapped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.errors import ConfigError
from flower_plugin.side.taps import plan_taps


@given(count=st.integers(1, 60), num_blocks=st.integers(1, 60))
def test_a_number_gives_even_intervals_that_end_with_the_last_block(count, num_blocks):
    taps = plan_taps(str(count), num_blocks)
    assert len(taps) == min(count, num_blocks)
    assert taps[-1] == num_blocks - 1
    edges = [-1, *taps]
    gaps = {after - before for before, after in zip(edges, taps, strict=False)}
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_indices_are_taken_as_they_are_and_the_last_block_is_added():
    assert plan_taps("3,1", 6) == (1, 3, 5)
    assert plan_taps("0,5", 6) == (0, 5)


def test_a_block_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"blocks 0 to 5, not \[6\]"):
        plan_taps("1,6", 6)
