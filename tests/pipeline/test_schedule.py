"""Every schedule that is made passes a check that knows nothing of how it was made."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.pipeline.schedule import Action, Costs, Ring, ScheduleError, check_schedule, make_schedule


@st.composite
def rings(draw):
    num_phones = draw(st.integers(1, 4))
    phone, seconds = st.integers(0, num_phones - 1), st.sampled_from([0.0, 0.1, 1.0, 2.5])
    stages = tuple(draw(st.lists(phone, min_size=1, max_size=5)))
    owners = tuple(draw(st.lists(phone, min_size=1, max_size=7)))
    by_stage = [tuple(draw(seconds) for _ in stages) for _ in range(2)]
    by_phone = [tuple(draw(seconds) for _ in range(num_phones)) for _ in range(2)]
    return Ring(stages, owners), Costs(*by_stage, *by_phone, draw(seconds))


@given(rings(), st.sampled_from(["gpipe", "1f1b"]))
def test_schedules_are_whole_bounded_and_free_of_deadlock(instance, kind):
    ring, costs = instance
    schedule = make_schedule(kind, ring, costs)
    check_schedule(schedule)
    busy = [sum(e.end - e.start for e in schedule.events if e.phone == phone) for phone in range(ring.num_phones)]
    assert schedule.makespan >= max(busy) - 1e-9
    assert schedule == make_schedule(kind, ring, costs)


def equal_stages(kind, stages, owners):
    costs = Costs((1.0,) * stages, (2.0,) * stages, (0.0,) * stages, (0.0,) * stages)
    return make_schedule(kind, Ring(tuple(range(stages)), tuple(owners)), costs).makespan


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micros"), [(1, 4), (3, 8), (4, 5)])
def test_equal_stages_reach_the_ideal_makespan(kind, stages, micros):
    # With the head where the last stage is, nothing is in its way.
    assert equal_stages(kind, stages, [stages - 1] * micros) == pytest.approx((micros + stages - 1) * 3.0)


@pytest.mark.parametrize(("stages", "micros"), [(3, 8), (4, 5), (3, 30)])
def test_owners_all_over_the_ring_cost_little(stages, micros):
    # An owner that is in the middle of another action cannot run its head at once.
    spread = equal_stages("1f1b", stages, [m % stages for m in range(micros)])
    assert spread <= 1.13 * (micros + stages - 1) * 3.0


def ring_of_two():
    ring = Ring((0, 1), (0, 1, 0))
    return make_schedule("1f1b", ring, Costs((1.0, 1.0), (1.0, 1.0), (0.1, 0.1), (0.1, 0.1)))


def changed(schedule, phone, order):
    orders = [*schedule.orders]
    orders[phone] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def test_a_deadlock_is_found():
    schedule = ring_of_two()
    first, *rest = schedule.orders[0]
    backward = next(action for action in rest if action.kind == "backward")
    rest.remove(backward)
    with pytest.raises(ScheduleError, match=r"phone 0 waits for ever to run Action\(kind='backward'"):
        check_schedule(changed(schedule, 0, [backward, first, *rest]))


def test_a_missing_a_doubled_and_a_foreign_action_are_found():
    schedule = ring_of_two()
    own = schedule.orders[0]
    for order, reason in (
        (own[:-1], "nobody runs"),
        ((*own, own[0]), "runs twice"),
        ((*own, Action("forward", 1, 0)), "not its own"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            check_schedule(changed(schedule, 0, order))


def test_keeping_too_much_is_found():
    ring = Ring((0,), (0,) * 5)
    schedule = make_schedule("gpipe", ring, Costs((1.0,), (1.0,), (0.0,), (0.0,)))
    check_schedule(schedule)
    with pytest.raises(ScheduleError, match="keeps 3 micro-batches"):
        check_schedule(replace(schedule, kind="1f1b"))
