"""Latin squares and 4x4 sudoku in the manner of ParallelBench (arXiv 2510.04767), made here, with exact scorers."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from polestar_jax.evaluation.tasks.rows import Row, local_dataset

SIZE = 4
_SYMBOLS = [chr(65 + number) for number in range(26)] + [str(number) for number in range(10)]
Grid = list[list[int]]


def make_squares(count: int, seed: int) -> list[Row]:
    """Symbol sets to make a Latin square of, each with a square of other symbols as a worked example."""
    rows = []
    for number in range(count):
        source = random.Random(f"{seed} latin {number}")
        symbols = source.sample(_SYMBOLS, 2 * SIZE)
        order, columns = source.sample(range(SIZE), SIZE), source.sample(range(SIZE), SIZE)
        square = [[symbols[(row + column) % SIZE] for column in columns] for row in order]
        rows.append(
            {"symbols": symbols[SIZE:], "example": symbols[:SIZE], "answer": "\n".join(",".join(r) for r in square)}
        )
    return rows


def is_latin(symbols: Sequence[str], text: str) -> bool:
    """Whether the first four lines that hold every symbol are a Latin square."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    square = [line for line in lines if len(line) == SIZE and set(line) == set(symbols)][:SIZE]
    return len(square) == SIZE and all(set(column) == set(symbols) for column in zip(*square, strict=True))


def solutions(grid: Grid) -> list[Grid]:
    """At most two solutions of a 4x4 sudoku in which 0 is a hole: enough to tell whether there is one only."""
    found: list[Grid] = []

    def fill(cell: int) -> None:
        if len(found) > 1:
            return
        if cell == SIZE * SIZE:
            found.append([list(row) for row in grid])
            return
        row, column = divmod(cell, SIZE)
        if grid[row][column]:
            return fill(cell + 1)
        corner, edge = row - row % 2, column - column % 2
        box = {grid[corner + i][edge + j] for i, j in itertools.product(range(2), repeat=2)}
        used = set(grid[row]) | {line[column] for line in grid} | box
        for digit in {1, 2, 3, 4} - used:
            grid[row][column] = digit
            fill(cell + 1)
        grid[row][column] = 0

    fill(0)
    return found


def _random_sudoku(source: random.Random) -> Grid:
    """A full grid: a fixed one with digits renamed, and rows and columns exchanged inside and between bands."""
    base = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
    digits = source.sample([1, 2, 3, 4], SIZE)
    lines = lambda: [2 * band + i for band in source.sample((0, 1), 2) for i in source.sample((0, 1), 2)]
    order, columns = lines(), lines()
    return [[digits[base[row][column] - 1] for column in columns] for row in order]


def make_sudokus(count: int, seed: int, holes: int = 4) -> list[Row]:
    """Sudoku with `holes` empty cells and one solution, each with a solved one as a worked example."""
    if not 1 <= holes <= 12:
        raise ValueError(f"holes={holes} must be between 1 and 12: a 4x4 sudoku needs 4 digits to have one solution")
    rows = []
    for number in range(count):
        source = random.Random(f"{seed} sudoku {holes} {number}")
        (example, answer), (puzzle, solution) = (_dig(_random_sudoku(source), holes, source) for _ in range(2))
        rows.append({"puzzle": puzzle, "solution": solution, "example": example, "answer": answer})
    return rows


def _dig(full: Grid, holes: int, source: random.Random) -> tuple[str, str]:
    while True:
        grid = [list(row) for row in full]
        for cell in source.sample(range(SIZE * SIZE), holes):
            grid[cell // SIZE][cell % SIZE] = 0
        if len(solutions([list(row) for row in grid])) == 1:
            return _print(grid), _print(full)


def _print(grid: Grid) -> str:
    return "\n".join("".join(map(str, row)) for row in grid)


def is_solved(solution: str, text: str) -> bool:
    """Whether the first four lines of four digits are the solution; spaces and commas are forgiven."""
    lines = [line.replace(" ", "").replace(",", "") for line in text.splitlines()]
    return "\n".join([line for line in lines if len(line) == SIZE and line.isdigit()][:SIZE]) == solution


def _latin_prompt(row: Row) -> str:
    ask = lambda symbols: f"Write a Latin square of {', '.join(symbols)}, as {SIZE} lines of comma-separated cells."
    return f"{ask(row['example'])}\n{row['answer']}\n\n{ask(row['symbols'])}\n"


def _sudoku_prompt(row: Row) -> str:
    ask = lambda puzzle: f"Solve this sudoku, in which 0 is a hole. Answer with the full grid only.\n{puzzle}\n"
    return f"{ask(row['example'])}{row['answer']}\n\n{ask(row['puzzle'])}"


def make_task(name: str, count: int = 100, seed: int = 0) -> dict[str, Any]:
    """The config of "latin_square" or "sudoku"."""
    if name == "latin_square":
        rows, text, right = make_squares(count, seed), _latin_prompt, lambda doc, out: is_latin(doc["symbols"], out)
    elif name == "sudoku":
        rows, text, right = make_sudokus(count, seed), _sudoku_prompt, lambda doc, out: is_solved(doc["solution"], out)
    else:
        raise ValueError(f"puzzle {name!r} must be 'latin_square' or 'sudoku'")
    return {
        "task": f"puzzles_{name}",
        "custom_dataset": local_dataset(test=rows),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": text,
        "doc_to_target": lambda doc: "",
        "target_delimiter": "",
        "process_results": lambda doc, results: {"score": float(right(doc, results[0].partition("\n\n")[0]))},
        "num_fewshot": 0,
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
