"""Blocks of the source, and a copy of the source that records which blocks each test enters.

A block is a run of statements that are executed together, unless one of them raises. In the copy every block starts with a call
that writes one byte into a file that all processes map. Ranks that are killed lose nothing that way.
"""

import ast
from pathlib import Path

PACKAGE, MAX_TESTS = Path("src/undertow"), 12_000
HEADER_BYTES = 8  # the offset of the running test's row; then a row for each test, with a byte for each block
COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
PROBE = """
import mmap
with open({path!r}, "r+b") as _file:
    _hits = mmap.mmap(_file.fileno(), 0)
_row = memoryview(_hits)[:8].cast("Q")
def hit(block):
    _hits[_row[0] + block] = 1
"""

Block = tuple[str, int, int]  # file, first and last line; the lines of an inner or a later block are not its own


def sources(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def blocks_of(root: Path) -> list[Block]:
    return [block for path in sources(root) for block in _probed(path, root, 0)[1]]


def write_probes(root: Path, hits: Path) -> None:
    """Rewrites the source under `root` so that every block marks itself in the new file `hits`."""
    num_blocks = 0
    for path in sources(root):
        text, blocks = _probed(path, root, num_blocks)
        num_blocks += len(blocks)
        path.write_text(text, encoding="utf-8")
    (root / PACKAGE / "_probe.py").write_text(PROBE.format(path=str(hits)), encoding="utf-8")
    with hits.open("wb") as file:
        file.write(HEADER_BYTES.to_bytes(HEADER_BYTES, "little"))
        file.truncate(HEADER_BYTES + MAX_TESTS * num_blocks)  # sparse


def _probed(path: Path, root: Path, first: int) -> tuple[str, list[Block]]:
    """Returns the file's text with probes, and its blocks, whose numbers begin with `first`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks: list[Block] = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and not isinstance(node, ast.Module | ast.ClassDef):
                begin = _begin(body)
                starts = [at for at in range(begin, len(body)) if at == begin or isinstance(body[at - 1], COMPOUND)]
                number = first + len(blocks)
                blocks += [(str(path.relative_to(root)), body[at].lineno, body[-1].end_lineno or 0) for at in starts]
                for place, at in reversed([*enumerate(starts)]):
                    body[at:at] = ast.parse(f"_hit({number + place})").body
    at = _begin(tree.body)
    tree.body[at:at] = ast.parse("from undertow._probe import hit as _hit").body if blocks else []
    return ast.unparse(ast.fix_missing_locations(tree)), blocks


def _begin(body: list[ast.stmt]) -> int:
    """Returns the index of the first statement after a docstring and imports from __future__."""
    for at, it in enumerate(body):
        if not (isinstance(it, ast.Expr) and isinstance(it.value, ast.Constant)) and getattr(it, "module", "") != "__future__":
            return at
    return len(body)
