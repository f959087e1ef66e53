"""GSM8K, 5-shot, as lm-eval words it: the prompts, the filters and the exact match of its version 3."""

from collections.abc import Sequence
from typing import Any

from polestar_jax.evaluation.tasks.rows import Row, source

FIELDS = ("question", "answer")
_NUMBER = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"


def make_task(
    rows: Sequence[Row] | None = None, shots: Sequence[Row] | None = None, num_fewshot: int = 5
) -> dict[str, Any]:
    """The task's config.

    Args:
      rows: with `question` and `answer`; None reads the test split of the hub.
      shots: rows to draw the worked examples from; those of the hub's train split if `rows` is None too.
      num_fewshot: examples before the question, drawn anew for every question with lm-eval's few-shot seed.
    """
    if rows is not None and shots is None and num_fewshot:
        raise ValueError(
            f"gsm8k with num_fewshot={num_fewshot} and local rows needs --shots FILE, rows of the train split to draw"
            " examples from; or num_fewshot=0"
        )
    return {
        "task": "gsm8k",
        **source("openai/gsm8k", "main", test=rows, train=shots if rows is not None else None),
        **({} if rows is not None and shots is None else {"training_split": "train", "fewshot_split": "train"}),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "num_fewshot": num_fewshot,
        "generation_kwargs": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False},
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"},
                    {"function": "take_first"},
                ],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": _NUMBER},
                    {"function": "take_first"},
                ],
            },
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", r"\$", "(?s).*#### ", r"\.$"],
            }
        ],
        "metadata": {"version": 3.0},
    }
