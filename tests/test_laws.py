"""The laws of docs/architecture.md, held by reading every source file."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("flower_plugin", "strategies", "clients", "server_app")
APART = ("strategies", "clients", "server_app")
SOURCES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}
LONGEST_FILE = 300

# Nothing else writes: each file here says what, and why the rest of the code need not.
WRITERS = {
    "flower_plugin/backbone/gguf.py",  # a GGUF file, converted once
    "flower_plugin/config_table.py",  # the table in the README
    "flower_plugin/side/cache_index.py",  # the activation cache
    "flower_plugin/side/cache_store.py",  # the activation cache
    "flower_plugin/side/checkpoint.py",  # side networks of a run that may be stopped
    "flower_plugin/side/export.py",  # side networks for use
    "flower_plugin/side/ledger.py",  # what a run agreed on
    "clients/device.py",  # a device's identity
    "server_app/pictures.py",
    "server_app/run_folder.py",  # run config, metrics, summary
}
WRITING_CALLS = {
    *("write_text", "write_bytes", "mkdir", "touch", "unlink", "rmdir", "rename", "symlink_to", "hardlink_to"),
    *("rmtree", "copy", "copy2", "copyfile", "copytree", "move", "makedirs", "remove", "link", "symlink"),
    *("mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory"),
    *("save_pretrained", "save_file", "savefig", "tofile", "savez", "memmap"),
}
ON_MODULES_ONLY = {"copy", "remove", "link", "move", "rename", "symlink"}
"""Names that lists, dicts and arrays have too: they write when they are called on one of these modules."""
FILE_MODULES = {"os", "shutil", "path"}


def imported(path: str) -> Iterator[str]:
    """Absolute names of all modules, and of the names taken from them, that a file imports anywhere."""
    package = path.split("/")[:-1]
    for node in ast.walk(SOURCES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports(path: str, name: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for module in imported(path))


def calls(path: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(SOURCES[path]) if isinstance(node, ast.Call))


def called(call: ast.Call) -> tuple[str, str]:
    """(what it is called on, its name); the first is empty for a function that stands alone."""
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func.value), call.func.attr
    return "", call.func.id if isinstance(call.func, ast.Name) else ""


def writes(call: ast.Call) -> bool:
    owner, name = called(call)
    if name == "open":
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        modes = [arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        return owner == "lmdb" or any(re.fullmatch(r"[rwaxbt+]+", m) and set(m) & set("wax+") for m in modes)
    return name in WRITING_CALLS and (name not in ON_MODULES_ONLY or owner in FILE_MODULES)


def test_there_is_something_to_hold():
    assert len(SOURCES) > 60
    assert {path.split("/")[0] for path in SOURCES} == set(FOLDERS)


@pytest.mark.parametrize("folder", APART)
def test_strategies_clients_and_server_app_never_import_each_other(folder):
    others = [name for name in APART if name != folder]
    for path in SOURCES:
        if path.startswith(f"{folder}/"):
            for other in others:
                assert not imports(path, other), path
                assert not imports(path, f"flower_plugin.{other}"), path


def test_the_engine_imports_no_part_that_uses_it():
    for path in SOURCES:
        if path.startswith("flower_plugin/"):
            for part in APART:
                assert not imports(path, part), path
                assert not imports(path, f"flower_plugin.{part}"), path


def test_relative_imports_stay_in_the_package():
    # `from ..x` would work in the nested layout of a wheel and fail at the top of a checkout, or the reverse.
    for path in SOURCES:
        if path.startswith(APART):
            levels = [node.level for node in ast.walk(SOURCES[path]) if isinstance(node, ast.ImportFrom)]
            assert max(levels, default=0) <= len(path.split("/")) - 1, path


def test_transformers_is_imported_by_the_backbone_only():
    users = {path for path in SOURCES if imports(path, "transformers")}
    assert users
    assert all(path.startswith("flower_plugin/backbone/") for path in users), users


def test_the_backbone_knows_nothing_of_data_or_method():
    for path in SOURCES:
        if path.startswith(("flower_plugin/backbone/", "flower_plugin/data/")):
            assert not imports(path, "flower_plugin.side"), path
        if path.startswith("flower_plugin/data/"):
            assert not imports(path, "torch"), path


def test_flower_is_known_to_the_vocabulary_only():
    users = {path for path in SOURCES if path.startswith("flower_plugin/") and imports(path, "flwr")}
    assert users == {"flower_plugin/messages.py"}


@pytest.mark.parametrize("module", ["pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"])
def test_nothing_is_unpickled(module):
    assert not [path for path in SOURCES if imports(path, module)]


def test_torch_loads_tensors_only_and_arrays_are_never_pickled():
    for path in SOURCES:
        for call in calls(path):
            assert called(call) != ("torch", "save"), path
            if called(call) == ("torch", "load"):
                # Older checkpoints of the backbone come as *.bin: their tensors, never their objects.
                assert path.startswith("flower_plugin/backbone/"), path
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("weights_only") == "True", path
            for keyword in call.keywords:
                allowed = keyword.arg not in ("allow_pickle", "trust_remote_code") or (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                )
                assert allowed, f"{path}: {keyword.arg}"


def test_no_code_from_strings():
    for path in SOURCES:
        names = {called(call) for call in calls(path)}
        assert not names & {("", "eval"), ("", "exec"), ("os", "system")}, path
        assert not imports(path, "subprocess"), path


@pytest.mark.parametrize("module", ["socket", "zmq", "asyncio", "socketserver", "http", "urllib", "requests"])
def test_the_network_is_used_by_the_link_only(module):
    users = {path for path in SOURCES if imports(path, module)}
    assert all(path.startswith("flower_plugin/pipeline/link") for path in users), users


def test_who_writes_to_disk_is_known():
    assert {path for path in SOURCES if any(writes(call) for call in calls(path))} == WRITERS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("path.write_text(x)", True),
        ('path.open("ab")', True),
        ('open(path, mode="w")', True),
        ("lmdb.open(str(path))", True),
        ('path.open("rb")', False),
        ("open(path)", False),
        ("tensor.copy()", False),
        ("os.remove(path)", True),
        ("names.remove(x)", False),
    ],
)
def test_writing_is_recognised(line, expected):
    (call,) = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)][:1]
    assert writes(call) is expected


def test_files_are_short():
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


def test_no_module_is_a_drawer_for_odds_and_ends():
    assert not [path for path in SOURCES if Path(path).stem in ("utils", "util", "helpers", "common", "misc")]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("flower_plugin", "torch transformers flwr numpy pydantic lmdb matplotlib"),
        ("flower_plugin.clients", "torch transformers lmdb matplotlib"),
        ("flower_plugin.server_app", "torch transformers lmdb matplotlib"),
    ],
)
def test_importing_is_light(module, heavy):
    # Every message of a deployment starts a process, and it pays for what an import loads.
    code = f"import sys, {module}; print(*[m for m in {heavy.split()!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
