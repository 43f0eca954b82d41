"""The errors this plugin raises: every message says what is wrong, where, and what to do."""


class FlowerPluginError(Exception):
    """Base of all errors that a user of the plugin can act on."""


class ConfigError(FlowerPluginError):
    """A run-config or node-config value is missing or not allowed."""


class BackboneError(FlowerPluginError):
    """A backbone cannot be found, loaded, supported, or is not the one expected."""


class DataError(FlowerPluginError):
    """A data source or one of its samples cannot be used."""


class PayloadError(FlowerPluginError):
    """Bytes that came over the wire are not what their sender promised."""


class CacheError(FlowerPluginError):
    """The activation cache cannot store or return a record."""


class DeviceError(FlowerPluginError):
    """A device cannot take part: it failed, left, or does not fit the run."""
