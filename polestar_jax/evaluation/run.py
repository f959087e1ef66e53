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

    outcome: Any = simple_evaluate(
        model=model,
        tasks=list(tasks),
        limit=limit,
        apply_chat_template=model.chat == "multiturn",
        fewshot_as_multiturn=model.chat == "multiturn",
        fewshot_random_seed=fewshot_seed,
        bootstrap_iters=0,
        task_manager=_make_manager(tasks),
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


def prompts_of(model: PolestarLM, tasks: Sequence[Any], count: int, *, fewshot_seed: int = 1234) -> list[list[int]]:
    """The ids of the prompts of the first `count` documents, of tasks that generate; arguments as in `evaluate`.

    All are cut on the left to the length of the shortest, so that they share programs.
    """
    loaded = _make_manager(tasks).load(list(tasks))["tasks"]
    prompts: list[list[int]] = []
    for task in loaded.values():
        task.set_fewshot_seed(fewshot_seed)
        turns = {"chat_template": model.apply_chat_template} if model.chat == "multiturn" else {}
        task.build_all_requests(
            limit=count,
            apply_chat_template=model.chat == "multiturn",
            fewshot_as_multiturn=model.chat == "multiturn",
            **turns,
        )
        prompts += [model.fit(request) for request in task.instances if request.request_type == "generate_until"]
    if not prompts:
        raise ValueError("none of the tasks generates text")
    shortest = min(map(len, prompts[:count]))
    return [prompt[-shortest:] for prompt in prompts[:count]]


def _make_manager(tasks: Sequence[Any]) -> Any:
    """Knows lm-eval's own tasks if one of them is asked for: reading them takes seconds, and ours need none."""
    from lm_eval.tasks import TaskManager

    named = [task for task in tasks if isinstance(task, str)]
    manager = TaskManager(include_defaults=bool(named))
    known = {*manager.all_tasks}
    if unknown := [task for task in named if task not in known]:
        from polestar_jax.evaluation.tasks import NAMES

        raise ValueError(f"unknown task {', '.join(unknown)}; ours are {', '.join(NAMES)}, others are lm-eval's own")
    return manager
