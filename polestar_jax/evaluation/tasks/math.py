"""MATH, 4-shot, in the wording of Minerva; scored by lm-eval's own normalisation, sympy and math_verify."""

from collections.abc import Sequence
from typing import Any

from polestar_jax.evaluation.tasks.rows import Row, source

FIELDS = ("problem", "solution")


def make_task(rows: Sequence[Row] | None = None) -> dict[str, Any]:
    """The task's config.

    Args:
      rows: with `problem` and `solution`, of all subjects together; None reads MATH-500 of the hub.
    """
    from lm_eval.tasks.minerva_math import utils

    return {
        "task": "math",
        **source("HuggingFaceH4/MATH-500", None, test=rows),
        "test_split": "test",
        "output_type": "generate_until",
        "process_docs": utils.process_docs,
        "doc_to_text": utils.doc_to_text,
        "doc_to_target": "{{answer if few_shot is undefined else solution}}",
        "process_results": utils.process_results,
        "num_fewshot": 4,
        "fewshot_config": {"sampler": "first_n", "samples": utils.list_fewshot_samples()},
        "generation_kwargs": {"until": ["Problem:"], "do_sample": False},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
            {"metric": "math_verify", "aggregation": "mean", "higher_is_better": True},
        ],
        "metadata": {"version": 3.1},
    }
