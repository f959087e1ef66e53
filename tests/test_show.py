"""The canvas filling in: frames, the terminal, pictures, and the options that ask for them."""

import dataclasses
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from polestar_jax import DecodeOutput, StepLog, load, make_decode, methods, pad_prompts
from polestar_jax.cli import main
from polestar_jax.commands.show_terminal import render
from polestar_jax.metrics import measure
from polestar_jax.show import Frame, Stage, first_frame, lay_out, make_reader, make_stage, next_frame, replay_log
from polestar_jax.show_figure import animate, animation, draw
from polestar_jax.types import NO_FORWARD, NOTHING, REVOKED, Reason

IDS = [5, 17, 9]
LEGEND = ("confidence", "drift", "forced", "suffix", "recomputed")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A decode, forward by forward."""

    stage: Stage
    output: DecodeOutput
    live: list[Frame]
    kinds: tuple[str, ...]


@pytest.fixture(scope="module")
def recorded(golden: Path) -> Recorded:
    model, params, _ = load(golden / "polestar_a")
    decode = make_decode(model, methods.polestar(block_length=8, format="none"), gen_length=16)
    state = decode.init(jax.random.split(jax.random.key(0), 1), prompt_length=len(IDS))
    state = decode.start(state, pad_prompts([IDS]))
    stage = make_stage(decode, IDS, None)
    live = [first_frame(stage)]
    while not decode.finished(state).all():
        state, entry = decode.step(params, state)
        live.append(next_frame(stage, live[-1], jax.device_get(entry)))
    return Recorded(stage, jax.device_get(decode.output(state)), live, decode.kinds)


def hand_made(**text: str) -> tuple[Stage, list[Frame]]:
    """Four positions in two blocks behind a pad and a word: a commit each way, one of them taken back."""
    words = {7: "seven", 8: "a" * 30, **{int(token[1:]): word for token, word in text.items()}}
    stage = Stage("toy", ("", "word"), 4, 2, ("step", "refresh"), 2, lambda token: words[token])
    log = StepLog(
        kind=np.array([[1, 0, 0, NO_FORWARD]], np.uint8),
        rows=np.array([[3.0, 2.0, 2.0, 0.0]], np.float32),
        rows_executed=np.zeros((1, 4), np.float32),
        token=np.array([[[7, -1, 8, -1], [-1, 7, REVOKED, -1], [-1, -1, 8, 8], [-1] * 4]], np.int32),
        reason=np.array([[[1, 0, 4, 0], [0, 3, 0, 0], [0, 0, 1, 2], [0] * 4]], np.uint8),
        drift=np.zeros((1, 4, 0), np.float32),
        computed=np.array([[[0, 1, 2, 2, 1, 0], [0, 0, 2, 2, 0, 0], [0, 0, 0, 0, 2, 2], [0] * 6]], np.uint8),
    )
    return stage, list(replay_log(stage, log))


def test_live_frames_are_the_replayed_log(recorded: Recorded):
    replayed = list(replay_log(recorded.stage, recorded.output.log))
    assert len(replayed) == len(recorded.live) == recorded.output.forwards[0] + 1
    for live, again in zip(recorded.live, replayed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(live), dataclasses.asdict(again))


def test_frames_add_up_to_the_output(recorded: Recorded):
    frames, output = recorded.live, recorded.output
    metrics = measure(output, eos_id=0, kinds=recorded.kinds)
    np.testing.assert_array_equal(frames[-1].token, output.tokens[0])
    assert sum(frame.new.sum() for frame in frames) == frames[-1].committed == 16
    assert frames[-1].total == pytest.approx(metrics.rows[0])
    for reason in list(Reason)[1:]:
        assert (frames[-1].reason == reason).sum() == metrics.commits[reason.name.lower()][0]
    for name, count in metrics.kinds.items():
        assert sum(frame.kind == name for frame in frames) == count[0]
    for frame in frames[1:]:
        inside = slice(len(IDS) + 8 * frame.block, len(IDS) + 8 * frame.block + 8)
        assert (frame.computed[inside] == 1).all(), "a forward computes all of its block"


def test_commits_revocations_and_blocks():
    frames = hand_made()[1]
    assert [frame.kind for frame in frames] == ["", "refresh", "step", "step"]
    assert [frame.block for frame in frames] == [0, 0, 0, 1]
    assert [frame.committed for frame in frames] == [0, 2, 2, 4]
    assert [frame.total for frame in frames] == [0, 3, 5, 7]
    assert frames[1].token.tolist() == [7, NOTHING, 8, NOTHING] and frames[2].token.tolist() == [7, 7, NOTHING, NOTHING]
    assert frames[2].reason.tolist() == [1, 3, 0, 0] and frames[3].reason.tolist() == [1, 3, 1, 2]
    assert frames[2].new.tolist() == [False, True, False, False]
    assert frames[1].computed.tolist() == [0, 0.5, 1, 1, 0.5, 0]


def test_a_row_that_waits_keeps_its_frame(recorded: Recorded):
    entry = jax.tree.map(lambda plane: plane[:, 0], recorded.output.log)
    waiting = dataclasses.replace(entry, kind=np.full_like(entry.kind, NO_FORWARD))
    assert next_frame(recorded.stage, recorded.live[2], waiting) is recorded.live[2]


@pytest.mark.parametrize("size", [1, 8, 10, 32])
def test_lines_hold_every_position_once(size: int):
    stage = Stage("toy", ("",) * 5 + ("word",) * 200, 96 // size * size, size, (), 1, str)
    lines = lay_out(stage, 8)
    slots = [slot for line in lines for slot in line.slots]
    assert slots == list(range(205 - 3 * size, 205 + stage.gen_length))
    assert all(0 < len(line.slots) <= 8 for line in lines)
    for line in lines:
        assert {max((slot - 205) // size, -1) for slot in line.slots} == {line.block}
    assert lay_out(dataclasses.replace(stage, prompt=("", "word")), 8)[0].slots == range(1, 2)


def test_tokens_as_text():
    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return {1: " the", 2: "\n\n", 3: "   ", 4: "a\x07"}[ids[0]]

    read = make_reader(Tokenizer(), eos_id=0)
    assert [read(token) for token in range(5)] == ["eos", "the", "↵↵", "␣", "a�"]
    assert make_reader(None, eos_id=0)(17) == "17"


def show(stage: Stage, frame: Frame, width: int = 80, height: int = 24) -> str:
    console = Console(width=width, record=True, color_system="truecolor", file=io.StringIO())
    console.print(render(stage, frame, width, height))
    return console.export_text()


def test_terminal_shows_tokens_reasons_and_counters(recorded: Recorded):
    text = show(recorded.stage, recorded.live[0])
    assert "before the first forward" in text and text.count("·") == 16
    text = show(recorded.stage, recorded.live[-1])
    lines = text.splitlines()
    assert all(word in text for word in LEGEND) and "·" not in text
    assert lines[1].split() == ["prompt", *map(str, IDS)]
    tokens = recorded.output.tokens[0].tolist()
    assert lines[2].split()[1:] == [recorded.stage.text(token) for token in tokens[:8]]
    assert lines[3].split()[:2] == ["▶", "2"]
    assert f"forward {recorded.output.forwards[0]} ({recorded.live[-1].kind}): 16 of 16 tokens" in text
    assert max(map(len, lines)) <= 80


def test_terminal_styles():
    stage, frames = hand_made()
    console = Console(width=80, color_system="truecolor", force_terminal=True)
    segments = [segment for line in console.render_lines(render(stage, frames[1], 80, 24)) for segment in line]
    styles = {segment.text.strip(): segment.style for segment in segments if segment.style}
    assert styles["word"].underline and styles["aaaaaa…"].underline, "recomputed outside the block"
    assert not styles["seven"].underline and styles["seven"].bgcolor.name == "#56b4e9"
    assert styles["aaaaaa…"].bgcolor.name == "#009e73"
    assert styles["·"].dim


def test_a_long_canvas_is_cut_around_its_block():
    stage = Stage("toy", ("word",) * 4, 512, 8, ("step",), 1, str)
    frame = dataclasses.replace(first_frame(stage), block=40)
    lines = show(stage, frame, height=20).splitlines()
    assert len(lines) < 20 and any(line.startswith("▶ 41") for line in lines)
    assert show(stage, frame, width=30).count("▶") == 1


def test_pictures(recorded: Recorded, tmp_path: Path):
    toy = hand_made(t7="$x^", t8="<b>[red]")
    decodes = [(recorded.stage, recorded.live), toy]
    animate(decodes, tmp_path / "a.gif", "two decodes", delay=0.1)
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == recorded.output.forwards[0] + 2
        assert gif.info["duration"] == 100 and gif.info["loop"] == 0
        size = gif.size
    draw(decodes, tmp_path / "a.png", "two decodes")
    with Image.open(tmp_path / "a.png") as png:
        assert png.format == "PNG" and png.size == size
    assert animation([toy], "one", delay=0.1).startswith(b"GIF89a")


GENERATE = ("--prompt-ids", "5,17,9", "--gen-length", "16", "--block-length", "8", "--method", "polestar:format=none")


@pytest.mark.parametrize("name", ["a.gif", "a.PNG"])
def test_generate_writes_pictures(golden: Path, tmp_path: Path, recorded: Recorded, name: str, capsys):
    target = tmp_path / name
    assert main(["generate", "--model", str(golden / "polestar_a"), *GENERATE, "--show", str(target)]) == 0
    with Image.open(target) as image:
        assert getattr(image, "n_frames", 1) == (recorded.output.forwards[0] + 2 if name == "a.gif" else 1)


def test_generate_in_the_terminal(golden: Path, recorded: Recorded, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    words = ["generate", "--model", str(golden / "polestar_a"), *GENERATE, "--show", "--delay", "0", "--json", "-"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("{"), "JSON has stdout for itself"
    assert f"forward {recorded.output.forwards[0]} (" in captured.err
    assert all(word in captured.err for word in LEGEND)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--show", "a.jpg"], "--show a.jpg must end in .gif or .png"),
        (["--show", "/nowhere/a.gif"], "--show /nowhere/a.gif: there is no folder /nowhere"),
        (["--show"], "--show needs a terminal, and stderr is none; name a file instead"),
        (["--delay", "1"], "--delay is the time between the frames of --show"),
        (["--show", "a.gif", "--delay", "-1"], "--delay: '-1' is not a number of seconds"),
        (["--show", "a.gif", "--delay", "x"], "--delay: 'x' is not a number of seconds"),
    ],
)
def test_refused_before_anything_is_loaded(words: list[str], said: str, capsys):
    for command in (["generate", "--model", "no such model", *GENERATE], ["demo", "--model", "no such model"]):
        assert main([*command, *words]) == 2
        assert said in capsys.readouterr().err
