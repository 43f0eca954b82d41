"""Who takes part: devices that answered, checked against each other, in an order that every run repeats."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from flower_plugin.config import RunConfig
from flower_plugin.messages import Profile


@dataclass(frozen=True)
class Device:
    """A device that takes part.

    Attributes
    ----------
    node_id : int
        Its Flower node id in this run.
    tenant : str
        The stable identity under which its samples are kept.
    profile : Profile
        What it said of itself.
    """

    node_id: int
    tenant: str
    profile: Profile


@dataclass(frozen=True)
class Agreement:
    """What the backbone of a run is, and how its samples become tokens: the same on every device."""

    fingerprint: str
    template: str
    num_blocks: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, profile: Profile) -> "Agreement":
        """What a device says of its own."""
        return cls(**{field.name: getattr(profile, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Refusal:
    """A device that cannot take part, and why."""

    node_id: int
    reason: str


@dataclass(frozen=True)
class Roster:
    """The devices of a run in their order, those refused, and the class names that all share."""

    devices: tuple[Device, ...]
    refusals: tuple[Refusal, ...]
    label_names: tuple[str, ...]


def make_roster(profiles: Mapping[int, Profile], config: RunConfig, agreement: Agreement | None) -> Roster:
    """Decide who takes part.

    Parameters
    ----------
    profiles : Mapping[int, Profile]
        Node id -> what the node said of itself.
    config : RunConfig
        Decides identities and class names.
    agreement : Agreement or None
        What the server's own backbone is. ``None``: the server has none, and what most devices have is taken.

    Returns
    -------
    Roster
        Devices sorted by partition, then tenant: the same in every run, whatever the node ids are.
    """
    expected = agreement or most_common(profiles.values())
    devices: dict[str, Device] = {}
    refusals: list[Refusal] = []
    for node_id, profile in sorted(profiles.items(), key=lambda item: (item[1].order, item[1].tenant)):
        tenant = f"node-{node_id}" if config.identity == "node" else profile.tenant
        reason = _reason_to_refuse(profile, expected)
        if reason is None and tenant in devices:
            reason = (
                f"it has the same identity as node {devices[tenant].node_id};"
                " give each device on a machine its own 'device-name' or 'device-dir' in its node config"
            )
        if reason is None:
            devices[tenant] = Device(node_id, tenant, profile)
        else:
            refusals.append(Refusal(node_id, reason))
    names = config.class_names or _all_labels(tuple(device.profile for device in devices.values()))
    return Roster(in_order(devices.values()), tuple(refusals), names)


def in_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Devices by partition, then tenant."""
    return tuple(sorted(devices, key=lambda device: (device.profile.order, device.tenant)))


def most_common(profiles: Iterable[Profile]) -> Agreement | None:
    """What most devices have; of several equally common ones the first in order of the fingerprint."""
    counts = Counter(Agreement.of(profile) for profile in profiles)
    ordered = sorted(counts, key=lambda one: (one.fingerprint, one.template))
    return max(ordered, key=lambda one: counts[one], default=None)


def _reason_to_refuse(profile: Profile, agreed: Agreement | None) -> str | None:
    if agreed is None or profile.fingerprint != agreed.fingerprint:
        fingerprint = agreed.fingerprint if agreed else None
        return (
            f"its backbone or tokenizer ({profile.model_type}, {profile.fingerprint[:12]}) is not that of the"
            f" run ({str(fingerprint)[:12]}); put the same checkpoint on the device"
        )
    different = [
        f"{field.name.replace('_', ' ')} {getattr(profile, field.name)} instead of {getattr(agreed, field.name)}"
        for field in fields(Agreement)
        if getattr(profile, field.name) != getattr(agreed, field.name)
    ]
    if different:
        return f"it has {', '.join(different)}; install the same versions of flower-plugin and transformers"
    if not profile.digests and not profile.num_test:
        return "it has no usable sample; check 'data' and the column names in its node config"
    return None


def _all_labels(profiles: tuple[Profile, ...]) -> tuple[str, ...]:
    orders = {profile.label_names for profile in profiles}
    if len(orders) == 1:  # a source that knows its classes gives them in its own order
        return orders.pop()
    names = {name for order in orders for name in order}
    numeric = all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if numeric else None))
