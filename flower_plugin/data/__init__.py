"""Data for devices: samples, built-in sources, files, and their partition over devices."""

from .chats import Sender, chitchat, chitchat_senders
from .labelled import bbc_news, rotten_tomatoes
from .load import load_client_data
from .sample import ClientData, Options, Sample

__all__ = [
    "ClientData",
    "Options",
    "Sample",
    "Sender",
    "bbc_news",
    "chitchat",
    "chitchat_senders",
    "load_client_data",
    "rotten_tomatoes",
]
