"""Environments of peers: what is pinned, made, stale and absent."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.matrix import environments, install
from benchmarks.matrix.catalog import MAIN, SYSTEMS

from support.project import ROOT

PEERS = environments.peers()


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    return dict(line.split("==") for line in lines)


def fake_commands(name: str) -> list[list[str]]:
    place = str(environments.FOLDER / name)
    python = (sys.executable, str(environments.interpreter_of(name)))
    failing = "print('no wheel for this machine'); raise SystemExit(3)"
    return [
        [sys.executable, "-c", "import os, sys; os.makedirs(f'{sys.argv[1]}/bin'); os.symlink(*sys.argv[2:])", place, *python],
        [sys.executable, "-c", failing if name == "bad" else "pass"],
    ]


# Environments of two peers that are nothing yet; one of them cannot be made.
@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(install, "commands_for", fake_commands)
    monkeypatch.setattr(environments, "FOLDER", tmp_path / ".venv-peers")
    monkeypatch.setattr(environments, "PINS", tmp_path / "peers")
    (tmp_path / "peers").mkdir()
    for name in ("bad", "good"):
        (tmp_path / "peers" / f"{name}.txt").write_text("torch==1.0\n")
    return tmp_path / ".venv-peers"


def test_the_peers_of_the_catalog_are_those_that_can_be_made() -> None:
    assert {spec.environment for spec in SYSTEMS.values()} - {MAIN} == set(PEERS)


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_has_the_torch_of_the_project_and_names_it_first(peer: str) -> None:
    of_peer, of_project = pins(environments.pins_of(peer)), pins(ROOT / "constraints.txt")
    assert next(iter(of_peer)) == "torch"
    # Shared packages too: what is compared differs in the peer alone.
    assert {name: of_peer[name] for name in of_peer.keys() & of_project.keys()}.items() <= of_project.items()


def test_torch_is_installed_before_anything_else_and_nothing_is_resolved_after_it() -> None:
    _venv, torch, rest, check = install.commands_for("megatron")
    assert torch[-1] == install.torch_pin(environments.pins_of("megatron")) == f"torch=={pins(ROOT / 'constraints.txt')['torch']}"
    assert "--no-deps" in rest
    assert check[-1] == "check"


def test_a_peer_that_cannot_be_made_does_not_stop_the_others(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main([]) == 1
    told = capsys.readouterr().err
    expected = (
        "bad: could not be made: ",
        "no wheel for this machine",
        "Not made: bad. The matrix goes on without, its rows say so.",
    )
    assert [text for text in expected if text not in told] == []
    assert environments.python_of("bad") is None
    why = "the virtual environment .venv-peers/bad could not be made; .venv-peers/bad.log says why"
    assert environments.why_absent("bad") == why
    assert environments.python_of("good") == elsewhere / "good" / "bin" / "python"
    assert not environments.log_of("good").exists()


def test_an_environment_is_made_once(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.main(["good"]) == 0
    monkeypatch.setattr(install, "commands_for", None)  # nothing is asked for
    assert install.main(["good"]) == 0
    assert f"good: {elsewhere}/good is up to date" in capsys.readouterr().out


def half_made() -> None:
    environments.interpreter_of("good").parent.mkdir(parents=True)
    environments.interpreter_of("good").touch()


def without_its_interpreter() -> None:
    install.main(["good"])
    environments.interpreter_of("good").unlink()
    environments.interpreter_of("good").symlink_to("/no/such/python")


def of_other_pins() -> None:
    install.main(["good"])
    environments.pins_of("good").write_text("torch==2.0\n")


STALE = ".venv-peers/good is not whole, or not of the versions in peers/good.txt; make bench-peers makes it anew"
ABSENT = {
    half_made: "no virtual environment .venv-peers/good; make bench-peers makes it",
    without_its_interpreter: None,
    of_other_pins: STALE,
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("make", ABSENT)
def test_an_environment_that_is_not_whole_is_absent(make: Callable[[], None]) -> None:
    make()
    assert environments.python_of("good") is None
    assert ABSENT[make] in (None, environments.why_absent("good"))


def test_an_unknown_peer_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["megatorn"]) == 2
    assert "there is no peer 'megatorn'. Did you mean 'megatron'?" in capsys.readouterr().err
