"""Options that several commands have, so that they read the same everywhere."""

import argparse

_SEEDS = 2**32


def add_model(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--model", default="polestar-tiny", metavar="NAME|DIR", help=f"{help} (default: %(default)s)")


def add_seed(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--seed", type=_seed, default=0, help=f"{help} (default: %(default)s)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE|-", help="write the results as JSON; - prints them and nothing else")


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= _SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to {_SEEDS - 1}")
    return int(text)
