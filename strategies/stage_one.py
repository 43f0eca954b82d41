"""Stage one: every device forwards each of its samples once; what it sends is checked and cached."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_plugin.errors import CacheError, DeviceError, FlowerPluginError, PayloadError
from flower_plugin.messages import ACTIVATIONS, ActivationReply, ActivationRequest, instruction

from .exchange import Answer, Exchange
from .observe import Observe
from .roster import Device
from .run_state import RunState

COSTS = ("device_seconds", "device_cpu_seconds", "forwarded_tokens", "sent_tokens", "device_peak_mb")


@dataclass(frozen=True)
class Shift:
    """A device at work: the samples it still owes, and the number of the shift."""

    device: Device
    wanted: tuple[bytes, ...]
    number: int = 1
    started: float = field(default_factory=time.monotonic)


class StageOne:
    """Asks devices for the activations that the cache does not have, shift by shift, side by side.

    Parameters
    ----------
    state : RunState
        Cache, plan and roster of the run.
    exchange : Exchange
        Carries the messages.
    server_round : int
        The round it belongs to.
    observe : callable
        Told of every request, shift and fault.
    """

    def __init__(self, state: RunState, exchange: Exchange, server_round: int, observe: Observe) -> None:
        self._state = state
        self._exchange = exchange
        self._round = server_round
        self._observe = observe
        self._shifts: dict[int, Shift] = {}
        self.failed: list[Device] = []

    def first_shifts(self, devices: Sequence[Device]) -> list[Message]:
        """Messages to the devices of which the cache does not have all samples."""
        owing = [Shift(device, wanted) for device in devices if (wanted := self._missing(device))]
        return [self._request(shift) for shift in owing]

    def run(self, messages: Sequence[Message]) -> Iterator[Device]:
        """Send the first shifts and every further one; yield each device that is done, or has failed."""
        timeout = self._state.config.shift_timeout
        self._exchange.push(messages, timeout)
        for answer in self._exchange.answers():
            device = self._shifts[answer.node_id].device
            following = self.settle(answer)
            if following is None:
                yield device
            else:
                self._exchange.push([self._request(following)], timeout)
        self._warn_of_evictions()

    def settle(self, answer: Answer) -> Shift | None:
        """Take in one answer; return the device's next shift, or ``None`` if it is done or out.

        Raises
        ------
        CacheError
            The cache cannot store more: no other device would fare better.
        """
        shift = self._shifts.pop(answer.node_id, None)
        if shift is None:
            return None
        try:
            if answer.reply is None:
                raise DeviceError(answer.problem)
            reply = ActivationReply.from_records(answer.reply.content)
            done = self._accept(shift, reply)
            self._report(shift, reply, len(done) - len(done.intersection(reply.refused)))
            wanted = self._still_wanted(shift, reply, done)
        except CacheError:
            raise
        except FlowerPluginError as error:
            self._fail(shift.device, str(error))
            return None
        return Shift(shift.device, wanted, shift.number + 1) if wanted else None

    def ask_again(self, grid: Grid) -> None:
        """Give devices that failed a second chance; they may have come back under another node id."""
        failed = {device.tenant for device in self.failed}
        self.failed = []
        fine = [device.node_id for device in self._state.roster.devices if device.tenant not in failed]
        returned = self._state.enrol_again(grid, known=fine)
        for _ in self.run(self.first_shifts(returned.devices)):
            pass

    def _accept(self, shift: Shift, reply: ActivationReply) -> frozenset[bytes]:
        device, state = shift.device, self._state
        if state.config.identity == "device" and reply.tenant != device.tenant:
            raise PayloadError("it answers for another device")
        wanted = set(shift.wanted)
        shipment = state.intake.unpack(reply.payload, reply.index, wanted)
        state.cache.put(state.intake.namespace(device.tenant), shipment)
        refused = wanted.intersection(reply.refused).difference(shipment.digests)
        if refused:
            state.refuse(device.tenant, refused)
        return frozenset(shipment.digests) | refused

    def _still_wanted(self, shift: Shift, reply: ActivationReply, done: frozenset[bytes]) -> tuple[bytes, ...]:
        # Not what the cache lacks: one that is too small would make the devices send for ever.
        wanted = tuple(digest for digest in shift.wanted if digest not in done)
        if wanted and not reply.remaining:
            raise PayloadError(f"it left out {len(wanted)} samples without a word")
        if wanted and len(wanted) == len(shift.wanted):
            raise PayloadError(f"it sent nothing, and still has {len(wanted)} samples to send")
        return wanted

    def _missing(self, device: Device) -> tuple[bytes, ...]:
        namespace = self._state.intake.namespace(device.tenant)
        return tuple(self._state.cache.missing(namespace, self._state.ledger.wanted(device.tenant)))

    def _request(self, shift: Shift) -> Message:
        node_id, config = shift.device.node_id, self._state.config
        self._shifts[node_id] = shift
        self._observe("request", {"round": self._round, "node": node_id, "samples": len(shift.wanted)})
        request = ActivationRequest(config=config, wanted=shift.wanted, **self._state.intake.plan)
        return instruction(request, ACTIVATIONS, node_id, f"round {self._round}", config.shift_timeout)

    def _report(self, shift: Shift, reply: ActivationReply, stored: int) -> None:
        device, size = shift.device, len(reply.payload) + len(reply.index)
        facts = {
            "round": self._round,
            "node": device.node_id,
            "tenant": device.tenant,
            "number": shift.number,
            "samples": stored,
            "refused": len(reply.refused),
            "bytes": size,
            "round_trip_seconds": round(time.monotonic() - shift.started, 3),
        }
        costs = {name: reply.costs[name] for name in COSTS if math.isfinite(reply.costs.get(name, math.nan))}
        self._observe("shift", {**costs, **facts})
        log(
            INFO, "Stage one: node %s sent %s samples in %.2f MB, %s to come",
            device.node_id, stored, size / 1e6, reply.remaining,
        )  # fmt: skip
        if reply.refused:
            log(
                WARNING, "Node %s leaves out %s samples: gone, of a class that the run does not know, with activations"
                " that are not finite, or larger than 'byte-budget-mb'", device.node_id, len(reply.refused),
            )  # fmt: skip

    def _warn_of_evictions(self) -> None:
        evicted = self._state.cache.statistics().evictions
        if evicted:
            log(
                WARNING, "The cache is too small: %s samples made room for others and will not be trained on;"
                " raise 'cache-quota-gb'", evicted,
            )  # fmt: skip

    def _fail(self, device: Device, reason: str) -> None:
        self.failed.append(device)
        self._observe("fault", {"node": device.node_id, "tenant": device.tenant, "reason": reason})
        log(WARNING, "Node %s drops out of stage one: %s. The others go on.", device.node_id, reason)
