"""Schedules as data: the order in which each phone of a ring runs its part of one step.

A micro-batch is embedded by the phone that owns its text, goes through the stages, comes back to its owner for head
and loss, and its gradient returns through the stages. Schedules are made by running the ring in forecast time: a
phone that is free takes its most urgent action that is ready. The order in which it took them is the schedule, so it
cannot deadlock; `check_schedule` proves that of any schedule by itself.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flower_plugin.errors import FlowerPluginError

from .in_flight import in_flight

Kind = Literal["embed", "forward", "head", "backward"]


class ScheduleError(FlowerPluginError):
    """A schedule leaves actions out, keeps too much, or would wait for ever."""


@dataclass(frozen=True, order=True)
class Action:
    """What a phone does with a micro-batch; ``stage`` is -1 for what its owner does (embed, head)."""

    kind: Kind
    stage: int
    micro: int


@dataclass(frozen=True)
class Ring:
    """The phone of each stage, and the phone that owns each micro-batch of a step."""

    stage_phones: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def num_phones(self) -> int:
        """Phones are numbered from 0 to the largest that is named."""
        return max(*self.stage_phones, *self.owners) + 1

    def phone(self, action: Action) -> int:
        """Return the phone that runs an action."""
        return self.owners[action.micro] if action.stage < 0 else self.stage_phones[action.stage]

    def path(self, micro: int) -> tuple[Action, ...]:
        """Return what happens to a micro-batch, in its order."""
        stages = range(len(self.stage_phones))
        return (
            Action("embed", -1, micro),
            *(Action("forward", stage, micro) for stage in stages),
            Action("head", -1, micro),
            *(Action("backward", stage, micro) for stage in reversed(stages)),
        )


@dataclass(frozen=True)
class Costs:
    """Forecast seconds of one micro-batch: by stage, and by phone for embedding and head; ``link`` for each hop."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    embed: tuple[float, ...]
    head: tuple[float, ...]
    link: float = 0.0

    def seconds(self, action: Action, phone: int) -> float:
        """Return how long an action takes."""
        if action.kind == "embed":
            return self.embed[phone]
        if action.kind == "head":
            return self.head[phone]
        return (self.forward if action.kind == "forward" else self.backward)[action.stage]


@dataclass(frozen=True)
class Event:
    """An action on a phone, from ``start`` to ``end`` seconds after the step began."""

    phone: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """For each phone its actions in their order, and the forecast of when they run."""

    kind: str
    ring: Ring
    orders: tuple[tuple[Action, ...], ...]
    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        """Forecast seconds of the step."""
        return max(event.end for event in self.events)


def make_schedule(kind: str, ring: Ring, costs: Costs) -> Schedule:
    """Return the order for each phone: ``"gpipe"`` or ``"1f1b"``.

    GPipe runs what goes forward first; 1F1B what goes backward, and a stage takes a further micro-batch only while it
    keeps less than `in_flight` allows.
    """
    paths = [ring.path(micro) for micro in range(len(ring.owners))]
    ready: list[list[tuple[tuple[int, int], Action]]] = [[] for _ in range(ring.num_phones)]
    arrivals = [(0.0, micro, 0) for micro in range(len(paths))]
    orders: list[list[Action]] = [[] for _ in range(ring.num_phones)]
    free, events, kept = [0.0] * ring.num_phones, [], [0] * len(ring.stage_phones)
    heapq.heapify(arrivals)
    wakes = [0.0]
    while wakes:
        now = heapq.heappop(wakes)
        while arrivals and arrivals[0][0] <= now:
            _, micro, position = heapq.heappop(arrivals)
            action = paths[micro][position]
            heapq.heappush(ready[ring.phone(action)], (_urgency(kind, action), action))
        for phone in range(ring.num_phones):
            action_taken = _take(kind, ring, ready[phone], kept) if free[phone] <= now else None
            if action_taken is None:
                continue
            end = now + costs.seconds(action_taken, phone)
            free[phone] = end
            orders[phone].append(action_taken)
            events.append(Event(phone, action_taken, now, end))
            path = paths[action_taken.micro]
            position = path.index(action_taken) + 1
            heapq.heappush(wakes, end)
            if position < len(path):
                there = end + (costs.link if ring.phone(path[position]) != phone else 0.0)
                heapq.heappush(arrivals, (there, action_taken.micro, position))
                heapq.heappush(wakes, there)
    return Schedule(kind, ring, tuple(map(tuple, orders)), tuple(events))


def _urgency(kind: str, action: Action) -> tuple[int, int]:
    backward_first = {"head": 0, "backward": 0, "forward": 1, "embed": 2}
    forward_first = {"embed": 0, "forward": 0, "head": 1, "backward": 2}
    return (forward_first if kind == "gpipe" else backward_first)[action.kind], action.micro


def _take(kind: str, ring: Ring, ready: list[tuple[tuple[int, int], Action]], kept: list[int]) -> Action | None:
    """Take the most urgent action that its stage has room for; ``kept`` counts the micro-batches of each stage."""
    for entry in sorted(ready):
        action = entry[1]
        stage = 0 if action.kind == "embed" else action.stage
        if action.kind in ("embed", "forward"):
            if action.kind == "forward" and kept[stage] >= _limit(kind, ring, stage):
                continue
            kept[stage] += action.kind == "forward"
        elif action.kind == "backward":
            kept[stage] -= 1
        ready.remove(entry)
        heapq.heapify(ready)
        return action
    return None


def _limit(kind: str, ring: Ring, stage: int) -> int:
    return in_flight(kind, len(ring.stage_phones), stage, len(ring.owners))


def check_schedule(schedule: Schedule) -> None:
    """Prove that a schedule does everything once, keeps no more than allowed, and never waits for ever.

    Raises
    ------
    ScheduleError
        Names the phone and the action.
    """
    ring = schedule.ring
    wanted = {action for micro in range(len(ring.owners)) for action in ring.path(micro)}
    seen: set[Action] = set()
    for phone, order in enumerate(schedule.orders):
        kept = [0] * len(ring.stage_phones)
        for action in order:
            if action in seen or action not in wanted or ring.phone(action) != phone:
                raise ScheduleError(f"phone {phone} must not run {action}: it is not its own, or runs twice")
            seen.add(action)
            kept[action.stage] += {"forward": 1, "backward": -1}.get(action.kind, 0)
            if action.kind == "forward" and kept[action.stage] > _limit(schedule.kind, ring, action.stage):
                raise ScheduleError(f"phone {phone} keeps {kept[action.stage]} micro-batches at {action}")
    if wanted - seen:
        raise ScheduleError(f"nobody runs {min(wanted - seen)}")
    for phone, action in _stuck(schedule):
        raise ScheduleError(f"phone {phone} waits for ever to run {action}")


def _stuck(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield the phones that cannot go on when each keeps to its order and waits for what it needs."""
    paths = [schedule.ring.path(micro) for micro in range(len(schedule.ring.owners))]
    before = {action: path[i - 1] for path in paths for i, action in enumerate(path) if i}
    at, done, moved = [0] * len(schedule.orders), set[Action](), True
    while moved:
        moved = False
        for phone, order in enumerate(schedule.orders):
            while at[phone] < len(order) and (order[at[phone]] not in before or before[order[at[phone]]] in done):
                done.add(order[at[phone]])
                at[phone] += 1
                moved = True
    yield from ((phone, order[at[phone]]) for phone, order in enumerate(schedule.orders) if at[phone] < len(order))
