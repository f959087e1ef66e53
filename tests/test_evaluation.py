"""The adapter that lm-eval drives, and the likelihoods it estimates."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from methods_table import FAMILIES, lively_params

import polestar_jax
from polestar_jax import methods
from polestar_jax.cli import main
from polestar_jax.evaluation import sandbox
from polestar_jax.evaluation.adapter import PolestarLM
from polestar_jax.evaluation.answers import Answers
from polestar_jax.evaluation.likelihood import draw_counts, draw_masks, estimate
from polestar_jax.evaluation.run import evaluate
from polestar_jax.evaluation.sandbox import SandboxUnavailable, Verdict, run_program
from polestar_jax.evaluation.stops import cut, first_unfilled
from polestar_jax.evaluation.tasks import humaneval, mbpp
from polestar_jax.evaluation.tasks.rows import local_dataset

SAMPLES = Path(__file__).parent / "samples"
LENGTH = 24


@pytest.fixture(scope="module")
def checkpoint():
    return polestar_jax.load("polestar-tiny")


def adapter(checkpoint, **options) -> PolestarLM:
    settings = {"gen_length": LENGTH, "name": "polestar-tiny", "bucket": 24, "batch_size": 2}
    method = methods.parallel(block_length=8)
    return PolestarLM(*checkpoint, options.pop("method", method), **settings | options)


PROMPTS = [
    "ivy has 14 pens . she drops 9 . she buys 3 . how many ?",
    "bob has 5 pens . he buys 3 . how many ?",
    "gus has 8 cards . he drops 3 . he sells 3 . he wins 5 . how many ?",
    "move dan to back . swap bob and eva . line jack bob cara dan eva ?",
    "ann has 2 keys . she finds 2 . how many ?",
]


def requests(prompts=PROMPTS, until=()):
    return [
        Instance("generate_until", {}, (prompt, {"until": list(until)}), 0, ("task", number, 1))
        for number, prompt in enumerate(prompts)
    ]


def test_answers_come_in_order_whatever_the_batch(checkpoint):
    alone, together = adapter(checkpoint, batch_size=1), adapter(checkpoint, batch_size=4)
    expected = alone.generate_until(requests())
    assert together.generate_until(requests()) == expected
    assert together.records == alone.records
    backwards = together.generate_until(requests(PROMPTS[::-1]))
    assert backwards == expected[::-1]
    assert expected[1].startswith("bob starts with ")
    assert len(set(expected)) == len(expected)


def test_a_draw_hangs_on_the_prompt_alone(checkpoint):
    method = methods.vanilla(block_length=8, temperature=1.5)
    alone = adapter(checkpoint, method=method, batch_size=1).generate_until(requests())
    together = adapter(checkpoint, method=method, batch_size=4).generate_until(requests(PROMPTS[::-1]))
    assert together == alone[::-1]
    assert adapter(checkpoint, method=method, batch_size=4, seed=1).generate_until(requests()) != alone


def test_few_shapes_are_compiled(checkpoint):
    language_model = adapter(checkpoint, bucket=8)
    assert [language_model._padded(length) for length in (1, 8, 9, 16, 103, 104)] == [8, 8, 16, 16, 104, 104]
    language_model.generate_until(requests())
    assert language_model.shapes == {(2, 16), (2, 24)}


def test_every_answer_has_its_costs(checkpoint):
    language_model = adapter(checkpoint)
    language_model.generate_until(requests())
    for number, prompt in enumerate(PROMPTS):
        record = language_model.records["task", number, 0]
        assert record["prompt_tokens"] == len(prompt.split())
        assert record["tpf"] == record["tokens"] / record["forwards"]
        assert record["rows"] == record["forwards"] * (record["prompt_tokens"] + LENGTH)


def test_stop_strings_cut_the_answer(checkpoint):
    language_model = adapter(checkpoint)
    plain = language_model.generate_until(requests())
    stopped = language_model.generate_until(requests(until=[" pens", "."]))
    assert stopped == [cut(answer, [" pens", "."]) for answer in plain]
    assert stopped[1].startswith("bob starts with ") and len(stopped[1].split()) == 4


def test_a_stop_string_after_a_mask_is_none(checkpoint):
    language_model = adapter(checkpoint)
    words = checkpoint[2].encode("bob has 5 . pens")
    tokens = np.array(words)
    read = lambda filled: language_model._read(tokens, np.array(filled), {}, ["."])["text"]
    assert read([True] * 5) == "bob has 5 "
    assert read([True, False, True, True, True]) == "bob5 . pens"
    assert read([True, True, True, True, False]) == "bob has 5 "
    assert first_unfilled([]) == 0
    assert cut("a.b", ["", "b", "."]) == "a"


def test_a_killed_evaluation_goes_on(checkpoint, tmp_path, monkeypatch):
    file = str(tmp_path / "answers.jsonl")
    expected = adapter(checkpoint).generate_until(requests())
    decode_batch, calls = PolestarLM._decode_batch, []

    def killed(self, prompts):
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode_batch(self, prompts)

    monkeypatch.setattr(PolestarLM, "_decode_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        adapter(checkpoint, answers=file).generate_until(requests())
    with open(file, "a") as half:
        half.write('{"key": "torn')
    calls[:] = [0] * 2
    language_model = adapter(checkpoint, answers=file)
    assert language_model.generate_until(requests()) == expected
    assert sum(calls) == len(PROMPTS) - 2
    calls[:] = [0] * 2
    again = adapter(checkpoint, answers=file)
    assert again.generate_until(requests()) == expected
    assert sum(calls) == 0
    assert again.records == language_model.records
    # Another setting is another question.
    other = adapter(checkpoint, answers=file, method=methods.parallel(block_length=8, threshold=0.5))
    other.generate_until(requests(PROMPTS[:2]))
    assert sum(calls) == 2
    assert len(Answers(file)._known) == len(PROMPTS) + 2


def test_bad_settings_are_refused(checkpoint):
    with pytest.raises(ValueError, match="chat='turns'"):
        adapter(checkpoint, chat="turns")
    with pytest.raises(ValueError, match="samples=10"):
        adapter(checkpoint, samples=10)
    with pytest.raises(ValueError, match="gen_length=128"):
        adapter(checkpoint, gen_length=128)
    with pytest.raises(ValueError, match="has no tokenizer"):
        PolestarLM(*checkpoint[:2], None, methods.parallel(block_length=8), gen_length=8, name="x")
    long = requests(["pens " * 105])
    with pytest.raises(ValueError, match=r"document 0 of task has 105 tokens; .* 1 to 104"):
        adapter(checkpoint).generate_until(long)
    assert adapter(checkpoint, truncate=True).fit(long[0]) == checkpoint[2].encode("pens " * 104)
    with pytest.raises(ValueError, match="no chat template"):
        adapter(checkpoint, chat="single_user").generate_until(requests())
    with pytest.raises(NotImplementedError, match="left-to-right"):
        adapter(checkpoint).loglikelihood_rolling([])


# Likelihood


def exact_bound(model, params, prompt, target) -> float:
    """The bound by every set of masked positions, weighed by its probability."""
    total, n = 0.0, len(target)
    for size in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), size))
        for subset in subsets:
            shown = np.array([*prompt, *target])
            shown[[len(prompt) + place for place in subset]] = model.config.mask_id
            logits = np.asarray(model(params, jnp.asarray(shown)[None])[0], np.float64)
            log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            rows = [len(prompt) + place - model.shift for place in subset]
            loss = sum(log_probability[row, target[place]] for row, place in zip(rows, subset, strict=True))
            total += loss / size / len(subsets)
    return total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("estimator", ["llada", "dream"])
def test_the_estimate_is_unbiased(family, estimator, record_property):
    model = FAMILIES[family]
    params = lively_params(model, 1)
    prompt, target = [5, 6, 7], [8, 9, 10]
    exact = exact_bound(model, params, prompt, target)
    padded = jnp.asarray([0, 0, *prompt], jnp.int32), jnp.asarray([*target, 0, 0, 0, 0, 0], jnp.int32)
    sizes = jnp.asarray([len(prompt), len(target)], jnp.int32)
    value, error = estimate(model, 4096, 8, estimator, params, *padded, sizes, jax.random.key(0))
    record_property("exact", float(exact))
    record_property("estimate", (float(value), float(error)))
    assert abs(float(value) - exact) < 4 * float(error)
    assert float(error) < 0.1 * abs(exact)
    again, _ = estimate(model, 4096, 8, estimator, params, *padded, sizes, jax.random.key(0))
    assert again == value


def test_counts_are_spread_evenly():
    for seed in range(20):
        counts = np.asarray(draw_counts(jax.random.key(seed), jnp.int32(12), 12))
        assert sorted(counts) == list(range(1, 13))
        few = np.asarray(draw_counts(jax.random.key(seed), jnp.int32(12), 4))
        assert sorted(np.diff(sorted(few)))[0] == 3
    masks, weight = draw_masks(jax.random.key(0), jnp.int32(5), 8, 16, "llada")
    assert not masks[:, 5:].any()
    np.testing.assert_allclose(masks.sum(axis=1) * weight, 5, rtol=1e-6)
    ones, _ = draw_masks(jax.random.key(0), jnp.int32(1), 8, 16, "llada")
    assert ones[:, 0].all()


def test_a_likely_target_is_likelier(checkpoint):
    language_model = adapter(checkpoint, samples=16, group=8)
    ask = lambda target: Instance("loglikelihood", {}, (PROMPTS[1], target), 0, ("task", 0, 1))
    right, wrong = " bob starts with 5 pens .", " pens bob 5 with . starts"
    (likely, greedy), (unlikely, _) = language_model.loglikelihood([ask(right), ask(wrong)])
    assert likely > unlikely + 5
    assert likely < 0
    assert not greedy
    assert language_model.loglikelihood([ask(right)])[0][0] == likely


# Through lm-eval


def test_multiple_choice_end_to_end(checkpoint):
    choices = ["bob starts with 5 pens .", "pens bob 5 with . starts", "= = = ; ; ;"]
    rows = [
        {"prompt": PROMPTS[1], "choices": choices[place:] + choices[:place], "right": -place % 3} for place in (0, 1)
    ]
    task = {
        "task": "choice",
        "custom_dataset": local_dataset(test=rows),
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    outcome = evaluate(adapter(checkpoint, samples=16, group=8), [task])
    assert outcome["results"]["choice"]["acc,none"] == 1
    assert outcome["results"]["choice"]["error"] > 0
    assert all(len(row["costs"]) == 3 and row["costs"][0]["error"] >= 0 for row in outcome["samples"]["choice"])


BENCHMARKS = {"gsm8k": "gsm8k_test", "math": "math_test", "humaneval": "humaneval", "mbpp": "mbpp_test"}


@pytest.fixture(scope="module")
def benchmark_words() -> list[str]:
    """`polestar eval` on all 20 samples of the four benchmarks; programs need a sandbox."""
    names = dict(BENCHMARKS)
    try:
        run_program("")
    except SandboxUnavailable:
        del names["humaneval"], names["mbpp"]
    files = [f"{name}={SAMPLES / file}.jsonl" for name, file in names.items()]
    words = ["eval", "--tasks", ",".join(names), "--shots", files[0]]
    words += [word for file in files for word in ("--rows", file)]
    # Few-shot prompts are longer than what the small model was trained on, so that one bucket holds them all.
    return [
        *words,
        "--truncate",
        "--bucket",
        "104",
        "--gen-length",
        "24",
        "--block-length",
        "8",
        "--method",
        "parallel",
    ]


def read_samples(folder: Path) -> dict:
    return json.loads((folder / "samples.json").read_text())["samples"]


def run_into(verdicts: dict[str, Verdict], program: str) -> Verdict:
    return verdicts.setdefault(program, run_program(program))


def test_benchmarks_end_to_end(benchmark_words, tmp_path, capsys, monkeypatch):
    """All samples, one by one, and in batches of four after an interruption: the same answers, scores and costs.

    Scores of a model that does not know the words are near zero; what is looked at is that everything runs.
    """
    verdicts: dict[str, Verdict] = {}  # a program ends as it did before: the second run need not wait for it again
    for task in (humaneval, mbpp):
        monkeypatch.setattr(task, "run_program", lambda text: verdicts.get(text) or run_into(verdicts, text))
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert main([*benchmark_words, "--out", str(alone)]) == 0, capsys.readouterr().err
    record = json.loads((alone / "results.json").read_text())
    assert all(found["sample_len"] == 20 for found in record["results"].values())
    assert record["results"]["gsm8k"]["exact_match,strict-match"] == 0
    assert record["results"]["math"]["exact_match,none"] == 0
    assert record["compiled_shapes"] == [[1, 104]]
    assert record["environment"]["jax"] and record["method"]["rule"]["type"] == "Threshold"
    printed = capsys.readouterr().out
    assert all(name in printed for name in record["results"])

    words = [*benchmark_words, "--batch-size", "4", "--out", str(together)]
    decode_batch, calls = PolestarLM._decode_batch, []

    def interrupted(self, prompts):
        calls.append(len(prompts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode_batch(self, prompts)

    monkeypatch.setattr(PolestarLM, "_decode_batch", interrupted)
    assert main(words) == 130
    assert len((together / "answers.jsonl").read_text().splitlines()) == 12
    assert not (together / "results.json").exists()
    calls[:] = [0] * 4
    assert main(words) == 0, capsys.readouterr().err
    assert sum(calls) == 20 * len(record["results"]) - 12
    again = json.loads((together / "results.json").read_text())
    assert again["compiled_shapes"] == [[4, 104]]
    assert again["results"] == record["results"]
    assert read_samples(together) == read_samples(alone)
    samples = read_samples(alone)
    assert all(row["costs"][0]["forwards"] > 0 for rows in samples.values() for row in rows)
    assert len({row["resps"][0][0] for rows in samples.values() for row in rows}) > 10


def test_made_tasks_end_to_end(tmp_path, capsys):
    """The tasks that need no file; the embedded ones are those that the checkpoint knows."""
    words = ["eval", "--tasks", "embedded,lists_easy,lists_hard,latin_square,sudoku", "--count", "3", "--truncate"]
    words += ["--gen-length", "48", "--block-length", "8", "--method", "parallel", "--batch-size", "3"]
    words += ["--bucket", "80", "--out", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "results.json").read_text())
    assert len(record["results"]) == 2 + 10 + 2
    assert record["results"]["embedded_arithmetic"]["score,none"] > 0.5
    assert record["results"]["embedded_arithmetic"]["tpf_total"] > 1
    assert {"embedded_lists", "lists_easy_copy", "lists_hard_shuffle", "puzzles_sudoku"} <= record["results"].keys()
    answers = (tmp_path / "answers.jsonl").read_text()
    assert main(words) == 0
    assert (tmp_path / "answers.jsonl").read_text() == answers


def test_wrong_words(capsys):
    common = ["eval", "--gen-length", "24", "--block-length", "8", "--method", "parallel"]
    for words, message in (
        (["--tasks", "nonesuch"], "unknown task nonesuch; ours are gsm8k"),
        (["--tasks", "embedded", "--rows", "gsm8k"], "--rows 'gsm8k' is not TASK=FILE"),
        (["--tasks", "embedded", "--limit", "0"], "--limit 0"),
    ):
        assert main([*common, *words]) == 2
        assert message in capsys.readouterr().err


def test_where_programs_cannot_be_isolated(tmp_path, capsys, monkeypatch):
    """Without a place for answers nothing is decoded; with one they are kept, and scored where it can be done."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import sys; sys.stdin.read(); print('unshare: not permitted'); sys.exit(97)")
    monkeypatch.setattr(sandbox, "_LAUNCHER", launcher)
    words = ["eval", "--tasks", "humaneval", "--rows", f"humaneval={SAMPLES / 'humaneval.jsonl'}", "--limit", "1"]
    words += ["--truncate", "--bucket", "104", "--gen-length", "24", "--block-length", "8", "--method", "parallel"]
    with monkeypatch.context() as patch:
        patch.setattr(PolestarLM, "_decode_batch", None)
        assert main(words) == 2
    assert "cannot be isolated here (unshare: not permitted): allow user namespaces" in capsys.readouterr().err
    words += ["--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert capsys.readouterr().err.count("cannot be isolated here") == 2  # a warning, and the error in the end
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 1
    monkeypatch.undo()
    monkeypatch.setattr(PolestarLM, "_decode_batch", None)
    monkeypatch.setattr(humaneval, "run_program", lambda text: Verdict("failed", "", 0.0))
    assert main(words) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"]["humaneval"]["pass@1,none"] == 0
