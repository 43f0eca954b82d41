"""The exact partition: contiguous blocks to an ordered choice of phones, with the smallest bottleneck.

A threshold T is feasible if some phones, in some order, can take all blocks so that no phone and no link needs more
than T for a micro-batch. That is decided by dynamic programming over sets of phones from the last stage backwards:
the number of later stages, which sets how many micro-batches a stage keeps, is then the size of the set. The
smallest T is found by bisection over the finitely many values that a stage or a link can need, so it is the optimum
itself.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .in_flight import in_flight
from .job import InfeasiblePlan, Job, Links, Phone, Plan, StagePlan

MAX_PHONES = 16
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def plan_partition(job: Job, phones: tuple[Phone, ...], links: Links) -> Plan:
    """Return the partition with the smallest bottleneck; among equals one with the fewest stages.

    The owners of the texts send to the first stage and get back from the last, whoever these are. A phone with texts
    spends ``share * text_seconds`` a micro-batch and ``owner_bytes`` whether or not it gets a stage.

    Raises
    ------
    InfeasiblePlan
        No partition fits; says which phone is short of how many bytes, and which remedies were found to help.
    ValueError
        There are no blocks, no phones or too many, or the links are not those of the phones.
    """
    plan = _best_plan(job, phones, links)
    if plan is None:
        raise InfeasiblePlan(_explain(job, phones, links))
    return plan


def stage_bytes(job: Job, phone: Phone, lo: int, hi: int, later_stages: int) -> int:
    """Return a phone's peak bytes with blocks [lo, hi) and so many stages after its own."""
    kept = in_flight(job.schedule, later_stages + 1, 0, job.micro_batches)
    blocks = sum(b.weight_bytes + b.state_bytes + kept * b.stash_bytes for b in job.blocks[lo:hi])
    return job.base_bytes + (job.owner_bytes if phone.share else 0) + blocks


@dataclass(frozen=True)
class _Tables:
    """Everything that does not depend on the threshold.

    Attributes
    ----------
    seconds
        [phones, n + 1, n + 1]: phone time of blocks [lo, hi); infinite where lo >= hi.
    fits
        [phones, later stages, n + 1]: the smallest lo whose blocks [lo, hi) fit the phone's memory.
    hop
        [phones, phones]: seconds of a micro-batch on a link.
    first, last
        [phones]: link seconds from the owners to a first stage, and from a last stage to the owners.
    alone
        The least bottleneck whatever the partition: what owners spend on their own texts.
    """

    seconds: Floats
    fits: Ints
    hop: Floats
    first: Floats
    last: Floats
    alone: float


def _best_plan(job: Job, phones: tuple[Phone, ...], links: Links) -> Plan | None:
    tables = _tables(job, phones, links)
    if any(p.share and job.base_bytes + job.owner_bytes > p.memory_bytes for p in phones):
        return None
    values = np.concatenate([t.ravel() for t in (tables.seconds, tables.hop, tables.first, tables.last)])
    values = np.unique(np.append(values[np.isfinite(values)], tables.alone))
    values = values[values >= tables.alone]
    low, high, best = 0, len(values) - 1, None
    while low <= high:
        middle = (low + high) // 2
        found = _stages_within(float(values[middle]), tables)
        if found is None:
            low = middle + 1
        else:
            best, high = (float(values[middle]), found), middle - 1
    if best is None:
        return None
    count = len(best[1])
    stages = tuple(
        StagePlan(p, lo, hi, float(tables.seconds[p, lo, hi]), stage_bytes(job, phones[p], lo, hi, count - 1 - index))
        for index, (p, lo, hi) in enumerate(best[1])
    )
    return Plan(stages, best[0])


def _tables(job: Job, phones: tuple[Phone, ...], links: Links) -> _Tables:
    n, count = len(job.blocks), len(phones)
    if not n or not 0 < count <= MAX_PHONES:
        raise ValueError(f"a plan needs blocks and 1 to {MAX_PHONES} phones, not {n} blocks and {count} phones")
    hop = job.boundary_bytes / np.asarray(links.bandwidth, np.float64)
    if hop.shape != (count, count):
        raise ValueError(f"links between {count} phones are a {count} x {count} table, not {list(hop.shape)}")
    np.fill_diagonal(hop, 0.0)  # nothing travels from a phone to itself
    # Forward goes one way and the gradient, as large, the other way at the same time.
    hop = np.maximum(hop, hop.T)
    shares = np.asarray([p.share for p in phones])
    own = np.asarray([p.share * p.text_seconds for p in phones])
    pace = np.asarray([p.forward_seconds + p.backward_seconds for p in phones])
    work = np.concatenate([[0.0], np.cumsum([b.work for b in job.blocks])])
    seconds = (work[None, :] - work[:, None])[None] * pace[:, None, None] + own[:, None, None]
    seconds[:, np.tri(n + 1, dtype=bool)] = np.inf
    fits = np.asarray([[_fitting(job, phone, later) for later in range(count)] for phone in phones])
    to_owners = hop @ shares
    return _Tables(seconds, fits, hop, to_owners, to_owners, float(own.max()))


def _fitting(job: Job, phone: Phone, later: int) -> list[int]:
    """Return for each hi the smallest lo so that blocks [lo, hi) fit the phone, by two pointers."""
    room = phone.memory_bytes - stage_bytes(job, phone, 0, 0, later)
    kept = in_flight(job.schedule, later + 1, 0, job.micro_batches)
    sizes = [b.weight_bytes + b.state_bytes + kept * b.stash_bytes for b in job.blocks]
    found, lo, used = [0], 0, 0
    for hi, size in enumerate(sizes, 1):
        used += size
        while lo < hi and used > room:
            used -= sizes[lo]
            lo += 1
        found.append(lo)
    return found


def _stages_within(limit: float, tables: _Tables) -> tuple[tuple[int, int, int], ...] | None:
    """Return stages (phone, lo, hi) that need at most ``limit``, as few as possible; None: there are none."""
    takes = _takes(limit, tables)
    reached = _reach(limit, tables, takes)
    starts = np.argwhere(reached[:, :, 0] & (tables.first <= limit))
    if not len(starts):
        return None
    group, phone = min(starts.tolist(), key=lambda start: (start[0].bit_count(), start))
    stages: list[tuple[int, int, int]] = []
    lo = 0
    while rest := group ^ (1 << phone):
        onward = reached[rest] & (tables.hop[phone] <= limit)[:, None] & takes[phone, rest.bit_count(), :, lo]
        following, hi = max(np.argwhere(onward).tolist(), key=lambda pair: pair[1])
        stages.append((phone, lo, hi))
        group, phone, lo = rest, following, hi
    return (*stages, (phone, lo, takes.shape[2] - 1))


def _takes(limit: float, tables: _Tables) -> Bools:
    """Return [phones, later stages, hi, lo]: whether a phone can take blocks [lo, hi)."""
    starts = np.arange(tables.seconds.shape[1])
    fits = starts >= tables.fits[:, :, :, None]
    in_time = (tables.seconds <= limit).transpose(0, 2, 1)
    return np.asarray(fits & in_time[:, None])


def _reach(limit: float, tables: _Tables, takes: Bools) -> Bools:
    """Return [sets, phones, lo]: whether the set, this phone first, can take blocks [lo, n), each phone some.

    Every lo is kept, not only the smallest: a stage may have to leave blocks to phones that lead to better links.
    """
    count, ends = len(tables.hop), tables.seconds.shape[1]
    groups = np.arange(1 << count)
    sizes = np.bitwise_count(groups)
    reached = np.zeros((1 << count, count, ends), np.bool_)
    for size in range(1, count + 1):
        for phone in range(count):
            mine = groups[(sizes == size) & (groups >> phone & 1 == 1)]
            if size == 1:
                his = np.zeros((1, ends), np.bool_)
                his[0, -1] = tables.last[phone] <= limit
            else:
                usable = np.flatnonzero(tables.hop[phone] <= limit)
                his = reached[np.ix_(mine ^ (1 << phone), usable)].any(axis=1)
            reached[mine, phone] = his.astype(np.float32) @ takes[phone, size - 1].astype(np.float32) > 0
    return reached


def _explain(job: Job, phones: tuple[Phone, ...], links: Links) -> str:
    lines = [
        f"the {len(job.blocks)} blocks do not fit these phones ({job.schedule}, {job.micro_batches} micro-batches):"
    ]
    for phone in phones:
        needed = stage_bytes(job, phone, 0, 0, 0) + min(
            stage_bytes(replace(job, base_bytes=0), replace(phone, share=0.0), i, i + 1, 0)
            for i in range(len(job.blocks))
        )
        most = max(hi - lo for hi, lo in enumerate(_fitting(job, phone, 0)))
        short = f"short of {_mb(needed - phone.memory_bytes)} for one block" if not most else f"has room for {most}"
        lines.append(f"  {phone.name}: {short} (limit {_mb(phone.memory_bytes)})")
    largest = max(phones, key=lambda phone: phone.memory_bytes)
    more = (*phones, replace(largest, name=f"another {largest.name}", share=0.0))
    fast = _unlimited(len(more))
    remedies = {
        "schedule 1f1b": (replace(job, schedule="1f1b"), phones, links),
        "1 micro-batch": (replace(job, micro_batches=1), phones, links),
        "gradient checkpointing": (_checkpointed(job), phones, links),
        f"one more phone like {largest.name}": (job, more, fast),
    }
    helpful = [
        name
        for name, (changed, some, ways) in remedies.items()
        if len(some) <= MAX_PHONES and _best_plan(changed, some, ways) is not None
    ]
    return "\n".join([*lines, f"what would fit: {', '.join(helpful)}" if helpful else "no single change would fit"])


def _unlimited(num_phones: int) -> Links:
    """Return links that never limit: what is asked is whether the memory is enough."""
    return Links(((float("inf"),) * num_phones,) * num_phones)


def _checkpointed(job: Job) -> Job:
    """Return the job when a block keeps only its input, and the largest is computed again beside."""
    largest = max(block.stash_bytes for block in job.blocks)
    blocks = tuple(replace(b, stash_bytes=min(b.stash_bytes, job.boundary_bytes)) for b in job.blocks)
    return replace(job, blocks=blocks, base_bytes=job.base_bytes + largest)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
