"""The exercises that the embedded checkpoints were trained on, held-out ones."""

from typing import Any

from polestar_jax.evaluation.tasks.rows import Row, local_dataset


def make_task(name: str, count: int = 100, seed: int = 0) -> dict[str, Any]:
    """The config of "arithmetic" or "lists", scored by the final answer."""
    from models.embedded import tasks

    if name not in tasks.TASKS:
        raise ValueError(f"embedded task {name!r} must be one of {', '.join(tasks.TASKS)}")
    items = tasks.make_items("heldout", count, seed, (name,))

    def score(doc: Row, results: list[str]) -> dict[str, float]:
        item = tasks.Item(doc["task"], doc["prompt"], doc["answer"])
        return {"score": float(tasks.is_correct(item, results[0])), "exact": float(tasks.is_exact(item, results[0]))}

    return {
        "task": f"embedded_{name}",
        "custom_dataset": local_dataset(
            test=[{"task": item.task, "prompt": item.prompt, "answer": item.answer} for item in items]
        ),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "process_results": score,
        "num_fewshot": 0,
        "generation_kwargs": {"until": [], "do_sample": False},
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("score", "exact")
        ],
        "metadata": {"version": 1.0},
    }
