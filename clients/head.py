"""``query.head``: the frozen head of the backbone, for a server that has no checkpoint."""

import numpy as np
from flwr.app import Context

from flower_plugin.backbone import load_head
from flower_plugin.messages import HeadReply, HeadRequest

from .backbones import require_fingerprint
from .device import device_config


def send_head(request: HeadRequest, context: Context) -> HeadReply:
    """Read the head's tensors from the checkpoint and pack them."""
    config = device_config(request.config, context.node_config)
    require_fingerprint(config.backbone, request.fingerprint)
    return HeadReply(head=np.frombuffer(load_head(config.backbone).to_bytes(), np.uint8))
