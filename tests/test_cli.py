"""The `polestar` command, run in-process as a user runs it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from polestar_jax import load, make_decode, methods
from polestar_jax.cli import main
from polestar_jax.commands.method_arguments import describe_method, field_readers, parse_method, parse_methods

COMMITS = {"confidence", "drift", "forced", "suffix", "dependency"}
IDS = "5,17,9"
SHAPE = ("--gen-length", "16", "--block-length", "8")


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """A copy of a recorded run's model, without a tokenizer."""
    target = tmp_path / "checkpoint"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "polestar_a" / name, target / name)
    return target


def generate(folder: Path, *words: str) -> list[str]:
    return ["generate", "--model", str(folder), *words]


def edit_config(folder: Path, edit: Callable[[dict], object]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    edit(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def test_generate_prints_only_json(folder: Path, capsys):
    assert main(generate(folder, "--prompt-ids", IDS, *SHAPE, "--method", "polestar:format=none", "--json", "-")) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"tokens", "text", "forwards", "rows_per_forward", "commits", "environment"}
    assert len(result["tokens"]) == 16 and all(0 <= token < 128 for token in result["tokens"])
    assert result["text"] is None
    assert len(result["rows_per_forward"]) == result["forwards"]
    assert set(result["commits"]) == COMMITS and sum(result["commits"].values()) == 16
    assert result["environment"]["dtype"] == "float32"


def test_generate_is_the_library_with_these_settings(folder: Path, tmp_path: Path, capsys):
    target = tmp_path / "result.json"
    words = ("--method", "parallel", "--set", "threshold=0.5", "--json", str(target))
    assert main(generate(folder, "--prompt-ids", IDS, *SHAPE, *words)) == 0
    result = json.loads(target.read_text())

    model, params, _ = load(folder)
    decode = make_decode(model, methods.parallel(threshold=0.5, block_length=8), gen_length=16)
    state = decode.init(jax.random.split(jax.random.key(0), 1), prompt_length=3)
    output, _ = decode(params, state, np.array([[5, 17, 9]], np.int32))
    assert result["tokens"] == output.tokens[0].tolist() and result["forwards"] == output.forwards[0]
    assert result["rows_per_forward"] == [19.0] * result["forwards"]
    shown = capsys.readouterr().out
    assert ",".join(map(str, result["tokens"])) in shown and f"{result['forwards']} forwards" in shown


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"<unk>": 0} | {f"w{number}": number for number in range(1, 128)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["w126", "w127"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_generate_from_words(folder: Path, capsys):
    write_tokenizer(folder)
    words = ("--method", "parallel", "--set", "threshold=0.5", "--json", "-")
    assert main(generate(folder, "--prompt", "w5 what w9", *SHAPE, *words)) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    ids = [int(word.removeprefix("w")) for word in result["text"].split()]
    assert ids == result["tokens"][: len(ids)]
    assert captured.err.strip().endswith("does not know: what") and captured.err.startswith("polestar: warning:")


def test_generate_from_a_chat(folder: Path, tmp_path: Path, capsys):
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }} {% endfor %}w9")
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "system", "content": "w5"}, {"role": "user", "content": "w17"}]')

    def tokens(*words: str) -> list[int]:
        assert (
            main(generate(folder, *words, *SHAPE, "--method", "parallel", "--set", "threshold=0.5", "--json", "-")) == 0
        )
        return json.loads(capsys.readouterr().out)["tokens"]

    expected = tokens("--prompt-ids", IDS)
    assert tokens("--messages", str(file)) == expected
    assert tokens("--prompt", "w17", "--chat", "--system", "w5") == expected
    refused = lambda words, said: assert_refused(generate(folder, *words, *SHAPE), said, capsys)
    refused(["--prompt", "w17", "--chat", "--bos"], "has no BOS token")
    refused(["--prompt-ids", IDS, "--chat"], "--chat needs text")
    refused(["--messages", str(folder / "nothing.json")], "nothing.json cannot be read")
    refused(["--messages", str(folder / "config.json")], "holds a JSON dict, not a list of turns")
    (folder / "chat_template.jinja").unlink()
    refused(["--messages", str(file)], "no chat template")


def remove_rope(folder: Path) -> None:
    edit_config(folder, lambda fields: fields.pop("rope_theta"))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "polstar"], "unknown method 'polstar'; there are vanilla, .*polestar"),
        (["--method", "polestar:old"], "polestar has no preset 'old'; its presets are paper, release"),
        (["--method", "parallel:release"], "parallel has no preset 'release'; it has none"),
        (["--set", "taux=1"], "polestar has no field 'taux'; its fields are .*tau, "),
        (["--set", "tau"], "'tau' is not field=value"),
        (["--set", "tau=high"], "tau='high' cannot be read; tau takes a number"),
        (["--set", "history=9"], "history=9.0 must be between 0 and history_length=8"),
        (["--method", "fast_dllm", "--set", "cache=triple"], "cache='triple' must be 'dual' or 'prefix'"),
        (["--method", "vanilla", "--set", "steps=7"], "steps=7 must be a multiple of the 2 blocks"),
        (["--gen-length", "20"], "gen_length=20 must be a multiple of block_length=8"),
        (["--gen-length", "x"], "--gen-length: invalid int value: 'x'"),
        (["--gen-length", "256"], "prompt_length=3 [+] gen_length=256 is beyond the model's trained context of 256"),
        (["--prompt-ids", "5,128"], "prompt token 128 is outside the vocabulary of 128 ids"),
        (["--prompt-ids", "5,99999999999"], "prompt token 99999999999 is outside"),
        (["--prompt-ids", "5,x"], "'x' in --prompt-ids 5,x is not a token id"),
        (["--prompt-ids", ""], "the prompt is empty"),
        (["--seed", "-1"], "--seed: '-1' is not an integer from 0"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: there is no folder /nowhere/at"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_bad_words(folder: Path, capsys, words: list[str], said: str):
    assert_refused(generate(folder, "--prompt-ids", IDS, *SHAPE, *words), said, capsys)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_rope, "config.json.* rope_theta is missing"),
        (truncate, "model.safetensors is truncated or corrupt"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (shutil.rmtree, "is neither an embedded checkpoint .* nor a folder"),
    ],
)
def test_bad_checkpoints(folder: Path, capsys, damage: Callable[[Path], object], said: str):
    damage(folder)
    assert_refused(generate(folder, "--prompt-ids", IDS, *SHAPE), said, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "arguments are required: COMMAND"),
        (["decode"], "invalid choice: 'decode'"),
        (["demo", "--items", "0"], "--items 0 must be at least 1"),
        (["demo", "--methods", "vanilla,nothing"], "unknown method 'nothing'"),
        (["demo", "--methods", "vanilla,vanilla"], "vanilla is named twice"),
        (["demo", "--plot", "plot.txt"], "--plot plot.txt must end in .png"),
        (["generate", "--prompt", "a", "--prompt-ids", "5", *SHAPE], "not allowed with argument --prompt"),
        (["generate", *SHAPE], "one of the arguments --prompt --messages --prompt-ids is required"),
    ],
)
def test_bad_commands(capsys, words: list[str], said: str):
    assert_refused(words, said, capsys)


def test_words_need_a_tokenizer(folder: Path, capsys):
    assert_refused(generate(folder, "--prompt", "hello", *SHAPE), "has no tokenizer", capsys)
    assert_refused(["demo", "--model", str(folder)], "has no tokenizer", capsys)


def assert_refused(words: list[str], said: str, capsys) -> None:
    """Exit code 2, nothing on stdout, and one line that says so."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("polestar: error: ") and captured.err.count("\n") == 1
    assert re.search(said, captured.err), captured.err


def test_traceback_on_request(folder: Path):
    with pytest.raises(ValueError, match="the prompt is empty"):
        main(generate(folder, "--prompt-ids", "", *SHAPE, "--traceback"))


def test_help(capsys):
    for words in (["--help"], ["demo", "--help"], ["generate", "--help"], ["--version"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
    assert "--block-length S" in capsys.readouterr().out


def test_values_by_type():
    settings = "step_threshold=inf:capacities=0.25,0.5,1:drift_gate=false:format=int8:clusters=4:tau=1e-1"
    assert parse_method(f"polestar:release:{settings}").settings == {
        "step_threshold": float("inf"),
        "capacities": (0.25, 0.5, 1.0),
        "drift_gate": False,
        "format": "int8",
        "clusters": 4,
        "tau": 0.1,
    }
    assert parse_method("fast_dllm", ["threshold=none", "factor=1.5"]).settings == {"threshold": None, "factor": 1.5}
    for wrong in ("drift_gate=1", "format=fp9", "clusters=4.5", "capacities=a", "tau=nan", "draws=none"):
        with pytest.raises(ValueError, match=wrong.split("=")[0]):
            parse_method(f"polestar:{wrong}")


def test_every_field_of_every_method_can_be_given_its_own_value():
    for name in methods.METHODS:
        assert field_readers(name), name
    described = describe_method(parse_method("polestar").build(8))
    flat = described["cache"] | described["rule"] | described["sampler"]
    for field in field_readers("polestar"):
        value = flat[field]
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        choice = parse_method("polestar", [f"{field}={text}"])
        assert describe_method(choice.build(8)) == described
    json.dumps(described, allow_nan=False)


def test_lists_of_methods():
    labels = [choice.label for choice in parse_methods("vanilla, polestar:capacities=0.5,1.0,fast_dllm:cache=prefix")]
    assert labels == ["vanilla", "polestar:capacities=0.5,1.0", "fast_dllm:cache=prefix"]
    assert [choice.name for choice in parse_methods("all")] == list(methods.METHODS)


def test_demo(tmp_path: Path, capsys):
    target, plot = tmp_path / "demo.json", tmp_path / "demo.png"
    words = ["--items", "4", "--methods", "parallel,polestar", "--json", str(target), "--plot", str(plot)]
    assert main(["demo", *words]) == 0
    content = json.loads(target.read_text())
    assert set(content) == {"environment", "rows"}
    assert [row["method"] for row in content["rows"]] == ["parallel", "polestar"]
    for row in content["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert set(row["accuracy_by_task"]) == {"arithmetic", "lists"}
        assert set(row["commits"]) == COMMITS and sum(row["commits"].values()) == pytest.approx(48)
        assert row["positions_per_forward"] == pytest.approx(48 / row["forwards"])
        assert row["tps"] > 0 and row["tpf"] > 0 and row["rows"] <= row["rows_executed"]
        assert row["config"]["schedule"]["block_length"] == 8
    assert content["rows"][0]["refreshes"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(capsys.readouterr().out.split())
    assert "paired standard error" in shown and "TPS is that of one request" in shown
