"""Find an object by its reference ``module:attribute``."""

import importlib
from typing import Any

from .errors import ConfigError


def load_object(reference: str, key: str) -> Any:
    """Import the object that a config value names.

    The parts of this plugin stand at the top of a checkout and of an app bundle, and inside
    ``flower_plugin`` once installed; both places are tried, the named one first.

    Parameters
    ----------
    reference : str
        ``module:attribute``.
    key : str
        The config key it came from, for the error message.

    Raises
    ------
    ConfigError
        The reference is malformed, or the module or its attribute does not exist.
    """
    module_name, separator, attribute = reference.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(f"'{key}' = {reference!r}: give an object reference such as 'package.module:name'")
    problems = []
    for name in (module_name, f"flower_plugin.{module_name}"):
        try:
            return getattr(importlib.import_module(name), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise ConfigError(f"'{key}' = {reference!r}: {name} needs the missing module {error.name}") from error
            problems.append(f"no module {name}")
        except AttributeError:
            problems.append(f"{name} has no {attribute!r}")
    raise ConfigError(f"'{key}' = {reference!r} cannot be found: {'; '.join(problems)}")
