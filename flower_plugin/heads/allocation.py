"""Who takes how many heads: the exact smallest makespan over backends."""

from collections.abc import Sequence
from dataclasses import dataclass

from flower_plugin.errors import ConfigError

Curve = Sequence[float]
"""Seconds of 0, 1, ..., n groups on one backend; nothing is known, or fits, beyond its end."""


@dataclass(frozen=True)
class Allocation:
    """How many groups each backend takes.

    Attributes
    ----------
    counts
        Groups a backend, in the order of the curves; zero leaves a backend out.
    seconds
        The makespan: the time of the slowest of those that take part.
    """

    counts: tuple[int, ...]
    seconds: float

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The groups [lo, hi) of each backend, side by side in the order of the backends."""
        ends = [sum(self.counts[: index + 1]) for index in range(len(self.counts))]
        return tuple((end - count, end) for end, count in zip(ends, self.counts, strict=True))


def allocate(curves: Sequence[Curve], groups: int) -> Allocation:
    """Share ``groups`` groups out so that the slowest backend finishes as early as it can.

    The makespan is some backend's time for some number of groups. For such a time T backend b can take
    h_b(T) = max{h : t_b(h) <= T}, so T is enough if sum_b h_b(T) >= groups (a backend that could take more by T
    can as well take fewer only if that is not slower: of those counts the plan uses h_b(T) or a smaller one that
    is also in time). The smallest such T is found by trying every candidate, which is exact; curves need
    be neither convex nor monotone. Among plans of that makespan backends that come first are filled first.

    Parameters
    ----------
    curves
        One a backend: seconds of 0, 1, ... groups, the first 0.0. A curve may end early where memory does.

    Raises
    ------
    ConfigError
        There is nothing to share, a curve is not one, or all backends together cannot take the groups.
    """
    _check(curves, groups)
    times = sorted({curve[h] for curve in curves for h in range(min(len(curve), groups + 1))})
    low, high = 0, len(times) - 1
    if _counts(curves, groups, times[high]) is None:
        raise ConfigError(
            f"the backends together take fewer than {groups} groups of heads: use a smaller batch or model, or"
            " leave heads off"
        )
    while low < high:
        middle = (low + high) // 2
        if _counts(curves, groups, times[middle]) is None:
            low = middle + 1
        else:
            high = middle
    counts = _counts(curves, groups, times[low])
    assert counts is not None
    return Allocation(counts, max(curve[count] for curve, count in zip(curves, counts, strict=True)))


def best_single(curves: Sequence[Curve], groups: int) -> Allocation | None:
    """The fastest backend that can take all groups by itself; None if there is none."""
    able = [index for index, curve in enumerate(curves) if len(curve) > groups]
    if not able:
        return None
    best = min(able, key=lambda index: curves[index][groups])
    return Allocation(tuple(groups if i == best else 0 for i in range(len(curves))), curves[best][groups])


def _check(curves: Sequence[Curve], groups: int) -> None:
    if groups < 1 or not curves:
        raise ConfigError(f"cannot share {groups} groups of heads among {len(curves)} backends")
    for index, curve in enumerate(curves):
        if not curve or curve[0] != 0 or not all(0 <= seconds < float("inf") for seconds in curve):
            raise ConfigError(f"the profile of backend {index} must be finite seconds from 0.0 upwards: {curve!r}")


def _counts(curves: Sequence[Curve], groups: int, limit: float) -> tuple[int, ...] | None:
    """Counts that add up to ``groups``, each in time; None if there are none."""
    in_time = [[h for h in range(min(len(c), groups + 1)) if c[h] <= limit] for c in curves]
    # For each backend, backwards: which totals the backends from there on can reach. One bit a total.
    reach = [1]
    for counts in reversed(in_time):
        reach.append(_shifted(reach[-1], counts))
    reach.reverse()
    left, chosen = groups, []
    if not reach[0] >> groups & 1:
        return None
    for index, counts in enumerate(in_time):
        take = max(h for h in counts if h <= left and reach[index + 1] >> (left - h) & 1)
        chosen.append(take)
        left -= take
    return tuple(chosen)


def _shifted(bits: int, counts: Sequence[int]) -> int:
    total = 0
    for count in counts:
        total |= bits << count
    return total
