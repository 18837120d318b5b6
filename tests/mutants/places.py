"""Mutants of the source, which are changes of one line that a test suite should notice, and a choice of them from a seed."""

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutants.blocks import PACKAGE, sources

# Parts of the package, and how much more likely a place in them is chosen. The first match counts.
WEIGHTS = (
    (("demo", "cli", "report", "errors", "version", "__init__"), 0),
    (("engine", "buckets", "ranks", "sharded", "plan", "schedule", "optim", "sync", "ddp"), 4),
    (("",), 1),
)
MAX_PER_FUNCTION, MAX_PER_FILE = 2, 4
OPERATORS = {
    "comparison": {"<": ">=", "<=": ">", "==": "!=", "is": "is not", "in": "not in"},
    "boundary": {"<": "<=", ">": ">="},
    "and or": {"and": "or"},
    "plus minus": {"+": "-", "+=": "-="},
}
REPLACED = {kind: table | {new: old for old, new in table.items()} for kind, table in OPERATORS.items()}
OPERATOR = re.compile(r"[-+]=?|[=!<>]=|[<>]|is not|is|not in|in|and|or")
WAITS = re.compile(r"wait|join|synchronize|barrier|flush|settle|block_stream")
UNSEEN = (ast.Raise, ast.JoinedStr, ast.arguments, ast.FunctionDef, ast.ClassDef)  # texts, and functions with a turn of their own


class Mutant(NamedTuple):
    """One line, before and after; `line` is its number in the source that it was chosen from."""

    kind: str
    file: str
    function: str
    line: int
    before: str
    after: str

    @property
    def place(self) -> str:
        return f"{Path(self.file).relative_to(PACKAGE)}:{self.line} {self.function}"

    @property
    def change(self) -> tuple[str, str, str, str]:
        """The same wherever the lines of the file have moved to."""
        return self.file, self.function, self.before.strip(), self.after.strip()

    def line_in(self, root: Path) -> int:
        """Returns the number of the line in a checkout, or 0: the nearest equal line in a function of that name."""
        source = (root / self.file).read_text(encoding="utf-8") if (root / self.file).exists() else ""
        spans = [range(it.lineno, (it.end_lineno or 0) + 1) for it in _functions(source) if it.name == self.function]
        found = [number for span in spans for number in span if source.splitlines()[number - 1] == self.before]
        return min(found, key=lambda number: abs(number - self.line), default=0)

    def apply(self, root: Path) -> None:
        lines = (root / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[self.line_in(root) - 1] = self.after + "\n"
        (root / self.file).write_text("".join(lines), encoding="utf-8")


def choose(root: Path, seed: int, number: int, under: str = "") -> list[Mutant]:
    """Returns mutants of all kinds in turn, drawn by the weight of their file; a larger number adds to those of a smaller one.

    With a folder to be `under`, as many of a file as it has.
    """
    chance = random.Random(seed)
    per_file = number if under else MAX_PER_FILE
    places = (mutant for mutant in _all(root) if Path(mutant.file).is_relative_to(PACKAGE / under))
    drawn = sorted(places, key=lambda mutant: -(chance.random() ** (1 / _weight(mutant.file))))
    queues = {kind: [mutant for mutant in drawn if mutant.kind == kind] for kind in sorted({mutant.kind for mutant in drawn})}
    taken: Counter[object] = Counter()
    chosen: list[Mutant] = []
    while len(chosen) < number and any(queues.values()):
        for queue in queues.values():
            while queue:
                mutant = queue.pop(0)
                function, line = mutant[1:3], mutant[1:4]
                if taken[function] < MAX_PER_FUNCTION and taken[mutant.file] < per_file and not taken[line]:
                    taken.update([function, mutant.file, line])
                    chosen.append(mutant)
                    break
    return chosen[:number]


def _weight(file: str) -> int:
    part = str(Path(file).relative_to(PACKAGE))
    return next(weight for names, weight in WEIGHTS if part.startswith(names))


def _all(root: Path) -> Iterator[Mutant]:
    for path in sources(root):
        file, source = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        for function in _functions(source) if _weight(file) else ():
            for node in (node for statement in function.body for node in _seen(statement)):
                for kind, (line, start), (last_line, stop), form in _changes(node):
                    before = source.splitlines()[line - 1]
                    table = REPLACED.get(kind, {})
                    text = OPERATOR.sub(lambda found, table=table: table.get(found[0], found[0]), before[start:stop])
                    after = before[:start] + form.format(text) + before[stop:]
                    if line == last_line and before.isascii() and after != before:
                        yield Mutant(kind, file, function.name, line, before, after)


def _functions(source: str) -> Iterator[ast.FunctionDef]:
    """Functions but those that return texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (node.returns is None or "str" not in ast.unparse(node.returns)):
            yield node


def _seen(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, UNSEEN):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _seen(child)


Change = tuple[str, tuple[int, int], tuple[int, int], str]  # kind, from and to by line and column, form of the new text


def _changes(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield "comparison", _stop(left), _start(right), "{}"
            yield "boundary", _stop(left), _start(right), "{}"
        case ast.BoolOp(values=[left, right, *_]):
            yield "and or", _stop(left), _start(right), "{}"
        case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
            yield "plus minus", _stop(left), _start(right), "{}"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", _start(test), _stop(test), "not ({})"
        case ast.Expr(value=ast.Call(func=function)):
            yield "wait" if WAITS.search(ast.unparse(function).split(".")[-1]) else "call", _start(node), _stop(node), "pass"
    match node:  # offsets, bounds of slices and of ranges, and whole numbers in sums and indices
        case (
            ast.Slice(lower=ast.expr() as bound)
            | ast.Slice(upper=ast.expr() as bound)
            | ast.Call(func=ast.Name(id="range"), args=[bound] | [_, bound, *_])
            | ast.keyword(arg="start" | "stop" | "offset" | "begin" | "end", value=bound)
            | ast.BinOp(right=ast.Constant(value=int()) as bound)
            | ast.Subscript(slice=ast.Constant(value=int()) as bound)
        ):
            yield "off by one", _start(bound), _stop(bound), "({} + 1)"


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _stop(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0
