from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.project import ROOT, SOURCES

PURE = [
    "undertow",
    "undertow.foreign",
    "undertow.errors",
    "undertow.config",
    "undertow.cost",
    "undertow.plan",
    "undertow.schedule",
    "undertow.trace",
    "undertow.profile",
    "undertow.simulate",
    "undertow.tune",
    "undertow.report",
]


def module_of(parts: tuple[str, ...]) -> str:
    return ".".join(parts).removesuffix(".__init__")


MODULES = sorted(module_of(path.relative_to(ROOT / "src").with_suffix("").parts) for path in SOURCES if path.stem != "__main__")


def test_the_pure_half_does_not_import_torch() -> None:
    # A process of its own: here torch may have been imported by another test.
    check = f"import sys, {', '.join(PURE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_planning_from_a_file_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"params": [{"name": "weight", "shape": [10, 20], "dtype": "float32"}]}')
    check = """
import sys
from undertow.cli import main
try:
    main()
except SystemExit as ended:
    sys.exit(ended.code or "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", check, "plan", str(path)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_exported_name_exists() -> None:
    exported = [(module, name) for module in map(importlib.import_module, MODULES) for name in getattr(module, "__all__", [])]
    assert [(module.__name__, name) for module, name in exported if not hasattr(module, name)] == []


def test_nothing_of_ours_opens_sockets() -> None:
    """Transports, and what listens on them, are torch.distributed's."""
    opens = re.compile(r"^\s*(?:import|from) (?:_?socket|socketserver|ssl|http|urllib)\b", re.M)
    assert [path.name for path in SOURCES if opens.search(path.read_text())] == ["connections.py"]
    (reads,) = (path.read_text() for path in SOURCES if path.name == "connections.py")
    # It asks the kernel about sockets that others have made.
    assert re.findall(r"socket\.socket\(.*\)", reads) == ["socket.socket(fileno=os.dup(number[0]))"]
    assert not re.search(r"\b(bind|listen|accept|connect|connect_ex|create_connection|create_server|send\w*|recv\w*)\(", reads)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'undertow' has no attribute 'nonsense'"):
        importlib.import_module("undertow").nonsense  # noqa: B018
