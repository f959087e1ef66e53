"""Lists the decoding methods, or says what one of them reuses, refreshes and commits, and what its fields are.

examples:
  polestar methods
  polestar methods polestar
  polestar methods --write docs/methods.md
"""

import argparse
from pathlib import Path

from polestar_jax.commands.output import make_consoles

SUMMARY = "list the decoding methods, or describe one and its fields"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a method; all of them, a line each, if left out")
    parser.add_argument("--markdown", action="store_true", help="as docs/methods.md has it")
    parser.add_argument("--write", metavar="FILE", help="renew the generated part of a page such as docs/methods.md")


def run(arguments: argparse.Namespace) -> None:
    from polestar_jax.commands import method_pages
    from polestar_jax.methods import METHODS

    name = arguments.name
    if name is not None and name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    if arguments.write is not None:
        if name is not None:
            raise ValueError(f"--write renews the pages of all methods; leave {name} out")
        page = Path(arguments.write)
        page.write_text(method_pages.replace_part(page.read_text()))
    elif arguments.markdown:
        print(method_pages.markdown() if name is None else method_pages.markdown_of(name))
    elif name is None:
        _list()
    else:
        _describe(name)


def _list() -> None:
    from rich.table import Table

    from polestar_jax.commands.method_pages import summary_of
    from polestar_jax.methods import METHODS

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for name in METHODS:
        table.add_row(name, summary_of(name))
    make_consoles(None)[0].print(table)


def _describe(name: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from polestar_jax.commands import method_pages
    from polestar_jax.commands.method_arguments import field_readers
    from polestar_jax.methods import CARDS

    console, _ = make_consoles(None)
    words, address = method_pages.source_of(name)
    console.print(f"{escape(CARDS[name].title)} ({words}, {address})\n")
    card = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    card.add_column(no_wrap=True)
    for heading, text in method_pages.card_lines(name).items():
        card.add_row(heading, escape(text))
    presets = method_pages.presets_of(name)
    if presets:
        card.add_row("presets", ", ".join(presets))
    console.print(card)
    explanations, readers = method_pages.explanations_of(name), field_readers(name)
    fields = Table(title="fields, for --method and --set", title_justify="left")
    for heading in ("field", "default", "takes", ""):
        fields.add_column(heading, no_wrap=heading == "field")
    for field, value in method_pages.defaults_of(name).items():
        row = (field, method_pages.write_value(value), readers[field].accepts, explanations.get(field, ""))
        fields.add_row(*map(escape, row))
    console.print(fields)
