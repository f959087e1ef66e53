"""Numbers from traces: which positions are stale, which signal finds them, how drift, commits and progress relate."""

from collections.abc import Sequence

import numpy as np

from polestar_jax.analysis.trace import Trace

GROUPS = ("window, top 25 % drift", "window, 25-50 %", "window, rest", "outside the window")
POLICIES = ("KL drift", "most attended, cosine", "uncertainty", "random")


def window_of(trace: Trace, step: int, before: int, after: int) -> np.ndarray:
    """bool `[N]`: positions up to so many blocks before the block and after it."""
    place, start = np.arange(trace.tokens.shape[1]), trace.start[step]
    stop, size = start + trace.block_length, trace.block_length
    return ((place >= start - before * size) & (place < start)) | ((place >= stop) & (place < stop + after * size))


def cumulative_error(trace: Trace) -> np.ndarray:
    """Figure 3a: staleness summed over the steps so far by drift group, `[T, 4]`, as a share of all of it.

    Groups of a step are by drift since the block's entry, mean over layers, in a window of one block on either side.
    """
    error = np.nan_to_num(trace.staleness).mean(axis=1)
    drift = trace.drift_since_entry.mean(axis=1)
    sums = np.zeros((len(error), len(GROUPS)))
    for step in range(len(error)):
        if trace.entering[step]:
            continue
        inside = window_of(trace, step, 1, 1)
        place = np.arange(inside.size)
        block = (place >= trace.start[step]) & (place < trace.start[step] + trace.block_length)
        order = np.flatnonzero(inside)[np.argsort(-drift[step, inside], kind="stable")]
        quarter, half = len(order) // 4, len(order) // 2
        for group, chosen in enumerate((order[:quarter], order[quarter:half], order[half:])):
            sums[step, group] = error[step, chosen].sum()
        sums[step, 3] = error[step, ~inside & ~block].sum()
    return np.cumsum(sums, axis=0) / max(sums.sum(), 1e-12)


def count_found(trace: Trace, share: float = 0.25, seed: int = 0) -> dict[str, int]:
    """Figure 6a, one decode: how many of the `share` most stale window positions each policy's own top `share` has.

    Per layer and step inside a block, over Polestar's window (two blocks before, one after), in a cached trajectory.
    Uncertainty is 1 - the confidence of a position's prediction, and is the same in all layers.

    Returns:
      counts by policy, and under "of" how many there were to find.
    """
    source = np.random.default_rng(seed)
    found: dict[str, int] = dict.fromkeys((*POLICIES, "of"), 0)
    uncertainty = 1 - trace.confidence
    for step in map(int, np.flatnonzero(~trace.entering)):
        inside = np.flatnonzero(window_of(trace, step, 2, 1))
        count = round(share * len(inside))
        for layer in range(trace.drift.shape[1]):
            stale = trace.staleness[step, layer, inside]
            if not count or not np.isfinite(stale).all() or stale.max() <= 1e-6:
                continue
            scores = {
                "KL drift": trace.drift_since_entry[step, layer, inside],
                "most attended, cosine": trace.anchor_change[step, layer, inside],
                "uncertainty": uncertainty[step, inside],
                "random": source.random(len(inside)),
            }
            truth = set(np.argsort(-stale, kind="stable")[:count])
            for name, score in scores.items():
                found[name] += len(truth & set(np.argsort(-score, kind="stable")[:count]))
            found["of"] += count
    return found


def share_found(counts: Sequence[dict[str, int]]) -> dict[str, tuple[float, float]]:
    """Counts of many decodes together: by policy the share it found, and its standard error over decodes.

    The error is that of a ratio of two sums, NaN for one decode: positions of one decode are no independent samples.
    """
    of = np.array([each["of"] for each in counts], np.float64)
    total, number = max(of.sum(), 1.0), len(counts)
    result = {}
    for name in POLICIES:
        found = np.array([each[name] for each in counts], np.float64)
        share = found.sum() / total
        spread = ((found - share * of) ** 2).sum() * number / max(number - 1, 1)
        result[name] = float(share), float(np.sqrt(spread) / total) if number > 1 else float("nan")
    return result


def selection_accuracy(traces: Sequence[Trace], share: float = 0.25, seed: int = 0) -> dict[str, float]:
    """Figure 6a over several decodes: by policy, the share of the most stale positions that it finds."""
    counts = [count_found(trace, share, seed + number) for number, trace in enumerate(traces)]
    return {name: value for name, (value, _) in share_found(counts).items()}


def progress(trace: Trace, position: int) -> np.ndarray:
    """Figure 3b: per step the gain in cosine similarity of a position's centred log-probabilities to their last state.

    `[T]`, NaN at first and after the position's commit.
    """
    states = trace.log_probability[:, position] - trace.log_probability[:, position].mean(axis=-1, keepdims=True)
    last = int(np.flatnonzero(trace.committed[:, position])[-1])
    final = states[last]
    similarity = states @ final / np.maximum(np.linalg.norm(states, axis=-1) * np.linalg.norm(final), 1e-12)
    gain = np.full(len(states), np.nan)
    gain[1 : last + 1] = np.diff(similarity[: last + 1])
    return gain


def first_trigger(trace: Trace, position: int, tau: float = 0.9, alpha: float = 10.0, history: int = 5) -> int | None:
    """The first step at which the drift gate of Polestar-Commit would open for a position, or None."""
    drift = trace.drift[:, -1, position - trace.shift]
    for step in range(2, len(drift)):
        past = drift[max(1, step - history) : step]
        bar = alpha * (tau - trace.confidence[step, position]) ** 2
        if trace.masked[step, position] and drift[step] - past.mean() >= bar:
            return step
    return None


def first_confident(trace: Trace, position: int, tau: float = 0.9) -> int | None:
    """The first step in its own block at which a position is at least `tau` confident, or None."""
    active = (trace.start <= position) & (position < trace.start + trace.block_length)
    found = np.flatnonzero((trace.confidence[:, position] >= tau) & trace.masked[:-1, position] & active)
    return int(found[0]) if len(found) else None


def drift_by_commits(traces: Sequence[Trace], most: int = 5) -> dict[str, np.ndarray]:
    """Figure 8a: drift in the window (last layer), by how many tokens the step before committed."""
    groups: dict[str, list[np.ndarray]] = {}
    for trace in traces:
        counts = trace.committed.sum(axis=1)
        for step in range(1, len(counts)):
            name = str(counts[step - 1]) if counts[step - 1] < most else f"{most}+"
            groups.setdefault(name, []).append(trace.drift[step, -1, window_of(trace, step, 2, 1)])
    return {name: np.concatenate(groups[name]) for name in sorted(groups)}


def principal_components(states: np.ndarray) -> np.ndarray:
    """The first two principal components of states `[T, D]`: `[T, 2]`."""
    centred = states - states.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return centred @ directions[:2].T
