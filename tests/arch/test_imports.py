"""Imports, exports, private names and words of modules; how tests reach inside of the library.

Only tests/support/inside.py, one_process.py beside it, and the unit tests of a module reach inside.
"""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from support.project import ROOT, SOURCES, name_of

PROFILE = str(ROOT / "examples" / "profiles" / "gpt2.json")
PURE = [
    "undertow",
    "undertow.foreign",
    "undertow.shown",
    "undertow.shipped",
    "undertow.errors",
    "undertow.wire",
    "undertow.whole_file",
    "undertow.tracebacks",
    "undertow.config",
    "undertow.lab.cost",
    "undertow.plan",
    "undertow.schedule",
    "undertow.trace",
    "undertow.lab.planning",
    "undertow.lab.profile",
    "undertow.lab.simulate",
    "undertow.tune",
    "undertow.lab.report",
    "undertow.lab.what_if",
    "undertow.lab.traces",
]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(parts: tuple[str, ...]) -> str:
    return ".".join(parts).removesuffix(".__init__")


MODULES = sorted(
    module_of(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in SOURCES
    if path.stem != "__main__" and path.parent.name != "integrations"  # which import frameworks
)


def test_the_pure_half_does_not_import_torch() -> None:
    # A process of its own: here torch may have been imported by another test.
    check = f"import sys, {', '.join(PURE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [("plan", PROFILE, "--link", "25gbit"), pytest.param(("simulate", PROFILE, "--link", "25gbit"), marks=pytest.mark.slow)],
    ids=["planning", "simulating"],
)
def test_a_command_does_not_import_torch(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    check = """
import sys
from undertow.lab.cli import main
try:
    main()
except SystemExit as ended:
    sys.exit(ended.code or "torch" in sys.modules)
"""
    command = [sys.executable, "-c", check, *arguments]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_name_the_pages_with_their_reasons() -> None:
    named = {page for path in SOURCES for page in re.findall(r"docs/design/[a-z-]+\.md", path.read_text())}
    assert named == {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "design").glob("*.md")}


def test_every_exported_name_exists() -> None:
    exported = [(module, name) for module in map(importlib.import_module, MODULES) for name in getattr(module, "__all__", [])]
    assert [(module.__name__, name) for module, name in exported if not hasattr(module, name)] == []


def test_nothing_of_ours_opens_sockets() -> None:
    """Transports, and what listens on them, are torch.distributed's; only the ring of ranks has connections of its own."""
    opens = re.compile(r"^\s*(?:import|from) (?:_?socket|socketserver|ssl|http|urllib)\b", re.M)
    assert [path.name for path in SOURCES if opens.search(path.read_text())] == ["connections.py", "handshake.py"]


# Calls of torch.distributed that communicate or make groups, and methods of its groups that do.
COLLECTIVES = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|gather|scatter|broadcast|reduce|barrier|monitored_barrier)(_\w+)?"
    r"|i?(send|recv)(_\w+)?|batch_isend_irecv|new_group|split_group|new_subgroups(_\w+)?|init_process_group|init_device_mesh"
)
METHODS = {"allreduce", "allgather", "alltoall", "recv_anysource", "monitored_barrier"}
COMMUNICATE = {
    "ranks/transport.py",
    "ranks/users_groups.py",
    "torch_private/process_groups.py",  # `new_group`, which the transport calls; a probe of a rank, and the end of a broken group
    "lab/emulation/link.py",  # a backend below the transport
    "lab/demo/rank.py",  # a script as a user writes it, with plain torch beside the library
}


def collectives_in(tree: ast.AST) -> list[str]:
    """What a file has of them: names of the module, methods of groups, messages to a rank, and imports."""
    found = list[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name) if ast.unparse(owner) in ("dist", "torch.distributed"):
                found += [name] * bool(COLLECTIVES.fullmatch(name))
            case ast.Attribute(value=ast.Name(id="process_groups"), attr="new_group"):
                found.append("new_group")
            case ast.Attribute(attr=name) if name in METHODS:
                found.append(name)
            case ast.Call(func=ast.Attribute(attr="send" | "recv" as name), args=[ast.List(), _, _]):
                found.append(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch.distributed"):
                found += [alias.name for alias in names if COLLECTIVES.fullmatch(alias.name)]
    return found


def test_only_the_transport_communicates() -> None:
    root = ROOT / "src" / "undertow"
    callers = {path.relative_to(root).as_posix() for path in SOURCES if collectives_in(tree_of(path))}
    assert callers == COMMUNICATE


# Streams, events, and questions whether the host may read a tensor.
STREAMS = re.compile(
    r"torch\.(?:cuda|xpu)\b|torch\.(?:Stream|Event)\(|(?:record|current|set|wait)_stream\(|pin_memory|is_cpu\b|is_cuda\b"
)


def test_only_the_device_layer_knows_streams() -> None:
    assert [path.name for path in SOURCES if STREAMS.search(path.read_text())] == ["device.py"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'undertow' has no attribute 'nonsense'"):
        importlib.import_module("undertow").nonsense  # noqa: B018


SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json"}
FOLDERS = ["src", "tests", "benchmarks", "examples", "docs", ".ci"]
# Places of one machine, and trackers that a reader of the repository cannot open. In brackets, so as not to find itself.
FOREIGN = re.compile(r"/w[o]rk/|/r[o]ot/|/h[o]me/|/o[p]t/|/t[m]p/bash|\bissue [0-9]+\b")


def project_files() -> list[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in (*ROOT.iterdir(), *inside) if path.suffix in SUFFIXES or path.name in ("Makefile", "run"))


def test_files_speak_of_the_project_only() -> None:
    texts = {name_of(path): path.read_text() for path in project_files() if path.is_file()}
    assert {name: found for name, text in texts.items() if (found := FOREIGN.findall(text))} == {}


TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
ALLOWED = (TESTS / "unit", SUPPORT / "inside.py", SUPPORT / "one_process.py", TESTS / "arch" / "test_imports.py")
INNER = {"current_plan", "compiled"}  # public names on the way to private objects
OTHERS = {"torch", "dist", "nn"}  # whose private names are not ours


ROOMS = tuple(f"undertow.{room}" for room in ("buckets", "engine", "ranks", "sharded", "torch_private"))


# What a file that reaches inside has in its text, if no private name of the library is in it.
ROOM = re.compile("|".join([*map(re.escape, ROOMS), r"from undertow[\w.]* import (?:\([^)]*|.*)\b_\w"]))


def is_inner(module: str) -> bool:
    return module.startswith(ROOMS)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """The private names of functions, classes, variables and attributes that a file defines."""
    nodes = list(ast.walk(tree))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_of_self(node)}
    return {name for name in names if is_private(name)}


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


# What torch's classes call so is part of their interface, which ours has too.
def of_torch() -> set[str]:
    return defined_in(ast.parse(inspect.getsource(torch.nn.parallel.distributed))) | {
        *("_rebuild_buckets", "_delay_all_reduce"),  # of its reducer
        *("_parameters", "_indices", "_values"),  # of modules and sparse tensors
    }


@functools.cache
def defined_in_the_library() -> frozenset[str]:
    return frozenset().union(*(defined_in(tree_of(path)) for path in SOURCES))


@functools.cache
def library() -> frozenset[str]:
    """The private names of the library."""
    return defined_in_the_library() - of_torch()


def reaches(path: Path) -> list[str]:
    """Each place of a file that reaches inside, as "line: name"."""
    text = path.read_text()
    if not ROOM.search(text) and library().isdisjoint(words := re.findall(r"\w+", text)) and INNER.isdisjoint(words):
        return []  # before it is parsed, which takes most of the time
    tree = ast.parse(text)
    private = library() - defined_in(tree)
    return [f"{node.lineno}: {name}" for node in ast.walk(tree) for name in reached_by(node, private)]


def reached_by(node: ast.AST, private: frozenset[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if is_inner(alias.name))
        case ast.ImportFrom(module=str(module)) if module.startswith("undertow"):
            yield from (alias.name for alias in node.names if is_inner(module) or is_private(alias.name))
        case ast.Attribute(attr=name) if not is_of_self(node) and not is_of_others(node):
            yield from (found for found in (name,) if found in private or found in INNER)
        case ast.Constant(value=str(text)) if is_inner(text) or text in private:  # of a patch
            yield text


def is_of_others(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in OTHERS


def test_no_file_reaches_inside() -> None:
    outside = [path for path in sorted(TESTS.rglob("*.py")) if not any(path.is_relative_to(place) for place in ALLOWED)]
    assert {name_of(path): found for path in outside if (found := reaches(path))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from undertow.ranks.transport import OwnGroup", ["1: OwnGroup"]),
        ("import undertow.engine", ["1: undertow.engine"]),
        ("from undertow.sync.gradient_sync import _private", ["1: _private"]),
        ("ddp.sync._engine.plan", ["1: _engine"]),
        ("patch('undertow.ranks.group.x')", ["1: undertow.ranks.group.x"]),
        ("setattr(exchanges, '_send', late)", ["1: _send"]),
        ("class Mine:\n    def f(self):\n        self._engine = 1\n        return self._engine", []),
        ("from undertow import attach", []),
    ],
)
def test_reaching_inside_is_found(text: str, found: list[str], tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert reaches(path) == found


# Private names of torch that are read outside of torch_private.
READ_ELSEWHERE = {
    "lab/emulation/link.py": {"_register_backend", "_set_default_backend"},  # its process group is made as torch's are
}
NOT_TORCHS = {"_exit", "_current_frames", "_getframe", "_fields", "_models"}  # of Python, and of Accelerate


@functools.cache
def of_torchs_objects() -> frozenset[str]:
    objects = (nn.Module(), torch.Tensor, torch.optim.Optimizer, LRScheduler, dist.ProcessGroup)
    return frozenset(name for each in objects for name in dir(each) if is_private(name))


def private_to_torch(tree: ast.Module) -> list[str]:
    """The private names of torch that a file imports, or reads from an object.

    What a class reads from itself is its own, or part of the interface of the class of torch's that it derives from.
    """
    own, found = defined_in(tree), list[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if is_private_to_torch(alias.name)]
            case ast.ImportFrom(module=str(module), names=names):
                found += [alias.name for alias in names if is_private_to_torch(f"{module}.{alias.name}")]
            case _:
                found += [name for name in read_by(node) if name not in own]
    return found


def is_private_to_torch(path: str) -> bool:
    first, *others = path.split(".")
    return first == "torch" and any(map(is_private, others))


def read_by(node: ast.AST) -> Iterator[str]:
    """The private names that are not the library's, as far as names tell."""
    match node:
        case ast.Attribute(attr=name) if not is_of_self(node):
            names = [name]
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
            names = [name]
        case ast.Call(func=ast.Name(id="attrgetter" | "methodcaller"), args=[ast.Constant(value=str(name)), *_]):
            names = name.split(".")
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))):
            names = [name]
        case _:
            names = []
    for name in names:
        is_torchs = name in of_torchs_objects() or (isinstance(node, ast.Attribute) and is_of_others(node))
        if is_private(name) and name not in NOT_TORCHS and (is_torchs or name not in defined_in_the_library()):
            yield name


def test_private_names_of_torch_are_in_one_place() -> None:
    root = ROOT / "src" / "undertow"
    outside = {path.relative_to(root).as_posix(): path for path in SOURCES if path.parent.name != "torch_private"}
    assert {name: set(found) for name, path in outside.items() if (found := private_to_torch(tree_of(path)))} == READ_ELSEWHERE
