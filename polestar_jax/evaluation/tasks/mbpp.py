"""MBPP, 3-shot, in the wording of Austin et al.: pass@1 against the three asserts, run in the sandbox."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polestar_jax.evaluation.code_text import fenced_code, program_of
from polestar_jax.evaluation.sandbox import run_program
from polestar_jax.evaluation.tasks.rows import Row, read_rows, source

FIELDS = ("text", "code", "test_list")
# Tasks 2, 3 and 4 of MBPP (Austin et al. 2021, "Program Synthesis with Large Language Models"), CC BY 4.0.
SHOTS = Path(__file__).with_name("mbpp_shots.jsonl")
_TEXT = (
    "You are an expert Python programmer, and here is your task: {{text}} Your code should pass these tests:\n\n"
    "{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}\n[BEGIN]\n"
)


def entry_point(code: str, test: str) -> str:
    """The function of a reference solution that its test calls."""
    functions = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    called = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    return next((name for name in functions if name in called), "")


def score(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """pass@1 of one answer: as it stands, or as post-processing reads it."""
    tests = "\n".join([doc.get("test_setup_code") or "", *doc["test_list"]])
    read = program_of(results[0], entry_point(doc["code"], doc["test_list"][0]))
    plain = fenced_code(results[0])
    return {
        "pass@1": float(run_program(f"{read}\n{tests}\n").passed),
        "pass@1_plain": float(run_program(f"{plain}\n{tests}\n").passed),
    }


def make_task(rows: Sequence[Row] | None = None, shots: Sequence[Row] | None = None) -> dict[str, Any]:
    """The task's config.

    Args:
      rows: as Google's file has them; None reads the test split of the hub.
      shots: three worked examples; None takes the usual ones, tasks 2, 3 and 4.
    """
    examples = [{**row, "is_fewshot": True} for row in (read_rows(SHOTS, FIELDS) if shots is None else shots[:3])]
    return {
        "task": "mbpp",
        **source("google-research-datasets/mbpp", "full", test=rows),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": _TEXT,
        "doc_to_target": "{% if is_fewshot is defined %}{{code}}\n[DONE]{% else %}{{test_list|join('\\n')}}{% endif %}",
        "target_delimiter": "",
        "process_results": score,
        "num_fewshot": 3,
        "fewshot_config": {"sampler": "first_n", "samples": examples},
        "generation_kwargs": {"until": ["[DONE]"], "do_sample": False},
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("pass@1", "pass@1_plain")
        ],
        "metadata": {"version": 1.0},
    }
