"""Where a backbone's files are: a folder, a GGUF file, a folder inside an installed package, or a hub id."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from flower_plugin.errors import BackboneError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_LIGHT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_SUBFOLDERS = ("*/*",)


@dataclass(frozen=True)
class BackboneSource:
    """Where a backbone is found.

    Attributes
    ----------
    spec
        The words it was named by.
    folder
        Its local folder; None for a hub id.
    hub_id, revision
        Its name on the Hugging Face hub and the pinned revision, else None.
    gguf_file
        File name inside ``folder`` when it is a GGUF file, else None.
    """

    spec: str
    folder: Path | None = None
    hub_id: str | None = None
    revision: str | None = None
    gguf_file: str | None = None


def resolve(spec: str) -> BackboneSource:
    """Find out what a spec names; touches neither the network nor the weights.

    Parameters
    ----------
    spec
        ``org/name`` or ``org/name@revision`` (hub), a local folder, a path to a ``.gguf`` file,
        ``package:PKG/sub/folder`` or ``package:PKG/file.gguf`` (files inside an installed Python package).

    Raises
    ------
    BackboneError
        The path, the package or the form of the spec is wrong.
    """
    if not spec.strip():
        raise BackboneError("the backbone is empty: name a hub id, a folder, a .gguf file or 'package:PKG/folder'")
    if spec.startswith("package:"):
        return _local(spec, _package_path(spec))
    path = Path(spec).expanduser()
    if path.exists():
        return _local(spec, path)
    if not _HUB_ID.fullmatch(spec) or path.suffix == ".gguf":
        raise BackboneError(f"backbone {spec!r}: there is no such file or folder ({path.absolute()})")
    hub_id, _, revision = spec.partition("@")
    return BackboneSource(spec, hub_id=hub_id, revision=revision or None)


def local_folder(source: BackboneSource, *, with_weights: bool) -> Path:
    """Return the local folder of a source; files of a hub id are downloaded (or taken from the hub's cache).

    Raises
    ------
    BackboneError
        The hub cannot be reached and its cache does not hold the files.
    """
    if source.folder is not None:
        return source.folder
    folder = _snapshot(source, _LIGHT_FILES)
    if with_weights:
        folder = _snapshot(source, (*_LIGHT_FILES, "*.safetensors"))
        if not any(folder.glob("*.safetensors")):
            folder = _snapshot(source, (*_LIGHT_FILES, "pytorch_model*.bin"))
    return folder


def _local(spec: str, path: Path) -> BackboneSource:
    path = path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(file.name for file in path.glob("*.gguf"))
            advice = f"name its GGUF file: {', '.join(found)}" if found else "give the folder of save_pretrained()"
            raise BackboneError(f"backbone {spec!r}: the folder {path} has no config.json; {advice}")
        return BackboneSource(spec, folder=path)
    if path.suffix != ".gguf":
        raise BackboneError(f"backbone {spec!r}: {path} is neither a folder nor a .gguf file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BackboneError(f"backbone {spec!r}: {path} is not a GGUF file (it does not start with 'GGUF')")
    return BackboneSource(spec, folder=path.parent, gguf_file=path.name)


def _package_path(spec: str) -> Path:
    package, _, inside = spec.removeprefix("package:").partition("/")
    if not package.isidentifier():
        raise BackboneError(f"backbone {spec!r}: give 'package:PKG/folder' with the package's import name")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise BackboneError(f"backbone {spec!r}: the package {package!r} is not installed (pip install it first)")
    roots = [Path(root).resolve() for root in found.submodule_search_locations]
    for root in roots:
        path = (root / inside).resolve()
        if path.is_relative_to(root) and path.exists():
            return path
    raise BackboneError(f"backbone {spec!r}: the package {package!r} ({roots[0]}) holds no {inside!r}")


def _snapshot(source: BackboneSource, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source.hub_id or "",
                revision=source.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_SUBFOLDERS),
            )
        )
    except Exception as error:  # the hub client raises errors of many libraries
        raise BackboneError(
            f"backbone {source.spec!r} is no local folder, and the Hugging Face hub did not give it:"
            f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} Check the name and"
            " the network, or give a local folder, or set HF_HOME to a hub cache that holds it."
        ) from error
