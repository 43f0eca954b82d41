"""Find the devices, and ask each what it has."""

import time
from collections.abc import Iterable
from logging import INFO, WARNING

from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_plugin.config import RunConfig
from flower_plugin.errors import DeviceError, FlowerPluginError
from flower_plugin.messages import HEAD, PROFILE, HeadReply, HeadRequest, Profile, ProfileRequest, instruction

from .exchange import Exchange
from .observe import Observe
from .roster import Roster, make_roster

POLL_SECONDS = 1.0


def wait_for_nodes(grid: Grid, fewest: int, seconds: float) -> tuple[int, ...]:
    """Node ids, as soon as there are ``fewest``.

    Raises
    ------
    DeviceError
        Fewer are connected after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        nodes = tuple(sorted(grid.get_node_ids()))
        if len(nodes) >= fewest:
            return nodes
        if time.monotonic() >= deadline:
            raise DeviceError(
                f"{len(nodes)} of at least {fewest} devices are connected after {seconds:.0f} s;"
                " start more SuperNodes, or lower 'min-devices'"
            )
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def enrol(grid: Grid, nodes: Iterable[int], config: RunConfig, fingerprint: str | None, observe: Observe) -> Roster:
    """Ask each node for its profile and decide who takes part; say who does not, and why."""
    exchange = Exchange(grid)
    request = ProfileRequest(config=config)
    exchange.push(
        (instruction(request, PROFILE, node, "enrolment", config.query_timeout) for node in nodes),
        config.query_timeout,
    )
    profiles: dict[int, Profile] = {}
    for answer in exchange.answers():
        try:
            if answer.reply is None:
                raise DeviceError(answer.problem)
            profiles[answer.node_id] = Profile.from_records(answer.reply.content)
        except FlowerPluginError as error:
            _refuse(answer.node_id, str(error), observe)
    roster = make_roster(profiles, config, fingerprint)
    for refusal in roster.refusals:
        _refuse(refusal.node_id, refusal.reason, observe)
    for device in roster.devices:
        _welcome(device.node_id, device.profile)
    return roster


def fetch_head(grid: Grid, roster: Roster, config: RunConfig, fingerprint: str) -> bytes:
    """Get the backbone's frozen head from the first device that can send it.

    Raises
    ------
    DeviceError
        No device could.
    """
    problems = []
    for device in roster.devices:
        exchange = Exchange(grid)
        request = HeadRequest(config=config, fingerprint=fingerprint)
        exchange.push([instruction(request, HEAD, device.node_id, "head", config.shift_timeout)], config.shift_timeout)
        for answer in exchange.answers():
            try:
                if answer.reply is None:
                    raise DeviceError(answer.problem)
                return HeadReply.from_records(answer.reply.content).head.tobytes()
            except FlowerPluginError as error:
                problems.append(f"node {device.node_id}: {error}")
    raise DeviceError(f"no device could send the backbone's head: {'; '.join(problems)}")


def _refuse(node_id: int, reason: str, observe: Observe) -> None:
    observe("refused", {"node": node_id, "reason": reason})
    log(WARNING, "Node %s takes no part: %s", node_id, reason)


def _welcome(node_id: int, profile: Profile) -> None:
    notes = [
        f"{count} {what}"
        for count, what in (
            (profile.truncated, "truncated"),
            (profile.unusable, "unusable"),
            (profile.duplicates, "duplicates"),
        )
        if count
    ]
    log(
        INFO, "Node %s: %s training and %s held-out samples%s",
        node_id, len(profile.digests), profile.num_test, f" ({', '.join(notes)})" if notes else "",
    )  # fmt: skip
