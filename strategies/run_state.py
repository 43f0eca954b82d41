"""What a run of Eco-MobiLLM knows: its devices, its agreement, its cache and its side networks."""

from collections.abc import Iterable
from dataclasses import replace
from logging import INFO
from pathlib import Path

from flwr.app import Array, ArrayRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_plugin.backbone import BackboneHead
from flower_plugin.config import RunConfig
from flower_plugin.errors import DeviceError
from flower_plugin.side.cache import ActivationCache
from flower_plugin.side.export import save_side_tuned
from flower_plugin.side.intake import Intake
from flower_plugin.side.ledger import Ledger, load_kept_head, load_ledger, save_head, save_ledger
from flower_plugin.side.recipe import SampleKey
from flower_plugin.side.tuning import SideTuning, has_checkpoint

from .enrolment import enrol, fetch_head, wait_for_nodes
from .observe import Observe
from .plan import agreement_of, make_intake, make_ledger, make_settings, make_tuning, server_agreement
from .roster import Roster, in_order

CHECKPOINT = "checkpoint"


class RunState:
    """Opened by the first enrolment; a stopped run's ledger and checkpoint are taken up again.

    Parameters
    ----------
    config : RunConfig
        The validated run config.
    folder : Path or None
        Where ledger and checkpoints are; ``None``: the run cannot be resumed.
    observe : callable
        Told of devices that are refused.
    """

    intake: Intake
    tuning: SideTuning
    ledger: Ledger

    def __init__(self, config: RunConfig, folder: Path | None, observe: Observe) -> None:
        self.config = config
        self.closed = False
        self.roster = Roster((), (), ())
        self._folder = folder
        self._observe = observe
        self._agreement = server_agreement(config)
        self._stopped = load_ledger(folder) if folder is not None else None
        self.cache = ActivationCache.open(config.cache_folder, int(config.cache_quota_gb * 1e9))

    @property
    def resumes(self) -> bool:
        """Whether epochs of a stopped run are there to go on from."""
        return self._folder is not None and has_checkpoint(self._folder / CHECKPOINT)

    def open(self, grid: Grid) -> None:
        """Meet the devices, agree with them, and build the side networks.

        Raises
        ------
        DeviceError
            Fewer than ``min-devices`` can take part, and there is no checkpoint to go on from without them.
        """
        fewest = 0 if self.resumes else self.config.min_devices
        nodes = wait_for_nodes(grid, fewest, self.config.wait_for_devices)
        agreed = agreement_of(self._stopped) if self._stopped else self._agreement
        found = enrol(grid, nodes, self.config, agreed, self._observe)
        if len(found.devices) < fewest:
            raise DeviceError(
                f"{len(found.devices)} of at least {fewest} devices can take part ('min-devices');"
                " see above why the others cannot"
            )
        self.ledger = self._stopped or make_ledger(found)
        self.intake = make_intake(self.config, self.ledger)
        self.admit(found)
        self.tuning = make_tuning(self.config, self.intake, self.cache, lambda: self._find_head(grid))
        if self.resumes and self._folder is not None:
            self.tuning.load(self._folder / CHECKPOINT)
            log(INFO, "Going on after epoch %s", self.tuning.epoch)

    def enrol_again(self, grid: Grid, known: Iterable[int] = ()) -> Roster:
        """Ask all nodes but the ``known`` ones for their profiles and take in what is new."""
        nodes = set(grid.get_node_ids()) - set(known)
        found = enrol(grid, nodes, self.config, agreement_of(self.ledger), self._observe)
        self.admit(found)
        return found

    def admit(self, found: Roster) -> None:
        """Take devices into the run; a device that came back takes its own place again."""
        by_tenant = {device.tenant: device for device in (*self.roster.devices, *found.devices)}
        self.roster = replace(self.roster, devices=in_order(by_tenant.values()))
        self._keep(self.ledger.with_samples({d.tenant: d.profile.digests for d in self.roster.devices}))

    def refuse(self, tenant: str, digests: Iterable[bytes]) -> None:
        """Note samples that a device cannot send: it is not asked for them again."""
        self._keep(self.ledger.with_refused(tenant, digests))

    def cached_samples(self, tenants: Iterable[str] | None = None) -> dict[str, list[SampleKey]]:
        """Tenant -> its samples that are in the cache, in the order of the ledger. Default: all tenants."""
        found = {}
        for tenant in self.ledger.digests if tenants is None else tenants:
            known = self.cache.known(self.intake.namespace(tenant))
            found[tenant] = [SampleKey(tenant, d) for d in self.ledger.samples(tenant) if d in known]
        return found

    def save(self) -> None:
        """Checkpoint the side networks."""
        if self._folder is not None:
            self.tuning.save(self._folder / CHECKPOINT)

    def arrays(self) -> ArrayRecord:
        """The best side networks so far, one packed array each."""
        return ArrayRecord({owner: Array(self.tuning.packed(owner)) for owner in self.tuning.owners})

    def export(self, folder: Path) -> list[Path]:
        """Write each side network to a folder of its own, with all that is needed to use it."""
        paths = []
        for owner in self.tuning.owners:
            settings = make_settings(self.config, self.intake)
            paths.append(save_side_tuned(self.tuning.network(owner), settings, folder / owner))
        return paths

    def close(self) -> None:
        """Close the cache."""
        self.closed = True
        self.cache.close()

    def _keep(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if self._folder is not None:
            save_ledger(ledger, self._folder)

    def _find_head(self, grid: Grid) -> BackboneHead:
        """The head that a stopped run kept, or else a device's."""
        kept = load_kept_head(self._folder) if self._folder is not None else None
        if kept is not None:
            return BackboneHead.from_bytes(kept)
        head = fetch_head(grid, self.roster, self.config, self.ledger)
        if self._folder is not None:
            save_head(head.to_bytes(), self._folder)
        return head
