"""The `polestar` command. Every subcommand is a module of `polestar_jax.commands`.

Such a module has `SUMMARY`, `add_arguments(parser)` and `run(arguments)`, and imports what is heavy inside `run`.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = ("demo", "generate", "methods", "bench", "eval", "sweep", "figures", "plan", "convert")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other error of the user: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words after `polestar`; those of the process if None.

    Returns:
      The exit code: 0, 2 after an error that the user can mend, 130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _make_parser().parse_args(words)
        arguments.words = ("polestar", *words)
        arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:
        if "--traceback" in words:
            raise
        print(f"polestar: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("polestar: interrupted", file=sys.stderr)
        return 130
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="polestar",
        description="Drift-aware decoding for diffusion language models: Polestar and what it is compared with.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("polestar-jax"))
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = importlib.import_module(f"polestar_jax.commands.{name}")
        subparser = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        subparser.set_defaults(run=command.run)
    return parser
