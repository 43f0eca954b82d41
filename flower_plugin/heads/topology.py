"""The CPU's core clusters (big.LITTLE and the like), read from sysfs."""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")
# In this order: what the kernel's scheduler trusts, then the clock, which tells clusters apart as well.
_MEASURES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


@dataclass(frozen=True)
class Cluster:
    """Cores that are alike.

    Attributes
    ----------
    cores
        Their numbers, ascending; never empty.
    capacity
        What sysfs says of each core's strength, in no unit; 0 where it says nothing.
    """

    cores: tuple[int, ...]
    capacity: int


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may use; all of them where the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def clusters(root: Path = SYSFS, cores: tuple[int, ...] | None = None) -> tuple[Cluster, ...]:
    """Group the allowed cores by strength, the strongest cluster first.

    Without sysfs, or where a core's files are missing or odd, all cores form one cluster: a wrong guess would
    cost more than no guess.
    """
    cores = allowed_cores() if cores is None else cores
    for measure in _MEASURES:
        strengths = [_number(root / f"cpu{core}" / measure) for core in cores]
        if strengths and all(strengths):
            groups: dict[int, list[int]] = defaultdict(list)
            for core, strength in zip(cores, strengths, strict=True):
                groups[strength].append(core)
            return tuple(Cluster(tuple(groups[s]), s) for s in sorted(groups, reverse=True))
    return (Cluster(cores, 0),) if cores else ()


def _number(path: Path) -> int:
    """The positive number that a sysfs file holds, or 0."""
    try:
        with path.open("rb") as file:
            return max(0, int(file.read(32)))
    except (OSError, ValueError):
        return 0
