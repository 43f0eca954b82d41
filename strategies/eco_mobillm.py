"""Eco-MobiLLM: devices forward each sample once, the server trains a side network from what it cached.

Round 1 is stage one: the devices work, and the server trains on what has arrived meanwhile. Every later
round is stage two: an epoch from the cache, for which no device is asked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_plugin.config import RunConfig
from flower_plugin.errors import DeviceError
from flower_plugin.side.tuning import RoundMetrics

from .evaluation import evaluation_messages, gather_evaluations
from .exchange import Exchange, read_reply
from .observe import Observe, ignore
from .roster import Device
from .run_state import RunState
from .stage_one import StageOne
from .summary import summarise
from .tally import Tally


class EcoMobiLLM(Strategy):
    """Side-tuning that the server hosts.

    Parameters
    ----------
    config : RunConfig
        The validated run config.
    folder : Path, optional
        Where ledger and checkpoints go; without it the run cannot be resumed.
    observe : callable, optional
        Told of every event (name, fields): ``refused``, ``request``, ``shift``, ``fault``, ``epoch``,
        ``evaluation``.
    """

    def __init__(self, config: RunConfig, folder: Path | None = None, observe: Observe = ignore) -> None:
        self.config = config
        self.tally = Tally()
        self._folder = folder
        self._listener = observe
        self._state: RunState | None = None
        self._stage: StageOne | None = None
        self._figures: dict[str, Any] = {}

    def summary(self) -> None:
        """Log what will be done."""
        config = self.config
        log(INFO, "\t├──> Backbone: %s (%s)", config.backbone, config.task)
        log(INFO, "\t├──> Taps: %s, tokens: %s, codec: %s", config.taps, config.token_rule, config.codec)
        log(INFO, "\t├──> Side networks: %s, %s epochs", config.scope, config.num_rounds)
        log(INFO, "\t└──> Cache: %s (at most %s GB)", config.cache_folder, config.cache_quota_gb)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """In a stage-one round, ask every device for the samples that the cache lacks; else ask nobody."""
        state = self._opened(grid)
        self._stage = StageOne(state, Exchange(grid), server_round, self.observe)
        if not self._meets_devices(server_round):
            return []
        if server_round > 1:
            state.enrol_again(grid)
        return self._stage.first_shifts(state.roster.devices)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Cache what the replies hold, and finish the round's epoch from the cache."""
        state, stage = self._run, self._stage
        for reply in replies:
            if stage is not None:
                stage.settle(read_reply(reply.metadata.src_node_id, reply))
        metrics = state.tuning.finish_round(state.cached_samples())
        if not metrics.samples:
            raise DeviceError("no device sent a sample that can be trained on; see the faults above")
        state.save()
        self._report(server_round, metrics)
        return state.arrays(), MetricRecord(_given(metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send each device the side network that serves it."""
        return evaluation_messages(self._opened(grid), f"evaluation {server_round}")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean of the devices' figures, weighted by what they evaluated on; bad replies are left out."""
        answers = [read_reply(reply.metadata.src_node_id, reply) for reply in replies]
        means = gather_evaluations(answers, self._run.roster.devices, self.config, self.observe)
        if means is None:
            return None
        self.observe("evaluation", {"round": server_round, **means})
        log(INFO, "Evaluation on the devices: accuracy %.3f, loss %.3f", means["accuracy"], means["loss"])
        return MetricRecord({**means})

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run both stages.

        Parameters
        ----------
        grid : Grid
            Reaches the devices.
        num_rounds : int, optional
            Epochs; default: ``num-rounds`` of the config.
        evaluate_fn : callable, optional
            Called after each round with its number and the packed side networks.
        initial_arrays, timeout, train_config, evaluate_config
            Part of Flower's signature, and unused: a side network starts as the backbone itself, and the run
            config, which travels in every message, has a timeout for each kind of message.

        Returns
        -------
        Result
            Arrays (one packed side network each), and metrics by round.

        Raises
        ------
        FlowerPluginError
            Too few devices, nothing to train on, or a cache that cannot be written.
        """
        rounds = num_rounds or self.config.num_rounds
        self.config = self.config.model_copy(update={"num_rounds": rounds})
        log(INFO, "Starting %s:", type(self).__name__)
        self.summary()
        result = Result()
        try:
            tuning = self._opened(grid).tuning
            if tuning.epoch == 0:
                self._evaluate(grid, 0, result)
            for server_round in range(tuning.epoch + 1, rounds + 1):
                if tuning.exhausted:
                    log(INFO, "No gain on the held-out training samples for %s epochs", self.config.patience)
                    break
                log(INFO, "[EPOCH %s/%s]", server_round, rounds)
                self._train(grid, server_round, result)
                if evaluate_fn is not None and (metrics := evaluate_fn(server_round, result.arrays)):
                    result.evaluate_metrics_serverapp[server_round] = metrics
                if self._evaluates_after(server_round, rounds):
                    self._evaluate(grid, server_round, result)
            self._evaluate(grid, tuning.epoch, result)
            result.arrays = self._run.arrays()
            self._figures = summarise(self._run, self.tally)
        finally:
            self.close()
        return result

    def close(self) -> None:
        """Close the cache; the side networks stay. A further `start` meets the devices anew."""
        if self._state is not None:
            self._state.close()

    def export(self, folder: Path) -> list[Path]:
        """Write each side network to a folder that `flower_plugin.load_side_tuned` reads."""
        return self._run.export(folder)

    def report(self) -> dict[str, Any]:
        """What the run came to so far, as JSON values: quality, bytes, seconds, messages."""
        return self._figures or summarise(self._run, self.tally)

    def recall(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Count the events of a stopped run, which this one goes on with."""
        for event in events:
            self.tally.note(event["event"], event)

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event, and tell whoever listens."""
        self.tally.note(event, fields)
        self._listener(event, fields)

    def _opened(self, grid: Grid) -> RunState:
        if self._state is None or self._state.closed:
            self._state = RunState(self.config, self._folder, self.observe)
            self._state.open(grid)
        return self._state

    @property
    def _run(self) -> RunState:
        if self._state is None:
            raise DeviceError("the strategy has not met its devices; call start() first")
        return self._state

    def _train(self, grid: Grid, server_round: int, result: Result) -> None:
        messages = list(self.configure_train(server_round, result.arrays, ConfigRecord(), grid))
        if messages or server_round == 1:
            self._meet_devices(grid, messages)
        arrays, metrics = self.aggregate_train(server_round, ())
        if arrays is not None and metrics is not None:
            result.arrays, result.train_metrics_clientapp[server_round] = arrays, metrics

    def _meet_devices(self, grid: Grid, messages: list[Message]) -> None:
        """Run stage one, and train on each device's samples once those of all devices before it are there."""
        assert self._stage is not None
        waiting = {message.metadata.dst_node_id for message in messages}
        queue = self._train_on_arrived(list(self._run.roster.devices), waiting)
        for device in self._stage.run(messages):
            waiting.discard(device.node_id)
            queue = self._train_on_arrived(queue, waiting)
        if self._stage.failed:
            self._stage.ask_again(grid)

    def _train_on_arrived(self, queue: list[Device], waiting: set[int]) -> list[Device]:
        # In the order of the roster, so that the weights do not depend on which device was faster.
        expected = sum(len(device.profile.digests) for device in self._run.roster.devices)
        while queue and queue[0].node_id not in waiting:
            samples = self._run.cached_samples([queue.pop(0).tenant])
            self._run.tuning.arrive(samples, expected)
        return queue

    def _evaluate(self, grid: Grid, server_round: int, result: Result) -> None:
        if server_round in self.tally.evaluations:
            return
        messages = list(self.configure_evaluate(server_round, result.arrays, ConfigRecord(), grid))
        exchange = Exchange(grid)
        exchange.push(messages, self.config.evaluate_timeout)
        answers = list(exchange.answers())
        for answer in answers:
            if answer.reply is None:
                self.observe("fault", {"node": answer.node_id, "reason": f"evaluation: {answer.problem}"})
        metrics = self.aggregate_evaluate(server_round, [a.reply for a in answers if a.reply is not None])
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _report(self, server_round: int, metrics: RoundMetrics) -> None:
        device_seconds = round(self.tally.device_seconds.get(server_round, 0.0), 3)
        self.observe("epoch", {"round": server_round, "device_seconds": device_seconds, **_given(metrics)})
        log(
            INFO, "Epoch %s: %s samples, loss %.4f%s, %.1f s on the server, %.1f s on the devices",
            server_round, metrics.samples, metrics.loss, _held_out(metrics), metrics.seconds, device_seconds,
        )  # fmt: skip

    def _meets_devices(self, server_round: int) -> bool:
        every = self.config.refresh_every
        return server_round == 1 or (every > 0 and (server_round - 1) % every == 0)

    def _evaluates_after(self, server_round: int, rounds: int) -> bool:
        every = self.config.evaluate_every
        return every > 0 and server_round % every == 0 and server_round < rounds


def _given(metrics: RoundMetrics) -> dict[str, Any]:
    return {name: value for name, value in asdict(metrics).items() if value is not None}


def _held_out(metrics: RoundMetrics) -> str:
    if metrics.holdout_loss is None:
        return ""
    return f", held-out loss {metrics.holdout_loss:.4f} (accuracy {metrics.holdout_accuracy:.3f})"
