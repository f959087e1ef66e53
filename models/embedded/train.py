"""Trains an embedded checkpoint as a masked diffusion model and writes it in the Hugging Face format of its family.

    python -m models.embedded.train --out runs/tiny --steps 8000 [--resume]
    python -m models.embedded.train --out runs/dream --family dream --steps 8000
    python -m models.embedded.train --out models/embedded/polestar-tiny --evaluate

A step depends on nothing but the parameters, the optimizer state and the number of the step, so a resumed run makes the
same parameters as an uninterrupted one.
"""

import argparse
import dataclasses
import functools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from convert import load_hf
from models import dream
from models.embedded import tasks
from models.embedded.checkpoint import BLOCK, EOS_ID, MASK_ID, encode, replacing, save_checkpoint
from models.embedded.evaluation import evaluate, predicted
from models.embedded.initial import make_params
from models.transformer import Config, Params, Transformer

EQUALS_ID = tasks.VOCABULARY.index("=")
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # tokens, valid, masked, weights
State = dict[str, Any]  # "params", "averaged" (over steps) and "optimizer"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
      steps: of the whole run; the cosine of the learning rate ends there.
      batch: sequences per step.
      family: "llada" or "dream"; dream has half as many key heads, biases, and logits of the next position.
      model_size, layers, heads, feed_forward: the model's shapes.
      muon_rate: learning rate of the layers' matrices at the peak.
      adam_rate: learning rate of everything else at the peak.
      warmup: steps of linear warm-up.
      easy: the share of the run that sees only items with few operations.
      decay: of the averaged weights, which are the ones that are shipped.
      pool: items generated at a time.
      padding_weight: of the loss at ends of text after the first.
      later_weight: of the loss in blocks after the one being decoded.
      result_weight: of the loss at the results of sums, which are what is learned last.
      shares: of arithmetic and lists among the items.
      seed: of the initial weights, the items and the masks.
    """

    steps: int = 4_000
    batch: int = 32
    family: str = "llada"
    model_size: int = 128
    layers: int = 4
    heads: int = 4
    feed_forward: int = 384
    muon_rate: float = 0.006
    adam_rate: float = 1e-3
    warmup: int = 100
    easy: float = 0.04
    decay: float = 0.998
    pool: int = 16_384
    padding_weight: float = 0.05
    later_weight: float = 0.1
    result_weight: float = 4.0
    shares: tuple[int, ...] = (6, 3)
    seed: int = 0


def draw_masks(answers: np.ndarray, recipe: Recipe, source: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What to hide of answers `[B, G]`, and the loss weights `[B, G]`, zero at what is shown.

    Some rows are masked at a uniform ratio, as LLaDA is trained; most as block-wise decoding meets them: clean blocks,
    then one block partly masked, then nothing but masks.
    """
    rows, length = answers.shape
    place = np.arange(length)
    lengths = (answers != EOS_ID).sum(axis=1, keepdims=True)
    scattered = source.random((rows, length)) < np.maximum(source.random((rows, 1)), 1 / length)
    block = source.integers(0, lengths // BLOCK + 1)
    current, later = place // BLOCK == block, place // BLOCK > block
    order = source.random((rows, length // BLOCK, BLOCK)).argsort(axis=-1).reshape(rows, length)
    blockwise = later | (current & (order < source.integers(1, BLOCK + 1, (rows, 1))))
    by_block = source.random((rows, 1)) < 0.65
    masked = np.where(by_block, blockwise, scattered)
    weights = masked * np.where(place > lengths, recipe.padding_weight, 1.0)
    weights = weights * np.where(by_block & later, recipe.later_weight, 1.0)
    result = np.pad(answers[:, :-1] == EQUALS_ID, ((0, 0), (1, 0)))
    weights = weights * np.where(result, recipe.result_weight, 1.0)
    return masked, weights.astype(np.float32)


@functools.lru_cache(maxsize=2)
def _pool(recipe: Recipe, number: int, easy: bool) -> tuple[np.ndarray, np.ndarray]:
    mixture = tuple(task for task, share in zip(tasks.TASKS, recipe.shares, strict=True) for _ in range(share))
    return encode(tasks.make_items("train", recipe.pool, recipe.seed * 100_003 + number, mixture, easy=easy))


def draw_batch(recipe: Recipe, step: int) -> Batch:
    """Tokens, validity, masked and weights of one step, from the number of the step alone."""
    per_pool = max(1, 2 * recipe.pool // recipe.batch)
    tokens, valid = _pool(recipe, step // per_pool, step < recipe.easy * recipe.steps)
    source = np.random.default_rng((recipe.seed, step))
    chosen = source.integers(0, recipe.pool, recipe.batch)
    masked, weights = draw_masks(tokens[chosen, tasks.PROMPT_LENGTH :], recipe, source)
    return tokens[chosen], valid[chosen], masked, weights


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for the rest, both on a warm-up and a cosine, gradients clipped."""
    end = max(recipe.steps, recipe.warmup + 1)
    rate = lambda peak: optax.warmup_cosine_decay_schedule(0.0, peak, recipe.warmup, end)
    muon = optax.contrib.muon(rate(recipe.muon_rate), weight_decay=0.03)
    adam = optax.adamw(rate(recipe.adam_rate), b1=0.9, b2=0.98, weight_decay=0.0)

    def label(path: tuple[Any, ...], leaf: jax.Array) -> str:
        return "muon" if path[0].key == "layers" and leaf.ndim == 2 else "adam"

    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition({"muon": muon, "adam": adam}, labels))


def make_step(model: Transformer, recipe: Recipe) -> Callable[[State, jax.Array, Batch], tuple[State, jax.Array]]:
    """The jitted training step: `(state, step, batch) -> (state, loss)`."""
    optimizer = make_optimizer(recipe)

    def loss_of(params: Params, batch: Batch) -> jax.Array:
        tokens, valid, masked, weights = map(jnp.asarray, batch)
        answers = tokens[:, tasks.PROMPT_LENGTH :]
        shown = tokens.at[:, tasks.PROMPT_LENGTH :].set(jnp.where(masked, MASK_ID, answers))
        logits = predicted(model, params, shown, valid)[:, tasks.PROMPT_LENGTH :]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
        return (losses * weights).sum() / weights.sum()

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state: State, step: jax.Array, batch: Batch) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        decay = jnp.minimum(recipe.decay, (1 + step) / (10 + step))
        averaged = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state["averaged"], params)
        return {"params": params, "averaged": averaged, "optimizer": moments}, loss

    return advance


def make_model(recipe: Recipe) -> Transformer:
    """The model of a recipe, its parameters not yet made."""
    traits: dict[str, Any] = dream.TRAITS if recipe.family == "dream" else {"family": "llada"}
    return Transformer(
        Config(
            **traits,
            vocab_size=len(tasks.VOCABULARY),
            model_size=recipe.model_size,
            layers=recipe.layers,
            heads=recipe.heads,
            kv_heads=recipe.heads // (2 if recipe.family == "dream" else 1),
            feed_forward=recipe.feed_forward,
            max_length=128,
            rope_theta=100.0,
            epsilon=1e-5,
            mask_id=MASK_ID,
            eos_id=EOS_ID,
        )
    )


def train(recipe: Recipe, folder: Path, *, resume: bool = False, until: int | None = None, every: int = 500) -> Params:
    """Trains, logs, and saves the state and the checkpoint every `every` steps and when asked to terminate.

    Args:
      recipe: what to train and how.
      folder: gets `state.npz`, `log.jsonl` and the checkpoint's files.
      resume: continue from `state.npz` if there is one.
      until: stop after this many steps although the schedule goes on.
      every: steps between evaluations.

    Returns:
      The averaged parameters, which are the ones that the checkpoint holds.
    """
    model = make_model(recipe)
    params = make_params(model, recipe.seed)
    averaged, moments = jax.tree.map(jnp.copy, params), make_optimizer(recipe).init(params)
    state = {"params": params, "averaged": averaged, "optimizer": moments}
    folder.mkdir(parents=True, exist_ok=True)
    log, start, seconds = folder / "log.jsonl", 0, 0.0
    if resume and (folder / "state.npz").exists():
        state, start, seconds = load_state(folder / "state.npz", state)
    kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= start] if start else []
    log.write_text("".join(line + "\n" for line in kept))
    advance, heldout = make_step(model, recipe), tasks.make_items("heldout", 96, seed=1)
    stopping: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    end, losses, began = min(recipe.steps, until or recipe.steps), [], time.monotonic() - seconds
    for step in range(start, end):
        state, loss = advance(state, jnp.int32(step), draw_batch(recipe, step))
        losses.append(float(loss))
        done = step + 1
        last = bool(stopping) or done == end
        if done % 100 == 0:
            loss, losses = round(float(np.mean(losses)), 5), []
            record = {"step": done, "loss": loss, "seconds": round(time.monotonic() - began, 1)}
            if done % every == 0:
                record["heldout"] = evaluate(model, state["averaged"], heldout, 0.9)
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(record, flush=True)
        if done % every == 0 or last:
            save_state(folder / "state.npz", state, done, time.monotonic() - began)
            save_checkpoint(folder, model.config, state["averaged"])
        if stopping:
            break
    signal.signal(signal.SIGTERM, previous)
    return state["averaged"]


def save_state(path: Path, state: State, step: int, seconds: float) -> None:
    """Writes everything that a resumed run needs, in one rename."""
    leaves: dict[str, Any] = {f"leaf{number}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez(file, step=step, seconds=seconds, **leaves)


def load_state(path: Path, like: State) -> tuple[State, int, float]:
    """Reads a state with the structure of `like`, the number of steps done and the seconds they took."""
    with np.load(path) as arrays:
        leaves = [jnp.asarray(arrays[f"leaf{number}"]) for number in range(len(jax.tree.leaves(like)))]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), int(arrays["step"]), float(arrays["seconds"])


def main() -> None:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, the state and the log")
    parser.add_argument("--family", choices=("llada", "dream"), default=Recipe.family, help="of the model")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="length of the schedule")
    parser.add_argument("--batch", type=int, default=Recipe.batch, help="sequences per step")
    parser.add_argument("--muon-rate", type=float, default=Recipe.muon_rate, help="learning rate of the matrices")
    parser.add_argument("--adam-rate", type=float, default=Recipe.adam_rate, help="learning rate of the rest")
    parser.add_argument("--shares", type=int, nargs=2, default=Recipe.shares, help="of the two tasks among the items")
    parser.add_argument("--until", type=int, help="stop after this many steps, for a resumable part of a run")
    parser.add_argument("--resume", action="store_true", help="continue from the state in --out")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint in --out")
    parser.add_argument("--items", type=int, default=400, help="held-out items of --evaluate")
    options = parser.parse_args()
    if not options.evaluate:
        recipe = Recipe(
            steps=options.steps,
            family=options.family,
            batch=options.batch,
            muon_rate=options.muon_rate,
            adam_rate=options.adam_rate,
            shares=tuple(options.shares),
        )
        train(recipe, options.out, resume=options.resume, until=options.until)
        return
    model, params = load_hf(options.out)
    items = tasks.make_items("heldout", options.items, seed=2)
    for threshold in (2.0, 0.9):
        result = evaluate(model, params, items, threshold)
        print(json.dumps({"threshold": threshold, "items": len(items)} | result), flush=True)


if __name__ == "__main__":
    main()
