"""Writes docs/integrations/works-with.md from the results of tests; `make works-with` runs the tests first.

pytest --junitxml=out/frameworks.xml tests/frameworks tests/runner tests/faults/test_nodes.py
PYTHONPATH=tests python -m frameworks out/frameworks.xml
"""

import importlib.metadata
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.project import ROOT

PAGE = ROOT / "docs" / "integrations" / "works-with.md"
TORCH, RAY = "torch", "Ray Train"
# The package, and what is not supported.
FRAMEWORKS: dict[str, tuple[str, str]] = {
    TORCH: ("torch", "compiled autograd; `join()` with shards"),
    "torch pipelining": ("torch", "`scale_grads` with shards: divide the loss"),
    "Lightning": ("lightning", "with shards: clipping by value"),
    "Fabric": ("lightning", "with shards: clipping by value"),
    "Accelerate": ("accelerate", "DeepSpeed, FSDP and Megatron plug-ins; with shards: clipping by value"),
    "HF Trainer": ("transformers", "DeepSpeed and FSDP arguments"),
    RAY: ("ray", "a cluster of several machines was not at hand"),
    "Slurm": ("", "not run by Slurm itself"),
    "Kubernetes": ("", "not run by Kubernetes itself"),
}
OF = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "lightning by hand": "Lightning",
    "fabric": "Fabric",
    "transformers": "HF Trainer",
    "pipelining": "torch pipelining",
    "a subclass that runs the module past forward": TORCH,
    "torch's tutorial": TORCH,
    "a subclass of torch's class": TORCH,
    "ranks started by multiprocessing": TORCH,
}
RUN, IN_TURN = "an unmodified program by `undertow run`", "equal to torch's class"
# A pattern of test names, whose first group names the framework; the framework if there is no group; the column.
COLUMNS = (RUN, IN_TURN, "shards", "restarts, clusters")
RULES = (
    (r"as_without_us_and_reports\[(.+)\]", "", RUN),
    (r"trains_as_with_torchs_class\[([^:\]]+)(?::(?!.*shards).*)?\]", "", IN_TURN),
    (r"trains_as_with_torchs_class\[([^:\]]+):.*shards.*\]", "", "shards"),
    (r"resumes_sharded_training_with_equal_bits\[(\w+)-.*\]", "", "shards"),
    (r"clips_by_the_norm_of_all_shards\[(\w+).*\]", "", "shards"),
    (r"scaling_in_the_loss_trains_sharded", "torch pipelining", "shards"),
    (r"workers_train_as_with_torchs_class\[ddp\]", RAY, IN_TURN),
    (r"workers_train_as_with_torchs_class\[zero", RAY, "shards"),
    (r"continues_from_its_checkpoint_after_a_worker", RAY, "restarts, clusters"),
    (r"batch_script|time_limit_goes_back", "Slurm", "restarts, clusters"),
    (r"jobset", "Kubernetes", "restarts, clusters"),
    (r"two_nodes|both_nodes", TORCH, "restarts, clusters"),
)


def results(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yields the framework, the column and success of every test that a rule names."""
    for case in ElementTree.parse(path).iter("testcase"):
        name = str(case.get("name"))
        if case.find("skipped") is not None:
            continue
        for pattern, framework, column in RULES:
            if found := re.search(pattern, name):
                of = framework or OF.get(found[1], found[1])
                yield of, column, case.find("failure") is None and case.find("error") is None
                break


def page(path: Path) -> str:
    counts: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    for framework, column, is_passed in results(path):
        if framework not in FRAMEWORKS:
            raise SystemExit(f"a test speaks of {framework!r}, which has no row: add it to FRAMEWORKS in {__file__}")
        counts[framework, column][is_passed] += 1
    rows = [
        " | ".join(
            [
                framework,
                importlib.metadata.version(package).partition("+")[0] if package else "",
                *(cell(counts[framework, column]) for column in COLUMNS),
                not_possible,
            ]
        )
        for framework, (package, not_possible) in FRAMEWORKS.items()
    ]
    head = " | ".join(["framework", "version", *COLUMNS, "not supported"])
    return (
        "# Works with\n\n"
        "`make works-with` makes this page from the results of tests with the real libraries, on two ranks, CPU and gloo.\n"
        "A cell has the number of tests that passed. *Equal* means `torch.equal` for every parameter after training.\n\n"
        f"| {head} |\n|{' --- |' * (len(COLUMNS) + 3)}\n" + "".join(f"| {row} |\n" for row in rows)
    )


def cell(passed: Counter[bool]) -> str:
    failed = f", **{passed[False]} failed**" if passed[False] else ""
    return f"{passed[True]} passed{failed}" if passed else ""


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
