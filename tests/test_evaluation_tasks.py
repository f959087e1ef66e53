"""Benchmark tasks: prompts byte by byte, filters, scorers; the reference solutions of the samples score 100 %."""

import json
import random
from pathlib import Path

import pytest
from lm_eval.tasks.minerva_math.utils import list_fewshot_samples

from polestar_jax.evaluation.code_text import fenced_code, longest_program, program_of, reachable
from polestar_jax.evaluation.sandbox import SandboxUnavailable, run_program
from polestar_jax.evaluation.tasks import NAMES, humaneval, lists, make_tasks, mbpp, puzzles
from polestar_jax.evaluation.tasks.rows import read_rows

SAMPLES = Path(__file__).parent / "samples"


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def built():
    """The four benchmarks as lm-eval builds them from the samples, with the requests of their documents."""
    from lm_eval.tasks import TaskManager

    names = ("gsm8k", "math", "humaneval", "mbpp")
    files = {
        "gsm8k": SAMPLES / "gsm8k_test.jsonl",
        "math": SAMPLES / "math_test.jsonl",
        "humaneval": SAMPLES / "humaneval.jsonl",
        "mbpp": SAMPLES / "mbpp_test.jsonl",
    }
    tasks = TaskManager(include_defaults=False).load(make_tasks(names, rows=files, shots={"gsm8k": files["gsm8k"]}))[
        "tasks"
    ]
    for task in tasks.values():
        task.set_fewshot_seed(1234)
        task.build_all_requests()
    return tasks


def test_gsm8k_prompts_are_five_worked_examples_and_the_question(built):
    rows = rows_of("gsm8k_test.jsonl")
    answers = {f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows}
    for request, row in zip(built["gsm8k"].instances, rows, strict=True):
        *shots, last = request.args[0].split("\n\nQuestion: ")
        assert len(shots) == 5
        assert {shots[0], *(f"Question: {shot}" for shot in shots[1:])} <= answers
        assert f"Question: {last}" == f"Question: {row['question']}\nAnswer:"
        assert request.args[1]["until"] == ["Question:", "</s>", "<|im_end|>"]


def test_math_prompts_are_minervas(built):
    """Four fixed examples, the first of them written out here; then the problem."""
    rows = rows_of("math_test.jsonl")
    ask = lambda problem: f"Problem:\n{problem}\n\nSolution:"
    examples = [f"{ask(shot['problem'])} {shot['solution']}\n\n" for shot in list_fewshot_samples()]
    assert len(examples) == 4
    assert examples[0] == (
        "Problem:\nFind the domain of the expression  $\\frac{\\sqrt{x-2}}{\\sqrt{5-x}}$.\n\nSolution: The expressions"
        " inside each square root must be non-negative. Therefore, $x-2 \\ge 0$, so $x\\ge2$, and $5 - x \\ge 0$, so"
        " $x \\le 5$. Also, the denominator cannot be equal to zero, so $5-x>0$, which gives $x<5$. Therefore, the"
        " domain of the expression is $\\boxed{[2,5)}$.\nFinal Answer: The final answer is $[2,5)$. I hope it is"
        " correct.\n\n"
    )
    for request, row in zip(built["math"].instances, rows, strict=True):
        assert request.args[0] == "".join(examples) + ask(row["problem"])
        assert request.args[1]["until"] == ["Problem:"]


def test_humaneval_prompts_are_the_stubs(built):
    for request, row in zip(built["humaneval"].instances, rows_of("humaneval.jsonl"), strict=True):
        assert request.args[0] == row["prompt"]


def test_mbpp_prompts_are_three_worked_examples_and_the_task(built):
    for request, row in zip(built["mbpp"].instances, rows_of("mbpp_test.jsonl"), strict=True):
        ask = lambda row: (
            "You are an expert Python programmer, and here is your task: "
            f"{row['text']} Your code should pass these tests:\n\n" + "\n".join(row["test_list"]) + "\n[BEGIN]\n"
        )
        shots = [f"{ask(shot)}{shot['code']}\n[DONE]\n\n" for shot in read_rows(mbpp.SHOTS, mbpp.FIELDS)]
        assert request.args[0] == "".join(shots) + ask(row)
        assert request.args[1]["until"] == ["[DONE]"]


def filtered(task, responses: list[str]) -> dict[str, list]:
    """What every filter of a task makes of one response per document."""
    for instance, response in zip(task.instances, responses, strict=True):
        instance.resps = [response]
        instance.filtered_resps = {}
    task.apply_filters()
    return {name: [i.filtered_resps[name] for i in task.instances] for name in task.instances[0].filtered_resps}


def test_gsm8k_filters(built):
    answers = [f"so it is {number} in all. #### {number}\n" for number in range(20)]
    answers[0] = "first $1,234 and then 56.5 apples"
    found = filtered(built["gsm8k"], answers)
    assert found["strict-match"][:3] == ["[invalid]", "1", "2"]
    assert found["flexible-extract"][:3] == ["56.5", "1", "2"]


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_reference_solutions_score_everything(built, name):
    task = built[name]
    answers = [
        row["answer"]
        if name == "gsm8k"
        else f"{row['solution']}\nFinal Answer: The final answer is ${answer}$. I hope it is correct."
        for row, answer in zip(
            rows_of(f"{name}_test.jsonl"), [doc.get("answer", "") for doc in task.eval_docs], strict=True
        )
    ]
    filters = filtered(task, answers)
    for name_of_filter, responses in filters.items():
        for doc, response in zip(task.eval_docs, responses, strict=True):
            scores = task.process_results(doc, [response])
            assert scores["exact_match"] == 1, (name_of_filter, doc, response)


def test_reference_programs_score_everything():
    _need_sandbox()
    for row in rows_of("humaneval.jsonl"):
        assert humaneval.score(row, [row["canonical_solution"]]) == {"pass@1": 1.0, "pass@1_plain": 1.0}, row["task_id"]
    for row in rows_of("mbpp_test.jsonl"):
        assert mbpp.score(row, [row["code"]]) == {"pass@1": 1.0, "pass@1_plain": 1.0}, row["task_id"]


def test_wrong_programs_score_nothing():
    _need_sandbox()
    stub, task = rows_of("humaneval.jsonl")[0], rows_of("mbpp_test.jsonl")[0]
    for answer in ("", "    return None", "    import sys; sys.exit(0)", "```python\nraise SystemExit(0)\n```"):
        assert humaneval.score(stub, [answer]) == {"pass@1": 0.0, "pass@1_plain": 0.0}
        assert mbpp.score(task, [answer]) == {"pass@1": 0.0, "pass@1_plain": 0.0}


def _need_sandbox():
    try:
        run_program("")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Here it is:\n```python\nx = 1\n```\nDone", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```python\ny = 2\n```", "x = 1\n"),
        ("x = 1", "x = 1"),
    ],
)
def test_fenced_code(answer, code):
    assert fenced_code(answer) == code


def test_the_longest_program_is_found_between_words():
    text = "Sure, I can do it:\ndef f():\n    return 1\n\nIt returns one ("
    assert longest_program(text).strip() == "def f():\n    return 1"
    assert longest_program("no code here at all!") == ""
    assert longest_program("") == ""


def test_only_what_the_entry_point_needs_is_kept():
    program = (
        "import math\nfrom sys import exit\nK = 2\nUNUSED = exit()\ndef helper(): return K\n"
        "def other(): return 1\nclass C:\n    def m(self): return helper()\ndef f(): return C().m()\nprint(f())\n"
    )
    kept = reachable(program, "f")
    assert all(part in kept for part in ("import math", "from sys import exit", "K = 2", "def helper", "class C"))
    assert not any(part in kept for part in ("UNUSED", "def other", "print"))
    assert reachable(program, "missing") == program
    assert program_of("```python\ndef f():\n    return 2\nassert False\n```", "f") == "def f():\n    return 2"


@pytest.mark.parametrize("operation", lists.OPERATIONS)
@pytest.mark.parametrize("pool", lists.POOLS)
def test_list_exercises(operation, pool):
    rows = lists.make_rows(operation, 30, seed=3, pool=pool)
    assert rows == lists.make_rows(operation, 30, seed=3, pool=pool)
    assert rows[0] != lists.make_rows(operation, 30, seed=4, pool=pool)[0]
    for number, row in enumerate(rows):
        source = random.Random(number)
        right = lists.OPERATIONS[operation].apply(row["items"], row["word"], row["index"], source)
        assert lists.score(row, [lists.write_list(right)]) == {"score": 1.0, "score_strict": 1.0}
        assert lists.score(row, [f"It is [{', '.join(right)}] now"]) == {"score": 1.0, "score_strict": 0.0}
        assert lists.is_right({**row["example"], "operation": operation}, json.loads(row["example_answer"]))
        for wrong in ([], right[1:], [*right, right[0]], [*right[:-1], "nobody"]):
            # Dropping the first one may be what was asked for only where any one may go, and one already went.
            assert not lists.is_right(row, wrong), (row, wrong)
        if operation != "copy":
            assert not lists.is_right(row, row["items"]) or operation == "sort"
        if operation in lists.EASY:
            assert lists.is_right(row, right)
            assert not lists.is_right(row, right[::-1])


def test_list_exercises_hand_made():
    row = {"items": ["A", "B", "C"], "word": "X", "index": 1}
    right = lambda operation, *answer: lists.is_right({**row, "operation": operation}, answer)
    assert right("insert_random", "A", "B", "C", "X")
    assert not right("insert_random", "A", "C", "B", "X")
    assert right("insert_index", "A", "X", "B", "C")
    assert not right("insert_index", "X", "A", "B", "C")
    assert right("remove_random", "B", "C")
    assert not right("remove_random", "C", "B")
    assert not right("remove_random", "C")
    assert right("replace_random", "A", "B", "X")
    assert not right("replace_random", "B", "A", "X")
    assert not right("shuffle", "A", "B", "C")
    assert right("shuffle", "C", "B", "A")
    assert not right("shuffle", "C", "B", "B")
    assert lists.read_list("x [\"a\"], then ['b', c ,]") == ["b", "c"]
    assert lists.read_list("none") == []


def test_latin_squares():
    for row in puzzles.make_squares(40, seed=0):
        assert puzzles.is_latin(row["example"], row["answer"])
        assert not set(row["example"]) & set(row["symbols"])
        first, *others = row["answer"].splitlines()
        assert not puzzles.is_latin(row["example"], "\n".join([first, first, *others[1:]]))
        assert not puzzles.is_latin(row["symbols"], row["answer"])
        assert puzzles.is_latin(row["example"], f"Here:\n{row['answer']}\nDone")


@pytest.mark.parametrize("holes", [1, 4, 10])
def test_sudokus_have_one_solution(holes):
    for row in puzzles.make_sudokus(15, seed=1, holes=holes):
        grid = [[int(cell) for cell in line] for line in row["puzzle"].splitlines()]
        assert sum(cell == 0 for line in grid for cell in line) == holes
        (only,) = puzzles.solutions(grid)
        assert "\n".join("".join(map(str, line)) for line in only) == row["solution"]
        assert puzzles.is_solved(row["solution"], f"Answer:\n{row['solution']}\n")
        assert puzzles.is_solved(row["solution"], row["solution"].replace("", " "))
        assert not puzzles.is_solved(row["solution"], row["solution"][::-1] + "x")
    assert len(puzzles.solutions([[0] * 4 for _ in range(4)])) == 2


def test_bad_words_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs --shots"):
        make_tasks(["gsm8k"], rows={"gsm8k": SAMPLES / "gsm8k_test.jsonl"})
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl does not exist"):
        make_tasks(["math"], rows={"math": tmp_path / "missing.jsonl"})
    with pytest.raises(ValueError, match="rows of sudoku"):
        make_tasks(["sudoku"], rows={"sudoku": SAMPLES / "math_test.jsonl"})
    (tmp_path / "bad.jsonl").write_text('{"problem": "p", "solution": "s"}\n{"problem": "p"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2 lacks solution"):
        make_tasks(["math"], rows={"math": tmp_path / "bad.jsonl"})
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1 is not JSON"):
        make_tasks(["math"], rows={"math": tmp_path / "bad.jsonl"})
    with pytest.raises(ValueError, match="holes=13"):
        puzzles.make_sudokus(1, 0, holes=13)
    with pytest.raises(ValueError, match="operation='fold'"):
        lists.make_rows("fold", 1, 0)
    assert len(make_tasks(["lists_easy", "lists_hard", "arc_easy"], count=1)) == 11
    assert set(NAMES) >= {"gsm8k", "math", "humaneval", "mbpp", "lists_easy", "lists_hard", "sudoku", "embedded"}
