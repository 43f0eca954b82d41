"""The ClientApp: what a device does in one message.

Handlers load torch and the backbone where they use them, since every message may start a new process.
"""

import traceback
from collections.abc import Callable
from logging import ERROR
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from flower_plugin.errors import FlowerPluginError
from flower_plugin.messages import (
    ActivationRequest,
    Envelope,
    EvaluateRequest,
    Failure,
    HeadRequest,
    ProfileRequest,
)

Request = TypeVar("Request", bound=Envelope)
app = ClientApp()


@app.query("profile")
def query_profile(message: Message, context: Context) -> Message:
    """Describe the device."""
    from .profile import profile

    return answer(message, context, ProfileRequest, profile)


@app.query("head")
def query_head(message: Message, context: Context) -> Message:
    """Send the backbone's frozen head."""
    from .head import send_head

    return answer(message, context, HeadRequest, send_head)


@app.train("activations")
def train_activations(message: Message, context: Context) -> Message:
    """Forward samples once and send what the loss needs."""
    from .activations import collect_activations

    return answer(message, context, ActivationRequest, collect_activations)


@app.evaluate("side_tuned")
def evaluate_side_tuned(message: Message, context: Context) -> Message:
    """Evaluate a side network on held-out samples."""
    from .evaluation import evaluate_side_tuned as evaluate

    return answer(message, context, EvaluateRequest, evaluate)


def answer(
    message: Message,
    context: Context,
    kind: type[Request],
    handle: Callable[[Request, Context], Envelope],
) -> Message:
    """Run a handler. What goes wrong becomes a reply that says so, and the device's log has the traceback."""
    reply: Envelope
    try:
        reply = handle(kind.from_records(message.content), context)
    except FlowerPluginError as error:
        log(ERROR, "%s: %s", message.metadata.message_type, error)
        reply = Failure(reason=str(error))
    except Exception as error:
        log(ERROR, "%s failed:\n%s", message.metadata.message_type, traceback.format_exc())
        reply = Failure(reason=f"{type(error).__name__}: {error}")
    return Message(reply.to_records(), reply_to=message)
