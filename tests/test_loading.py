"""`polestar_jax.load`: by name, by folder, and what it says when neither is there or a foreign package hides ours."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from polestar_jax import loading


def write_tokenizer(folder: Path, size: int) -> None:
    tokenizer = Tokenizer(WordLevel({f"word{i}": i for i in range(size)}, unk_token="word0"))
    tokenizer.add_special_tokens(["word298", "word299"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    target = tmp_path / "checkpoints" / "polestar-small"
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "llada_mha" / name, target / name)
    return target


@pytest.fixture
def embedded(folder: Path, monkeypatch) -> Path:
    """Makes `folder` an embedded checkpoint, the only one."""
    monkeypatch.setattr(loading, "_EMBEDDED", folder.parent)
    return folder


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch) -> Path:
    """A user's folder, searched first for packages, as if neither `models` nor `convert` had been imported yet."""
    path = tmp_path / "notebooks"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    for package in ("models", "convert"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    return path


def test_folder_without_a_tokenizer(folder: Path):
    model, params, tokenizer = loading.load(folder)
    assert tokenizer is None and model.config.layers == 3
    logits = model.logits(params, model.embed(params, jnp.zeros((1, 2), jnp.int32)))
    assert logits.shape == (1, 2, 300) and logits.dtype == jnp.float32
    narrow_model, narrow, _ = loading.load(str(folder), dtype="bfloat16")
    assert narrow_model.config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}


def test_folder_with_a_tokenizer(folder: Path):
    write_tokenizer(folder, 300)
    assert loading.load(folder)[2].decode([7, 8]) == "word7 word8"


def test_tokenizer_with_more_ids_than_the_model(folder: Path):
    write_tokenizer(folder, 301)
    with pytest.raises(ValueError, match=r"polestar-small does not fit: its ids go up to 300, .* 300: use"):
        loading.load(folder)


def test_broken_tokenizer(folder: Path):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer .*download it again"):
        loading.load(folder)


def test_embedded_name(embedded: Path):
    assert loading.embedded_names() == [embedded.name]
    by_name, by_folder = loading.load(embedded.name), loading.load(embedded)
    assert by_name[0] == by_folder[0]
    jax.tree.map(np.testing.assert_array_equal, by_name[1], by_folder[1])


def test_unknown_name(embedded: Path):
    with pytest.raises(
        FileNotFoundError, match=f"'GSAI-ML/LLaDA-8B-Instruct' .*{embedded.name}.* path of a downloaded"
    ):
        loading.load("GSAI-ML/LLaDA-8B-Instruct")


@pytest.mark.parametrize("package", ["models", "convert"])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_foreign_package(notebooks: Path, folder: Path, package: str, file: str):
    foreign = notebooks / file.format(package)
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise RuntimeError('foreign code ran')")
    with pytest.raises(ImportError, match=f"`import {package}` finds {foreign} instead of .*: rename"):
        loading.load(folder)


def test_foreign_module_that_was_imported_before(folder: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "models", types.ModuleType("models"))
    with pytest.raises(ImportError, match=r"`import models` finds nothing on disk .*fresh process"):
        loading.load(folder)


def test_plain_folders_of_the_same_name_do_no_harm(notebooks: Path, folder: Path):
    for package in ("models", "convert"):
        (notebooks / package).mkdir()
    assert loading.load(folder)[0].config.layers == 3


def test_import_beside_foreign_packages(tmp_path: Path):
    """A script next to the user's own `models` and `convert` can import the library, which touches neither."""
    for package in ("models", "convert"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('foreign code ran')")
    program = "import sys, polestar_jax; print({'models', 'convert'} & sys.modules.keys())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
