"""Messages and their bounded waits."""

from types import SimpleNamespace

from flower_plugin.strategies.exchange import Exchange
from flwr.app import Error


class SilentGrid:
    """Delivers to node 1, cannot deliver to node 2, and never has a reply but those in ``replies``."""

    def __init__(self):
        self.replies = []

    def push_messages(self, messages):
        return [f"m{m.metadata.dst_node_id}" if m.metadata.dst_node_id != 2 else None for m in messages]

    def pull_messages(self, ids):
        replies, self.replies = self.replies, []
        return replies


def message(node):
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node))


def reply(to, error=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=to), has_error=lambda: error is not None, error=error
    )


def test_silence_ends_at_the_deadline_and_names_the_node():
    exchange = Exchange(SilentGrid())
    exchange.push([message(1)], timeout=0.1)
    (answer,) = exchange.answers()
    assert answer.node_id == 1
    assert answer.reply is None
    assert "did not answer within 0" in answer.problem


def test_an_undeliverable_message_is_answered_at_once():
    exchange = Exchange(SilentGrid())
    exchange.push([message(2)], timeout=60)
    (answer,) = exchange.answers()
    assert answer.node_id == 2
    assert "delivered" in answer.problem


def test_an_error_reply_is_a_problem_with_its_reason():
    grid = SilentGrid()
    exchange = Exchange(grid)
    exchange.push([message(1), message(3)], timeout=60)
    grid.replies = [reply("m1", Error(8, "gone")), reply("m3")]
    first, second = exchange.answers()
    assert "error code 8" in first.problem
    assert "gone" in first.problem
    assert second.reply is not None
    assert len(exchange) == 0


def test_nothing_to_push_is_nothing_to_wait_for():
    exchange = Exchange(SilentGrid())
    exchange.push([], timeout=60)
    assert list(exchange.answers()) == []
