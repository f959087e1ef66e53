"""The generated tasks, their split, and the script that trains the embedded checkpoint on them."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from convert import load_hf
from models.embedded import tasks
from models.embedded.checkpoint import decode_text, encode, make_tokenizer
from models.embedded.train import Recipe, draw_masks, make_model, train

EMBEDDED = Path(__file__).parents[1] / "models" / "embedded"
MICRO = Recipe(steps=6, batch=4, model_size=16, layers=1, heads=2, feed_forward=16, warmup=2, easy=0.3, pool=32)


@pytest.fixture(scope="module")
def items() -> list[tasks.Item]:
    return tasks.make_items("train", 600, seed=1) + tasks.make_items("heldout", 600, seed=1)


def test_the_split_is_a_property_of_the_prompt(items):
    for item in items[:600]:
        assert tasks.split_of(item.prompt) == "train"
    for item in items[600:]:
        assert tasks.split_of(item.prompt) == "heldout"
    # Fixed values: the split must never move with the Python version or the hash seed.
    assert tasks.split_of("gus has 8 cards . he drops 3 . he sells 3 . he wins 5 . how many ?") == "heldout"
    assert tasks.split_of("swap ann and bob . move cara to back . line ann bob cara dan eva ?") == "train"


def test_items_are_distinct_deterministic_and_interleaved(items):
    heldout = items[600:]
    assert len({item.prompt for item in heldout}) == len(heldout)
    assert heldout == tasks.make_items("heldout", 600, seed=1)
    assert heldout != tasks.make_items("heldout", 600, seed=2)
    assert [item.task for item in heldout[:4]] == list(tasks.TASKS) * 2
    assert {item.task for item in tasks.make_items("heldout", 6, tasks=("lists",))} == {"lists"}
    with pytest.raises(ValueError, match="riddles"):
        tasks.make_items("train", 1, tasks=("riddles",))


def test_every_written_sum_is_right(items):
    seen = 0
    for item in items:
        for left, sign, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", item.answer):
            a, b = int(left), int(right)
            assert {"+": a + b, "-": a - b, "*": a * b}[sign] == int(result), item
            seen += 1
    assert seen > 1000


def test_arithmetic_answers_follow_from_the_prompt(items):
    for item in [item for item in items if item.task == "arithmetic"]:
        sentences = [sentence.split() for sentence in item.prompt.split(" . ")]
        value = int(sentences[0][2])
        for words in sentences[1:-1]:
            if words[1] == "doubles":
                value *= 2
            else:
                gains = ("finds", "buys", "gets", "wins", "picks")
                value += int(words[2]) if words[1] in gains else -int(words[2])
        assert tasks.final_answer("arithmetic", item.answer) == str(value)


def test_list_answers_follow_from_the_prompt(items):
    for item in [item for item in items if item.task == "lists"]:
        *requests, given = item.prompt.removesuffix(" ?").split(" . ")
        line = given.split()[1:]
        for request in map(str.split, requests):
            match request:
                case ["swap", first, "and", second]:
                    a, b = line.index(first), line.index(second)
                    line[a], line[b] = second, first
                case ["replace", name, "with", new]:
                    assert new not in line
                    line[line.index(name)] = new
                case ["move", name, "to", place]:
                    line.remove(name)
                    line.insert(0 if place == "front" else len(line), name)
                case _:
                    pytest.fail(f"unknown request {request}")
        assert tasks.final_answer("lists", item.answer) == " ".join(line)
        assert len(requests) >= 2


def test_is_correct_reads_the_final_answer_only(items):
    for item in items[:60]:
        assert tasks.is_correct(item, item.answer) and tasks.is_exact(item, item.answer)
        assert tasks.is_correct(item, f"{item.answer} {tasks.EOS} {tasks.EOS} so")
        assert not tasks.is_correct(item, "")
    sums, lines = items[:2]
    value = tasks.final_answer("arithmetic", sums.answer)
    assert not tasks.is_correct(sums, sums.answer.replace(f"has {value} ", f"has {int(value) + 1} "))
    assert tasks.is_correct(sums, f"so ann has {value} pens .") and not tasks.is_exact(
        sums, f"so ann has {value} pens ."
    )
    final = tasks.final_answer("lists", lines.answer)
    assert final is not None
    assert not tasks.is_correct(lines, f"answer : {' '.join(reversed(final.split()))} .")


def test_items_tokenize_and_fit(items):
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() == len(tasks.VOCABULARY) == len(set(tasks.VOCABULARY)) <= 200
    unknown = tokenizer.token_to_id(tasks.UNKNOWN)
    for item in items:
        prompt, answer = tokenizer.encode(item.prompt), tokenizer.encode(item.answer)
        assert unknown not in prompt.ids + answer.ids
        assert len(prompt.ids) == len(item.prompt.split()) <= tasks.PROMPT_LENGTH
        assert len(answer.ids) == len(item.answer.split()) < tasks.ANSWER_LENGTH
        assert tokenizer.decode(answer.ids) == item.answer
    tokens, valid = encode(items[:30])
    for row, item in enumerate(items[:30]):
        assert decode_text(tokens[row, tasks.PROMPT_LENGTH :]) == item.answer
        assert (
            tokens[row, : tasks.PROMPT_LENGTH][valid[row, : tasks.PROMPT_LENGTH]].tolist()
            == tokenizer.encode(item.prompt).ids
        )


def test_masks_hide_something_and_weigh_nothing_that_is_shown(items):
    answers = encode(items)[0][:, tasks.PROMPT_LENGTH :]
    masked, weights = draw_masks(answers, MICRO, np.random.default_rng(0))
    assert ((weights > 0) == masked).all()
    assert masked.any(axis=1).mean() > 0.95


def test_a_resumed_run_makes_the_parameters_of_an_uninterrupted_one(tmp_path):
    whole = train(MICRO, tmp_path / "whole")
    train(MICRO, tmp_path / "parts", until=2)
    parts = train(MICRO, tmp_path / "parts", resume=True)
    model, loaded = load_hf(tmp_path / "whole")
    assert model.config == make_model(MICRO).config
    assert jax.tree.structure(loaded) == jax.tree.structure(whole)
    for a, b, c in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize(("name", "family"), [("polestar-tiny", "llada"), ("polestar-tiny-dream", "dream")])
def test_the_shipped_checkpoints_are_this_vocabulary_and_model(name, family):
    folder = EMBEDDED / name
    model, _ = load_hf(folder)
    assert model.config == make_model(Recipe(family=family)).config
    assert (folder / "tokenizer.json").read_text() == make_tokenizer().to_str(pretty=True)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12e6
