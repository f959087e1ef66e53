"""HumanEval, 0-shot: pass@1 of the program that post-processing finds in the answer, run in the sandbox."""

from collections.abc import Sequence
from typing import Any

from polestar_jax.evaluation.code_text import program_of
from polestar_jax.evaluation.sandbox import run_program
from polestar_jax.evaluation.tasks.rows import Row, source

FIELDS = ("task_id", "prompt", "entry_point", "test")
STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]


def score(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """pass@1 of one answer: continuing the prompt as it stands, or as post-processing reads it."""
    check = f"{doc['test']}\ncheck({doc['entry_point']})\n"
    plain = f"{doc['prompt']}{results[0]}\n{check}"
    read = f"{program_of(results[0], doc['entry_point'], doc['prompt'])}\n{check}"
    return {"pass@1": float(run_program(read).passed), "pass@1_plain": float(run_program(plain).passed)}


def make_task(rows: Sequence[Row] | None = None, stop: bool = False) -> dict[str, Any]:
    """The task's config.

    Args:
      rows: as OpenAI's file has them; None reads the hub.
      stop: cut the answer at the stop strings of base models. The papers do not, for instruct models.
    """
    return {
        "task": "humaneval",
        **source("openai/openai_humaneval", None, test=rows),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{test}}\ncheck({{entry_point}})",
        "process_results": score,
        "num_fewshot": 0,
        "generation_kwargs": {"until": STOPS if stop else [], "do_sample": False},
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("pass@1", "pass@1_plain")
        ],
        "metadata": {"version": 1.0},
    }
