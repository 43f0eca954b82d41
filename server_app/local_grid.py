"""A Grid without processes: whole federations inside one Python process, for tests and experiments."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

CLIENT_APP_RAISED = 2  # the error code that Flower's own runtimes give to a handler's exception


class LocalGrid(Grid):
    """Call a ClientApp directly, one message per pull, with one Context per node.

    Messages wait in a queue and each ``pull_messages`` runs the next one, so a strategy sees replies arrive
    one after another, as it does from devices of different speed.

    Parameters
    ----------
    client_app : ClientApp
        The app that answers the messages.
    node_configs : Mapping[int, Mapping]
        Node id -> node config of each simulated device.
    run_config : Mapping
        The run config that every handler sees.
    """

    def __init__(
        self,
        client_app: ClientApp,
        node_configs: Mapping[int, Mapping[str, Any]],
        run_config: Mapping[str, Any],
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._app = client_app
        self._run = Run.create_empty(1)
        self._queue: dict[str, Message] = {}
        self._replies: dict[str, Message] = {}
        self._counter = 0
        self.log: list[tuple[str, int]] = []
        """(message type, node id) of every message that was pushed, in order."""
        self.contexts = {
            node_id: Context(1, node_id, dict(config), RecordDict(), dict(run_config))
            for node_id, config in node_configs.items()
        }

    def set_run(self, run: Run) -> None:
        """Set the run that this grid works for."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid works for."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message of this run."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The ids of all simulated devices."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages; nothing runs before it is pulled."""
        ids = []
        for message in messages:
            self._counter += 1
            message_id = f"local-{self._counter}"
            message.metadata.__dict__["_message_id"] = message_id
            self._queue[message_id] = message
            self.log.append((message.metadata.message_type, message.metadata.dst_node_id))
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the next queued message among ``message_ids`` and return the replies that are ready."""
        wanted = list(message_ids)
        for message_id in wanted:
            if message_id in self._queue:
                reply = self._answer(self._queue.pop(message_id))
                if reply is not None:
                    self._replies[message_id] = reply
                break
        return [self._replies.pop(message_id) for message_id in wanted if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run all messages; give up after ``timeout`` seconds and return what is there."""
        waiting = set(self.push_messages(messages))
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        replies: list[Message] = []
        while waiting & self._queue.keys() and time.monotonic() < deadline:
            arrived = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
        return replies

    def _answer(self, message: Message) -> Message | None:
        """Reply of one device, an error reply if its handler raised. Tests override this to inject faults."""
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # a device's failure must never reach the server as an exception
            return Message(Error(CLIENT_APP_RAISED, repr(error)), reply_to=message)
