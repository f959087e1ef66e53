"""`polestar convert`: there and back with equal bits, stopped and resumed, and refused with nothing left behind."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import convert
from convert import orbax, writer
from convert.aside import aside_of
from convert.names import LLADA, LLAMA, flatten
from polestar_jax import load
from polestar_jax.cli import main
from polestar_jax.loading import embedded_names

EMBEDDED = Path(__file__).parents[1] / "models" / "embedded"
EMBEDDING, HEAD, NORM = (LLADA.source(path) for path in ("embedding", "head.weight", "norm.weight"))


class Killed(BaseException):
    """Stops a conversion as a signal does: nothing that catches exceptions sees it."""


@pytest.fixture
def source(golden: Path, tmp_path: Path) -> Path:
    """A copy of a small Hugging Face folder, to damage."""
    return copy_of(golden / "llada_gqa", tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def copy_of(folder: Path, place: Path) -> Path:
    place.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if (folder / name).is_file():
            shutil.copy(folder / name, place / name)
    return place


def edit(folder: Path, change) -> None:
    """Applies `change` to the tensors of a folder of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **fields) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))


def bits(folder: Path) -> dict[str, tuple]:
    """Every tensor of the safetensors files of a folder, comparable bit by bit."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: (tensor.dtype.name, tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}


def assert_same(actual, expected) -> None:
    actual, expected = flatten(actual), flatten(expected)
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert actual[path].dtype == leaf.dtype
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def assert_nothing_left(target: Path) -> None:
    assert sorted(path.name for path in target.parent.iterdir() if path.name.startswith(target.name)) == []


# There and back.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["polestar-tiny", "llada_gqa", "dream_gqa"])
def test_there_and_back(golden: Path, tmp_path: Path, name: str, dtype: str):
    folder = copy_of((EMBEDDED if name in embedded_names() else golden) / name, tmp_path / "source")
    if dtype == "bfloat16":

        def narrow(tensors):
            tensors.update({name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})

        edit(folder, narrow)
    convert.convert(folder, tmp_path / "orbax")
    convert.convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    assert bits(tmp_path / "back") == bits(folder)
    fields = json.loads((folder / "config.json").read_text())
    for copy in ("orbax", "back"):
        assert json.loads((tmp_path / copy / "config.json").read_text()) == fields | {"torch_dtype": dtype}
        if name in embedded_names():
            assert (tmp_path / copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_plain_orbax_restores_it(source: Path, target: Path):
    from orbax.checkpoint import v1 as ocp

    convert.convert(source, target)
    restored = ocp.load(target / "params")
    assert sorted(restored["layers"]) == ["0", "1", "2"]
    np.testing.assert_array_equal(restored["norm"]["weight"], load_file(source / "model.safetensors")[NORM])


def test_load_takes_a_name_an_orbax_folder_and_a_hugging_face_folder(target: Path):
    (name, *_) = embedded_names()
    convert.convert(EMBEDDED / name, target)
    loaded = [load(place) for place in (name, EMBEDDED / name, target)]
    for model, params, tokenizer in loaded[1:]:
        assert model == loaded[0][0]
        assert_same(params, loaded[0][1])
        assert tokenizer.decode([7, 8, 9]) == loaded[0][2].decode([7, 8, 9])


def test_restore_puts_parameters_where_it_is_told(source: Path, target: Path):
    convert.convert(source, target)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    split, whole = NamedSharding(mesh, PartitionSpec("model")), NamedSharding(mesh, PartitionSpec())
    model, expected = convert.load_hf(source)
    shardings = jax.tree.map(lambda leaf: split if leaf.ndim == 2 else whole, model.abstract_params())
    restored_model, restored = convert.restore(target, shardings)
    assert restored_model == model
    assert_same(restored, expected)
    assert restored["embedding"].sharding == split and restored["norm"]["weight"].sharding == whole
    assert convert.restore(target, whole)[1]["embedding"].sharding == whole


def test_dtype_is_chosen_at_conversion_or_at_loading(source: Path, tmp_path: Path):
    model, expected = convert.load_hf(source, dtype="bfloat16")
    convert.convert(source, tmp_path / "narrow", dtype="bfloat16")
    convert.convert(source, tmp_path / "wide")
    convert.convert(source, tmp_path / "hf", to="hf", dtype="bfloat16")
    for found, params in (
        convert.restore(tmp_path / "narrow"),
        convert.restore(tmp_path / "wide", dtype=jnp.bfloat16),
        convert.load_hf(tmp_path / "hf"),
    ):
        assert found == model
        assert_same(params, expected)
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_names_survive(source: Path, tmp_path: Path):
    _, params = convert.load_hf(source)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {LLAMA.source(path): tensors[LLADA.source(path)] for path in flatten(params)}, source / "model.safetensors"
    )
    report = convert.convert(source, tmp_path / "orbax")
    assert report["naming"] == "LLaMA-like"
    convert.convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    assert bits(tmp_path / "back") == bits(source)


def test_tied_head(source: Path, target: Path, tmp_path: Path):
    edit_config(source, weight_tying=True)
    edit(source, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    report = convert.convert(source, target)
    assert list(report["ignored"]) == [HEAD] and "tied" in report["ignored"][HEAD]
    model, params = convert.restore(target)
    assert model.config.tied
    assert_same(params, convert.load_hf(source)[1])
    convert.convert(target, tmp_path / "back", to="hf")
    expected = bits(source)
    del expected[HEAD]
    assert bits(tmp_path / "back") == expected


def test_padded_vocabulary(source: Path, target: Path, tmp_path: Path):
    def pad(tensors):
        tensors.update({name: np.pad(tensors[name], [(0, 20), (0, 0)]) for name in (EMBEDDING, HEAD)})

    edit(source, pad)
    edit_config(source, embedding_size=320)
    convert.convert(source, target)
    model, params = convert.restore(target)
    assert model.config.vocab_size == 320 and params["head"]["weight"].shape[0] == 320
    convert.convert(target, tmp_path / "back", to="hf")
    assert bits(tmp_path / "back") == bits(source)
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (fields["vocab_size"], fields["embedding_size"]) == (300, 320)


def test_shards_and_their_index(source: Path, target: Path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_BYTES", 40_000)
    convert.convert(source, target, to="hf")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in bits(source).values())
    assert bits(target) == bits(source)
    assert_same(convert.load_hf(target)[1], convert.load_hf(source)[1])


def test_parameters_in_memory(golden: Path, tmp_path: Path):
    model, params = convert.load_hf(golden / "dream_gqa")
    convert.save_hf(tmp_path / "hf", model, params)
    convert.save_orbax(tmp_path / "orbax", model, params)
    for found, loaded in (convert.load_hf(tmp_path / "hf"), convert.restore(tmp_path / "orbax")):
        assert found == model
        assert_same(loaded, params)
    del params["norm"]
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        convert.save_hf(tmp_path / "other", model, params)
    assert not (tmp_path / "other").exists()


# Stopped and resumed.


def stop_after(count: int):
    """A `progress` that stops the conversion when so many tensors are done."""
    done = []

    def progress(path: str, size: int) -> None:
        done.append(path)
        if len(done) == count:
            raise Killed

    return progress


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("count", [1, 12, 30])
def test_resume(source: Path, target: Path, tmp_path: Path, monkeypatch, to: str, count: int):
    monkeypatch.setattr(orbax, "_PIECE", 30_000)
    monkeypatch.setattr(writer, "SHARD_BYTES", 40_000)
    with pytest.raises(Killed):
        convert.convert(source, target, to=to, progress=stop_after(count))
    assert not target.exists() and aside_of(target).is_dir()
    with pytest.raises(FileExistsError, match=rf"{aside_of(target)} is left .*--resume, or delete"):
        convert.convert(source, target, to=to)
    kept = []
    with monkeypatch.context() as patch:
        module, name = (orbax, "_pieces") if to == "orbax" else (writer, "_write_shard")
        patch.setattr(module, name, spy(getattr(module, name), kept))
        report = convert.convert(source, target, to=to, resume=True)
    written = [path for paths in kept for path in paths]
    if count > 1:  # a shard has more than one tensor, and is kept when it is whole
        assert len(written) < len(report["tensors"]), "resuming wrote everything again"
    convert.convert(source, tmp_path / "straight", to=to)
    assert_same(convert.load(target)[1], convert.load(tmp_path / "straight")[1])
    assert_same(convert.load(target)[1], convert.load(source)[1])
    assert not aside_of(target).exists() and not list(target.glob(".*"))


def spy(real, kept: list):
    """The function, which notes the list of paths that it is given."""

    def noting(*arguments):
        kept.append(next(argument for argument in arguments if isinstance(argument, list)))
        return real(*arguments)

    return noting


def test_resume_after_a_stop_inside_a_piece_or_inside_the_merge(source: Path, target: Path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    def stop(*arguments):
        raise Killed

    monkeypatch.setattr(orbax, "_PIECE", 30_000)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.partial, "finalize", stop)
        with pytest.raises(Killed):
            convert.convert(source, target)
    # What a process leaves that dies while Orbax writes a piece: a folder that has not got its name yet.
    half = aside_of(target) / "params.partial_save.orbax-checkpoint-tmp" / "state"
    half.mkdir(parents=True)
    (half / "half").write_text("half")
    convert.convert(source, target, resume=True)
    assert_same(convert.restore(target)[1], convert.load_hf(source)[1])
    assert not any("tmp" in path.name or "partial" in path.name for path in target.rglob("*"))


def test_kill_and_resume_with_signals(source: Path, target: Path):
    program = f"""
import os, signal
from convert import convert, orbax
orbax._PIECE = 30_000
seen = []
def progress(path, size):
    seen.append(path)
    if len(seen) == 15:
        os.kill(os.getpid(), signal.SIGKILL)
convert({str(source)!r}, {str(target)!r}, progress=progress)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=EMBEDDED.parents[1], check=False)
    assert killed.returncode == -signal.SIGKILL and not target.exists()
    assert 1 < len(orbax.saved_paths(aside_of(target) / "params")) < 30
    assert main(["convert", str(source), str(target), "--resume"]) == 0
    assert_same(convert.restore(target)[1], convert.load_hf(source)[1])


def test_resume_continues_only_what_it_began(source: Path, target: Path):
    with pytest.raises(Killed):
        convert.convert(source, target, progress=stop_after(1))
    with pytest.raises(ValueError, match=r"belongs to another conversion \(other dtype, .*delete it"):
        convert.convert(source, target, dtype="bfloat16", resume=True)
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(ValueError, match=r"belongs to another conversion \(other fingerprint\)"):
        convert.convert(source, target, resume=True)
    shutil.rmtree(aside_of(target))
    convert.convert(source, target, resume=True)  # nothing to continue: a first run


def test_one_process_at_a_time(source: Path, target: Path):
    def progress(path: str, size: int) -> None:
        with pytest.raises(OSError, match="another process is writing"):
            convert.convert(source, target, resume=True)

    convert.convert(source, target, progress=progress)


# What is there is not lost.


def test_existing_targets(source: Path, target: Path):
    target.mkdir()
    convert.convert(source, target)  # an empty folder is as good as none
    (target / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"target is not empty: .*--overwrite"):
        convert.convert(source, target)
    assert (target / "mine.txt").read_text() == "mine"

    with pytest.raises(Killed):
        convert.convert(source, target, overwrite=True, progress=stop_after(3))
    assert (target / "mine.txt").read_text() == "mine" and convert.restore(target)
    convert.convert(source, target, overwrite=True, resume=True)
    assert not (target / "mine.txt").exists() and convert.restore(target)
    assert [path.name for path in target.parent.iterdir() if path.name.startswith("target")] == ["target"]


# Refusals: one message, nothing left behind.


def shard(folder: Path) -> None:
    """Cuts a folder's single file into shards."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    places = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    size = file.stat().st_size
    os.truncate(file, int(np.random.default_rng().integers(1, size)))


def flipped_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(9)
        file.write(b"\xff")


def quantized(kind: str):
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[NORM] = tensors[NORM].astype({"F8_E4M3": ml_dtypes.float8_e4m3fn, "I8": np.int8}[kind])
        save_file(tensors, folder / "model.safetensors")

    return change


DAMAGES = {
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors is missing"),
    "cut shard": (cut_shard, "model-00002-of-00002.safetensors is truncated or corrupt"),
    "flipped header": (flipped_header, "model.safetensors is truncated or corrupt"),
    "extra tensor": (
        lambda folder: edit(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.float32))),
        "unexpected: extra [3]",
    ),
    "missing tensor": (lambda folder: edit(folder, lambda tensors: tensors.pop(NORM)), f"missing: {NORM} [64]"),
    "wrong shape": (
        lambda folder: edit(folder, lambda tensors: tensors.update({NORM: np.zeros(63, np.float32)})),
        f"shape: {NORM} is [63]",
    ),
    "another family": (lambda folder: edit_config(folder, model_type="qwen2"), "model_type='qwen2'"),
    "Dream's name on LLaDA's config": (
        lambda folder: edit_config(folder, model_type="Dream"),
        "hidden_size is missing",
    ),
    "vocabulary": (
        lambda folder: edit_config(folder, vocab_size=320, embedding_size=320),
        f"vocabulary: {EMBEDDING} has 300 rows, config.json says 320",
    ),
    "unknown field": (lambda folder: edit_config(folder, query_norm=True), "query_norm=True is not a known field"),
    "generic field": (lambda folder: edit_config(folder, top_k=7), "top_k=7 is not supported (only its default 50)"),
    "quantization": (
        lambda folder: edit_config(folder, quantization_config={"bits": 4}),
        "quantization_config={'bits': 4} is not a known field",
    ),
    "fp8": (quantized("F8_E4M3"), f"dtype: {NORM} is F8_E4M3: quantized"),
    "int8": (quantized("I8"), f"dtype: {NORM} is I8: quantized"),
}


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_sources(source: Path, target: Path, capsys, name: str, to: str):
    damage, words = DAMAGES[name]
    damage(source)
    assert main(["convert", str(source), str(target), "--to", to]) == 2
    message = capsys.readouterr().err
    assert message.startswith("polestar: error: ") and words in message, message
    assert message.count("polestar: error") == 1 and "Traceback" not in message
    assert_nothing_left(target)


def test_a_shard_that_changes_under_way(source: Path, target: Path, monkeypatch):
    """What only shows when weights are read is refused like what shows before."""
    monkeypatch.setattr(orbax, "_PIECE", 30_000)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        convert.convert(source, target, started=lambda checked: os.truncate(source / "model.safetensors", 9_000))
    assert_nothing_left(target)


def test_unknown_fields_that_are_off_are_no_reason_to_refuse(source: Path):
    edit_config(source, torchscript=False, pruned_heads={}, top_k=50, prefix=None, return_dict=True)
    assert convert.load_hf(source)


def test_damaged_orbax_folders(source: Path, target: Path, tmp_path: Path, capsys):
    convert.convert(source, target)
    back = tmp_path / "back"
    words = ["convert", str(target), str(back), "--to", "hf"]
    fields = json.loads((target / "config.json").read_text())
    edit_config(target, d_model=128, n_layers=2)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "unexpected: layers.2.norm" in message or "unexpected: layers.2." in message
    assert "shape: embedding is [300, 64], config.json makes it [300, 128]" in message
    (target / "config.json").write_text(json.dumps(fields))
    largest = max((target / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "target/params is damaged" in message and "Traceback" not in message
    assert len(message.splitlines()) == 1
    (target / "params" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(target / "params" / "state")
    assert main(words) == 2
    assert "target/params is damaged" in capsys.readouterr().err
    assert_nothing_left(back)


def test_unwritable_targets(source: Path, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    for place, words in (
        (tmp_path / "nowhere" / "target", "there is no folder"),
        (tmp_path / "file" / "target", "there is no folder"),
        (tmp_path / "file", "is a file"),
        (Path("/sys/target"), "/sys/target cannot be written"),
    ):
        assert main(["convert", str(source), str(place)]) == 2
        message = capsys.readouterr().err
        assert words in message and len(message.splitlines()) == 1, message
        assert not aside_of(place).exists()


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_full_disk(source: Path, tmp_path: Path, capsys, monkeypatch, to: str):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    try:
        words = ["convert", str(source), str(place / "target"), "--to", to]
        assert main(words) == 2
        assert "make room" in capsys.readouterr().err
        assert_nothing_left(place / "target")
        # Full only later: what looks free before the first byte is not there when it is needed.
        monkeypatch.setattr("convert.conversion._check_space", lambda folder, size: None)
        assert main(words) == 2
        message = capsys.readouterr().err
        assert "No space left on device" in message and len(message.splitlines()) == 1, message
        assert "cannot be written" in message
        assert_nothing_left(place / "target")
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_file_size_limit(source: Path, target: Path, capsys, to: str):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert main(["convert", str(source), str(target), "--to", to]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = capsys.readouterr().err
    assert "cannot be written (File too large)" in message and len(message.splitlines()) == 1, message
    assert_nothing_left(target)


# The command.


def test_command(source: Path, target: Path, tmp_path: Path, capsys):
    report = tmp_path / "report.json"
    assert main(["convert", str(source), str(target), "--dtype", "bfloat16", "--report", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "3 x model.transformer.blocks.*.q_proj.weight" in shown and "float32 to bfloat16" in shown
    content = json.loads(report.read_text())
    assert content == json.loads((target / "conversion.json").read_text())
    stored = load_file(source / "model.safetensors")
    tensors = {tensor["name"]: tensor for tensor in content["tensors"]}
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert tuple(tensor["shape"]) == stored[name].shape
        assert (tensor["dtype"], tensor["target_dtype"]) == ("float32", "bfloat16")
        assert LLADA.source(tensor["target"]) == name
    assert main(["generate", "--model", str(target), "--prompt-ids", "5,6,7", "--method", "parallel",
                 "--gen-length", "8", "--block-length", "8"]) == 0  # fmt: skip


def test_command_refuses(source: Path, target: Path, capsys):
    for words, message in (
        ([str(source)], "DST"),
        ([str(source), str(target), "--to", "torch"], "invalid choice"),
        ([str(source), str(target), "--dtype", "float16"], "invalid choice"),
        (["nowhere", str(target)], "nowhere is not a folder"),
        ([str(source), str(target), "--report", str(target / "report.json")], "there is no folder"),
    ):
        assert main(["convert", *words]) == 2
        assert message in capsys.readouterr().err
        assert_nothing_left(target)
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert "--resume" in capsys.readouterr().out


def test_interrupted_command(source: Path, target: Path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orbax, "_pieces", interrupt)
        assert main(["convert", str(source), str(target)]) == 130
    message = " ".join(capsys.readouterr().err.split())
    assert "is kept: go on with --resume" in message and "interrupted" in message
    assert aside_of(target).is_dir() and not target.exists()
    assert main(["convert", str(source), str(target), "--resume"]) == 0


@pytest.mark.slow
def test_benchmark_on_a_small_scale():
    root = EMBEDDED.parents[1]
    command = [sys.executable, "benchmarks/convert_scale.py", "--scale", "small", "--kill", "--back"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.count("39 of 39 tensors have equal bits") == 2, ran.stdout
    assert ran.stdout.count("51 of 51 tensors have equal bits") == 2, ran.stdout


@pytest.mark.parametrize("between", ["", " [transform='{...}']"])
@pytest.mark.parametrize("quote", ["'", "\\'"])
def test_an_error_of_the_system_is_found_in_what_orbax_raises(tmp_path: Path, quote: str, between: str):
    text = (
        f"Error writing 'x': No space left on device{between} [os_error_code={quote}28{quote}] [source_locations=...]"
    )
    with pytest.raises(OSError, match="No space left on device") as caught, orbax._understood(tmp_path):
        raise ValueError(text)
    assert caught.value.errno == errno.ENOSPC
