"""Messages on their way: push, poll for replies, and a bounded wait for each."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

FIRST_POLL = 0.02
SLOWEST_POLL = 1.0


@dataclass(frozen=True)
class Answer:
    """What became of one message: a reply, or the reason that there is none."""

    node_id: int
    reply: Message | None
    problem: str = ""


class Exchange:
    """Messages that wait for their replies, each until its own deadline.

    Parameters
    ----------
    grid : Grid
        Carries the messages.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, tuple[int, float, float]] = {}
        self._undeliverable: list[Answer] = []

    def __len__(self) -> int:
        """Number of messages without an answer."""
        return len(self._open) + len(self._undeliverable)

    def push(self, messages: Iterable[Message], timeout: float) -> None:
        """Send messages; each must be answered within ``timeout`` seconds."""
        batch = list(messages)
        if not batch:
            return
        ids = list(self._grid.push_messages(batch))
        deadline = time.monotonic() + timeout
        for position, message in enumerate(batch):
            node_id = message.metadata.dst_node_id
            message_id = ids[position] if position < len(ids) else None
            if message_id:
                self._open[message_id] = (node_id, deadline, timeout)
            else:
                self._undeliverable.append(Answer(node_id, None, "the message could not be delivered to it"))

    def poll(self) -> list[Answer]:
        """Answers that came since the last call; messages past their deadline are answered by a problem."""
        answers, self._undeliverable = self._undeliverable, []
        if self._open:
            for reply in self._grid.pull_messages(list(self._open)):
                node_id, _, _ = self._open.pop(reply.metadata.reply_to_message_id)
                answers.append(read_reply(node_id, reply))
        now = time.monotonic()
        for message_id, (node_id, deadline, timeout) in list(self._open.items()):
            if now > deadline:
                del self._open[message_id]
                answers.append(Answer(node_id, None, f"it did not answer within {timeout:.0f} s"))
        return answers

    def answers(self) -> Iterator[Answer]:
        """All answers as they come, until no message is open."""
        pause = FIRST_POLL
        while len(self):
            arrived = self.poll()
            yield from arrived
            pause = FIRST_POLL if arrived else min(SLOWEST_POLL, pause * 1.5)
            if not arrived:
                time.sleep(pause)


def read_reply(node_id: int, reply: Message) -> Answer:
    """The answer that a reply is; an error of Flower's own becomes a problem."""
    if reply.has_error():
        reason = (reply.error.reason or "no reason given").strip()
        return Answer(node_id, None, f"it failed (error code {reply.error.code}): {reason[-500:]}")
    return Answer(node_id, reply)
