"""What a release says of itself: versions of Python, addresses, and whose code its workflows run."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from support.project import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_classifiers_are_the_versions_that_the_workflow_tests() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    named = [it.rpartition(" ")[2] for it in PROJECT["classifiers"] if it.startswith("Programming Language :: Python :: 3.")]
    assert named == jobs["check"]["strategy"]["matrix"]["python"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    """A tag can be moved to other code."""
    used = re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    assert used
    assert [it for it in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", it)] == []


def test_the_release_adds_the_addresses_of_its_repository(tmp_path: Path) -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
    (script,) = (step["run"] for step in steps if "project.urls" in step.get("run", ""))
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    variables = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "some/one", "GITHUB_REF_NAME": "v1.2.3"}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env={**os.environ, **variables}, check=True)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls["Repository"] == "https://git.example/some/one"
    assert urls["Documentation"] == "https://git.example/some/one/blob/v1.2.3/docs/index.md"


def test_the_changelog_has_the_version_and_the_rule_of_versions() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r'"(.*)"', (ROOT / "src" / "undertow" / "version.py").read_text(encoding="utf-8").splitlines()[-1])
    assert version is not None
    assert f"\n## {version[1]}" in text
    assert "DeprecationWarning" in text
