"""One evaluation: lm-eval with our tasks and our model, and a record of what every answer cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from polestar_jax.evaluation.adapter import PolestarLM

_COSTS = ("tpf", "forwards", "rows", "tokens", "refreshes", "error")


def evaluate(
    model: PolestarLM, tasks: Sequence[Any], *, limit: int | None = None, fewshot_seed: int = 1234
) -> dict[str, Any]:
    """Runs tasks, and adds to every sample what it cost.

    Args:
      model: the adapter; `chat="multiturn"` makes lm-eval hand over turns instead of text.
      tasks: of `polestar_jax.evaluation.tasks.make_tasks`.
      limit: documents per task; None takes all.
      fewshot_seed: of worked examples that are drawn.

    Returns:
      `results` (metrics by task, costs beside them as means over documents; `tpf_total` is all tokens by all forwards),
      `samples` by task, and `configs`.

    Raises:
      ValueError: a task is unknown, or lm-eval could not run any.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    named = [task for task in tasks if isinstance(task, str)]
    # Reading all of lm-eval's own tasks takes seconds, and ours need none of them.
    manager = TaskManager(include_defaults=bool(named))
    known = {*manager.all_tasks}
    if unknown := [task for task in named if task not in known]:
        from polestar_jax.evaluation.tasks import NAMES

        raise ValueError(f"unknown task {', '.join(unknown)}; ours are {', '.join(NAMES)}, others are lm-eval's own")
    outcome: Any = simple_evaluate(
        model=model,
        tasks=list(tasks),
        limit=limit,
        apply_chat_template=model.chat == "multiturn",
        fewshot_as_multiturn=model.chat == "multiturn",
        fewshot_random_seed=fewshot_seed,
        bootstrap_iters=0,
        task_manager=manager,
        confirm_run_unsafe_code=True,  # generated code runs in our sandbox or not at all
    )
    if outcome is None:
        raise ValueError("lm-eval returned nothing: no task had a document")
    samples, results = dict(outcome["samples"]), {name: dict(found) for name, found in outcome["results"].items()}
    for name, rows in samples.items():
        for row in rows:
            costs = [model.records.get((name, row["doc_id"], number), {}) for number in range(len(row["arguments"]))]
            row["costs"] = costs
        every = [cost for row in rows for cost in row["costs"] if cost]
        results[name] |= {
            field: float(np.mean([cost[field] for cost in every])) for field in _COSTS if every and field in every[0]
        }
        if every and "forwards" in every[0]:
            forwards = sum(cost["forwards"] for cost in every)
            results[name]["tpf_total"] = sum(cost["tokens"] for cost in every) / max(forwards, 1)
    return {"results": results, "samples": samples, "configs": dict(outcome["configs"])}
