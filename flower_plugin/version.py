"""The version of this plugin."""

VERSION = "0.1.0"
