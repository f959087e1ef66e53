"""`polestar methods`, the part of docs/methods.md that it writes, and the method files: each can be taken away."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from polestar_jax.cli import main
from polestar_jax.commands import method_pages
from polestar_jax.commands.method_arguments import field_readers
from polestar_jax.methods import CARDS, METHODS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "polestar_jax" / "methods"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


def test_page_is_up_to_date():
    text = (ROOT / "docs" / "methods.md").read_text()
    assert method_pages.replace_part(text) == text, "run: polestar methods --write docs/methods.md"


@pytest.mark.parametrize("name", METHODS)
def test_fields_are_explained_and_defaults_can_be_typed(name):
    """A default is written as its own reader takes it, presets too."""
    readers, explained = field_readers(name), method_pages.explanations_of(name)
    defaults = method_pages.defaults_of(name)
    assert list(defaults) == list(readers) and all(explained.get(field) for field in readers)
    for fields in (defaults, *method_pages.presets_of(name).values()):
        for field in fields.keys() & readers.keys():
            assert readers[field].read(method_pages.write_value(fields[field])) == fields[field], field


@pytest.mark.parametrize("name", METHODS)
def test_cards_are_filled_in(name):
    for heading, text in method_pages.card_lines(name).items():
        assert text and text == text.strip() and not text.endswith("."), heading
    assert re.fullmatch(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|openreview\.net/forum\?id=\w+)", address_of(name))


def address_of(name: str) -> str:
    return method_pages.source_of(name)[1]


def test_readme_has_every_method_in_order():
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("## Methods") :].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(METHODS)
    for name in METHODS:
        assert address_of(name) in table


def test_recorded_runs_are_described(golden):
    readme = (golden / "README.md").read_text()
    folders = [path for path in (*golden.iterdir(), *(golden / "baselines").iterdir()) if path.is_dir()]
    assert len(folders) > 20
    assert [path.name for path in folders if f"`{path.name}`" not in readme] == ["baselines"]


def test_listing(capsys):
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^(\w+) ", shown, re.MULTILINE) == list(METHODS)
    assert main(["methods", "hierarchy"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (CARDS["hierarchy"].title, CARDS["hierarchy"].refreshes, "remask_threshold", "a number or none"):
        assert words in shown
    assert main(["methods", "hierarchy", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() in method_pages.markdown()


def test_write_renews_the_part_between_the_markers(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{method_pages.BEGIN}\nold\n{method_pages.END}\nafter\n")
    assert main(["methods", "--write", str(page)]) == 0
    assert page.read_text() == f"before\n{method_pages.markdown()}\nafter\n"
    page.write_text("nothing to renew")
    assert main(["methods", "--write", str(page)]) == 2
    assert page.read_text() == "nothing to renew"
    assert method_pages.BEGIN in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"), [(["best"], "unknown method 'best'"), (["wino", "--write", "x.md"], "leave wino out")]
)
def test_bad_words_are_refused(words, message, capsys):
    assert main(["methods", *words]) == 2
    assert message in capsys.readouterr().err


def imported(path: Path) -> set[str]:
    """Everything that a file imports, also inside functions, with the names taken from each module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_method_files_do_not_know_one_another(path):
    assert {name for name in imported(path) if name.startswith("polestar_jax.methods")} == set()


def test_no_part_knows_a_method_file():
    """Commands may ask `METHODS` for a method by name; nobody imports its file."""
    for path in (ROOT / "polestar_jax").rglob("*.py"):
        files = {name for name in imported(path) if re.match(r"polestar_jax\.methods\.[a-z]", name)}
        assert files == set(), path


WITHOUT_EACH = """
    import importlib, pkgutil, sys
    import polestar_jax.methods

    prefix, listed = "polestar_jax.methods", pkgutil.iter_modules

    class Deleted:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == f"{prefix}.{missing}":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Deleted)
    pkgutil.iter_modules = lambda path: [module for module in listed(path) if module.name != missing]
    names = set(polestar_jax.methods.METHODS)
    for missing in sorted(names):
        for module in [name for name in sys.modules if name.startswith(prefix)]:
            del sys.modules[module]
        found = importlib.import_module(prefix)
        assert set(found.METHODS) == names - {missing}, missing
        for make in found.METHODS.values():
            make()
    print(len(names))
"""


def test_any_method_file_can_be_deleted():
    """Every other method is imported and made when one file is neither listed nor found."""
    words = [sys.executable, "-c", textwrap.dedent(WITHOUT_EACH)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(FILES) == len(METHODS)
