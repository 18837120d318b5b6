"""The options that `undertow plan` and `undertow simulate` share: a model, its ranks and their
network."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from undertow.lab.cost import NODE_LINK
from undertow.lab.profile import profile_from_file
from undertow.lab.what_if import WhatIf


def option(text: str, *, least: int | None = None) -> Any:
    """Returns an option whose text tells its default."""
    return typer.Option(help=text, show_default=False, min=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The values of the shared options; each field is an option of both commands."""

    profile: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", help="Measurements of a model.", show_default=False),
    ]
    ranks: Annotated[
        int | None,
        option("Ranks; by default as in the profile.", least=1),
    ] = None
    link: Annotated[
        str | None,
        option(
            'Network of every rank: "100gbit", or with a latency "100gbit,5us". With --per-node, '
            "each rank's share of the network card: 1.25gbit for 8 ranks on 10 Gb/s. Without "
            "--link, the measured costs of the profile."
        ),
    ] = None
    per_node: Annotated[
        int | None,
        option("Ranks per node, which share its network card; without it, each on its own."),
    ] = None
    node_link: Annotated[
        str | None,
        option(f"Network inside a node, like --link; with --per-node {NODE_LINK} by default."),
    ] = None
    strategy: Annotated[
        str | None,
        option(
            '"ddp", "zero1", "zero2" or "hybrid", which shards inside a node; by default as '
            "in the profile."
        ),
    ] = None
    wire: Annotated[
        str | None,
        option(
            'Format of gradients: "bfloat16", "float16", "int8", "auto" or "none"; by default as '
            "in the profile."
        ),
    ] = None
    param_wire: Annotated[
        str | None,
        option(
            'Format of gathered parameters: "bfloat16", "int8" or "none"; by default as in the '
            "profile."
        ),
    ] = None

    def what_if(self, *, optimizer: str | None = None) -> WhatIf:
        """Reads the profile, and returns it on these ranks and their network.

        Raises ConfigError for a file that is not a profile, and for options that cannot work.
        """
        return WhatIf.of(
            profile_from_file(self.profile),
            strategy=self.strategy,
            num_ranks=self.ranks,
            link=self.link,
            per_node=self.per_node,
            node_link=self.node_link,
            wire=self.wire,
            param_wire=self.param_wire,
            optimizer=optimizer,
        )


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a Question, before its own; its first argument is the
    Question.

    Typer reads a command's options from its signature.
    """
    shared = inspect.signature(Question).parameters
    _, *own = inspect.signature(command).parameters.values()
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

    @wraps(command)
    def ask(**options: Any) -> None:
        of_question = {name: options.pop(name) for name in shared}
        command(Question(**of_question), **options)

    signature = inspect.Signature([*shared.values(), *named])
    ask.__signature__ = signature  # type: ignore[attr-defined]
    return ask
