"""The planner is exact: it equals the search of all ordered choices of phones and all cuts."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_plugin.pipeline.in_flight import in_flight
from flower_plugin.pipeline.job import BlockCost, InfeasiblePlan, Job, Links, Phone, uniform_links
from flower_plugin.pipeline.partition import plan_partition, stage_bytes


def cost(job, phones, links, stages):
    """Bottleneck of stages (phone, lo, hi), written down from the definitions; None: does not fit."""

    def hop(a, b):
        return 0.0 if a == b else job.boundary_bytes / min(links.bandwidth[a][b], links.bandwidth[b][a])

    if any(p.share and job.base_bytes + job.owner_bytes > p.memory_bytes for p in phones):
        return None
    loads = [p.share * p.text_seconds for p in phones]
    loads += [hop(a[0], b[0]) for a, b in itertools.pairwise(stages)]
    loads += [sum(p.share * hop(end[0], i) for i, p in enumerate(phones)) for end in (stages[0], stages[-1])]
    for index, (p, lo, hi) in enumerate(stages):
        phone, kept = phones[p], in_flight(job.schedule, len(stages), index, job.micro_batches)
        used = job.base_bytes + (job.owner_bytes if phone.share else 0)
        used += sum(b.weight_bytes + b.state_bytes + kept * b.stash_bytes for b in job.blocks[lo:hi])
        if used > phone.memory_bytes:
            return None
        work = sum(b.work for b in job.blocks[lo:hi])
        loads.append(work * (phone.forward_seconds + phone.backward_seconds) + phone.share * phone.text_seconds)
    return max(loads)


def brute_force(job, phones, links):
    n, found = len(job.blocks), []
    for size in range(1, min(n, len(phones)) + 1):
        for order in itertools.permutations(range(len(phones)), size):
            for inner in itertools.combinations(range(1, n), size - 1):
                cuts = [0, *inner, n]
                made = cost(job, phones, links, list(zip(order, cuts, cuts[1:], strict=False)))
                if made is not None:
                    found.append(made)
    return min(found, default=None)


@st.composite
def instances(draw):
    small = st.integers(0, 4)
    blocks = tuple(
        BlockCost(draw(small), draw(small), draw(small), draw(st.sampled_from([0.5, 1.0, 2.0])))
        for _ in range(draw(st.integers(1, 6)))
    )
    count = draw(st.integers(1, 4))
    pace = st.sampled_from([0.25, 0.5, 1.0, 3.0])
    phones = tuple(
        Phone(
            f"phone {i}",
            draw(st.integers(4, 60)),
            draw(pace),
            draw(pace),
            draw(st.sampled_from([0.0, 1.0, 4.0])),
            draw(st.sampled_from([0.0, 0.25, 0.5])),
        )
        for i in range(count)
    )
    speed = st.sampled_from([0.5, 1.0, 4.0, 100.0])
    links = Links(tuple(tuple(draw(speed) for _ in range(count)) for _ in range(count)))
    schedule = draw(st.sampled_from(["gpipe", "1f1b"]))
    return Job(blocks, draw(small), draw(small), draw(small), draw(st.integers(1, 5)), schedule), phones, links


def test_a_stage_leaves_blocks_to_phones_that_lead_to_the_owners():
    # Both ends must be next to the texts, and the only way between them is long: as many blocks as fit would end it.
    phones = tuple(Phone(f"p{i}", 10, 0.25, 0.25, share=0.5 * (i > 1)) for i in range(4))
    links = Links(((1.0, 1.0, 0.5, 1.0), (1.0, 1.0, 1.0, 0.5), (0.5, 1.0, 1.0, 0.5), (1.0, 0.5, 0.5, 1.0)))
    job = Job((BlockCost(0, work=0.5),) * 6, boundary_bytes=1, micro_batches=1)
    plan = plan_partition(job, phones, links)
    assert plan.bottleneck_seconds == brute_force(job, phones, links) == 1.0
    assert len(plan.stages) == 4


@settings(max_examples=300)
@given(instances())
def test_the_bottleneck_is_the_smallest_there_is(instance):
    job, phones, links = instance
    best = brute_force(job, phones, links)
    if best is None:
        with pytest.raises(InfeasiblePlan):
            plan_partition(job, phones, links)
        return
    plan = plan_partition(job, phones, links)
    stages = [(s.phone, s.lo, s.hi) for s in plan.stages]
    assert stages[0][1] == 0
    assert stages[-1][2] == len(job.blocks)
    assert all(a[2] == b[1] for a, b in itertools.pairwise(stages))
    assert len({s[0] for s in stages}) == len(stages)
    assert plan.bottleneck_seconds == pytest.approx(best, rel=1e-12)
    assert cost(job, phones, links, stages) == pytest.approx(best, rel=1e-12)
    assert all(s.memory_bytes <= phones[s.phone].memory_bytes for s in plan.stages)


def test_unequal_phones_beat_an_equal_split():
    phones = tuple(Phone(f"p{i}", 10**9, 1 / speed, 0.0) for i, speed in enumerate((1.0, 0.5, 0.25)))
    job = Job(tuple(BlockCost(1) for _ in range(24)))
    plan = plan_partition(job, phones, uniform_links(3, 1e9))
    assert plan.bottleneck_seconds / (8 / 0.25) <= 0.45


def test_a_slow_phone_is_left_out():
    phones = (Phone("fast", 10**9, 1.0, 1.0), Phone("slow", 10**9, 500.0, 500.0))
    plan = plan_partition(Job((BlockCost(1),) * 6), phones, uniform_links(2, 1e9))
    assert [stage.phone for stage in plan.stages] == [0]


def test_many_blocks_and_phones_are_planned_at_once():
    phones = tuple(Phone(f"p{i}", 10_000 + 1_000 * i, 1.0 + 0.37 * i, 2.0 + 0.1 * i, 1.0, 1 / 12) for i in range(12))
    job = Job(tuple(BlockCost(900, 50, 20 + i % 3, 1.0 + 0.01 * i) for i in range(80)), 100, 500, 100)
    links = Links(tuple(tuple(50.0 + 7 * ((3 * a + 5 * b) % 11) for b in range(12)) for a in range(12)))
    started = time.perf_counter()
    plan = plan_partition(job, phones, links)
    assert time.perf_counter() - started < 10  # a second where nothing else runs
    assert plan.stages[-1].hi == 80


def test_what_is_short_and_what_would_fit_is_said():
    phones = (Phone("old", 50, 1.0, 1.0), Phone("new", 320, 1.0, 1.0))
    job = Job((BlockCost(100, 10, 10),) * 4, boundary_bytes=1, micro_batches=8)
    with pytest.raises(InfeasiblePlan) as caught:
        plan_partition(job, phones, uniform_links(2, 1e9))
    text = str(caught.value)
    assert "old: short of" in text
    assert "new: has room for 2" in text
    assert "one more phone like new" in text
    assert "1 micro-batch" not in text
    larger = (*phones, Phone("twin", 320, 1.0, 1.0))
    assert len(plan_partition(job, larger, uniform_links(3, 1e9)).stages) == 2


def test_memory_counts_the_micro_batches_in_flight():
    job = Job((BlockCost(10, 5, 3),) * 4, base_bytes=7, owner_bytes=100, micro_batches=8)
    assert stage_bytes(job, Phone("p", 0, 1, 1), 1, 3, 0) == 7 + 2 * (15 + 2 * 3)
    assert stage_bytes(job, Phone("p", 0, 1, 1, share=0.5), 1, 3, 2) == 107 + 2 * (15 + 4 * 3)


@pytest.mark.parametrize(("phones", "links"), [((), Links(())), ((Phone("p", 1, 1, 1),), uniform_links(2, 1.0))])
def test_wrong_sizes_are_refused(phones, links):
    with pytest.raises(ValueError, match=r"phones"):
        plan_partition(Job((BlockCost(1),)), phones, links)
