"""Find the devices, and ask each what it has."""

import time
from collections.abc import Iterable
from logging import INFO, WARNING

from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_plugin.backbone import BackboneHead
from flower_plugin.config import RunConfig
from flower_plugin.errors import DeviceError, FlowerPluginError, PayloadError
from flower_plugin.messages import HEAD, PROFILE, HeadReply, HeadRequest, Profile, ProfileRequest, instruction
from flower_plugin.side.ledger import Ledger

from .exchange import Answer, Exchange
from .observe import Observe
from .roster import Agreement, Roster, make_roster

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


def enrol(grid: Grid, nodes: Iterable[int], config: RunConfig, agreement: Agreement | None, observe: Observe) -> Roster:
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
    roster = make_roster(profiles, config, agreement)
    for refusal in roster.refusals:
        _refuse(refusal.node_id, refusal.reason, observe)
    for device in roster.devices:
        _welcome(device.node_id, device.profile)
    return roster


def fetch_head(grid: Grid, roster: Roster, config: RunConfig, ledger: Ledger) -> BackboneHead:
    """Get the backbone's frozen head from the first device that can send one that fits.

    Raises
    ------
    DeviceError
        No device could.
    """
    problems = []
    request = HeadRequest(config=config, fingerprint=ledger.fingerprint)
    for device in roster.devices:
        exchange = Exchange(grid)
        message = instruction(request, HEAD, device.node_id, "head", config.shift_timeout)
        exchange.push([message], config.shift_timeout)
        for answer in exchange.answers():
            try:
                return _read_head(answer, ledger)
            except FlowerPluginError as error:
                problems.append(f"node {device.node_id}: {error}")
    raise DeviceError(f"no device could send the backbone's head: {'; '.join(problems) or 'none is there'}")


def _read_head(answer: Answer, ledger: Ledger) -> BackboneHead:
    if answer.reply is None:
        raise DeviceError(answer.problem)
    head = BackboneHead.from_bytes(HeadReply.from_records(answer.reply.content).head.tobytes())
    if head.width != ledger.hidden_size:
        raise PayloadError(f"its head is for width {head.width}, the backbone's is {ledger.hidden_size}")
    return head


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
