"""One method on a benchmark, as a point of a sweep: accuracy and counts, no times."""

from collections.abc import Sequence
from typing import Any

from polestar_jax.evaluation.adapter import PolestarLM
from polestar_jax.evaluation.run import evaluate
from polestar_jax.metrics import binomial_error


def measure_benchmark(adapter: PolestarLM, tasks: Sequence[Any], limit: int | None) -> dict[str, Any]:
    """Accuracy, TPF and rows over all documents of the tasks together, the fields of `measure_method`.

    Args:
      adapter: the checkpoint with the method.
      tasks: of `make_tasks`, that generate text.
      limit: documents per task; None takes all.

    Returns:
      the fields, and `metrics`: which score of every task counts as right, the first that it has.
    """
    outcome = evaluate(adapter, tasks, limit=limit)
    results = {name: found for name, found in outcome["results"].items() if "tpf_total" in found}
    if not results:
        raise ValueError("none of the tasks generates text, and only what is generated has a number of forwards")
    metrics = {name: _first_score(found) for name, found in results.items()}
    documents = {name: found["sample_len"] for name, found in results.items()}
    count = sum(documents.values())
    accuracy = sum(results[name][metric] * documents[name] for name, metric in metrics.items()) / count
    costs = [cost for (task, _, _), cost in adapter.records.items() if task in results and "forwards" in cost]
    total = lambda field: float(sum(cost[field] for cost in costs))
    return {
        "accuracy": accuracy,
        "accuracy_error": binomial_error(accuracy, count),
        "tpf": total("tokens") / total("forwards"),
        "forwards": total("forwards") / len(costs),
        "rows_per_forward": total("rows") / total("forwards"),
        "rows": total("rows") / len(costs),
        "refreshes": total("refreshes") / len(costs),
        "documents": count,
        "metrics": metrics,
    }


def _first_score(found: dict[str, Any]) -> str:
    """The name of the first metric of a task, such as "exact_match,strict-match"."""
    names = (name for name, value in found.items() if "," in name and isinstance(value, (int, float)))
    return next(name for name in names if not name.partition(",")[0].endswith("_stderr"))
