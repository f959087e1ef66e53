"""The paper's figures from traces and tables; every function draws into a matplotlib figure that it returns."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from polestar_jax.analysis import drift_study
from polestar_jax.analysis.labels import place_labels
from polestar_jax.analysis.trace import Trace

INK, SOFT, WARM, RED, GOLD = "#1f4e79", "#9db7d1", "#c05020", "#c0202a", "#e0a800"


def _figure(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    axes = figure.subplots(1, columns, **options)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8.5)
    return figure, axes


def draw_cumulative_error(trace: Trace) -> Figure:
    """Figure 3a: where the cache's error comes from, by drift group."""
    figure, axes = _figure(4.6, 3.2)
    shares = 100 * drift_study.cumulative_error(trace)
    for column, (name, color) in enumerate(zip(drift_study.GROUPS, (RED, WARM, SOFT, "0.6"), strict=True)):
        axes.plot(shares[:, column], color=color, label=f"{name}: {shares[-1, column]:.0f} %", lw=1.8)
    for step in np.flatnonzero(trace.entering):
        axes.axvline(step, color="0.9", lw=0.8, zorder=0)
    axes.set(xlabel="forward (lines: block entries)", ylabel="cumulative KV error (% of all)")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def most_eventful(trace: Trace) -> int:
    """The generated position with the largest single gain towards its final state."""
    positions = range(trace.prompt_length, trace.tokens.shape[1])
    # A position's very last gain is its commit; what is looked for is an event before it.
    gains = {place: np.nan_to_num(drift_study.progress(trace, place), nan=-1.0) for place in positions}
    return max(gains, key=lambda place: gains[place][: _commit(trace, place)].max(initial=-1.0))


def _commit(trace: Trace, position: int) -> int:
    return int(np.flatnonzero(trace.committed[:, position])[-1])


def draw_progress(trace: Trace, position: int | None = None) -> Figure:
    """Figure 3b: drift of one position beside its progress towards the state it is committed in."""
    position = most_eventful(trace) if position is None else position
    last = _commit(trace, position)
    steps = np.arange(1, last + 1)
    figure, left = _figure(5.0, 3.0)
    right = left.twinx()
    right.spines["top"].set_visible(False)
    drift = trace.drift[1 : last + 1, -1, position - trace.shift]
    gain = drift_study.progress(trace, position)[1 : last + 1]
    left.plot(steps, drift, color=INK, lw=1.6, label="drift")
    right.bar(steps, gain, color=GOLD, alpha=0.6, width=0.8)
    left.set(xlabel="forward", title=f"position {position}, committed at forward {last}")
    left.set_ylabel("drift (KL, last layer)", color=INK)
    right.set_ylabel("gain in similarity to the final state", color="#a07800")
    left.set_zorder(right.get_zorder() + 1)
    left.patch.set_visible(False)
    return figure


def draw_trajectories(trace: Trace, positions: Sequence[int] | None = None) -> Figure:
    """Figure 3c: last-layer values of two positions on their principal components, the first drift trigger marked."""
    if positions is None:
        first = most_eventful(trace)
        half = trace.prompt_length + (trace.tokens.shape[1] - trace.prompt_length) // 2
        positions = (first, half if half != first else half + 1)
    figure, panels = _figure(7.6, 3.4, len(positions), squeeze=False)
    for axes, position in zip(panels[0], positions, strict=True):
        last = _commit(trace, position)
        path = drift_study.principal_components(trace.values[: last + 1, position - trace.shift])
        axes.plot(*path.T, color=SOFT, lw=1.0, zorder=1)
        axes.scatter(*path.T, c=np.arange(len(path)), cmap="Blues", s=14, zorder=2, edgecolors="0.5", linewidths=0.3)
        marks: list[tuple[int | None, str, str, str, float]] = [
            (drift_study.first_trigger(trace, position), "*", GOLD, "first drift trigger", 130),
            (drift_study.first_confident(trace, position), "s", "black", "threshold 0.9 commits", 34),
            (last, "o", RED, "committed", 34),
        ]
        for step, marker, color, label, size in marks:
            if step is not None and step < len(path):
                axes.scatter(*path[step], marker=marker, color=color, s=size, zorder=3, label=f"{label} ({step})")
        axes.set(title=f"position {position}", xlabel="first component", ylabel="second component")
        axes.legend(frameon=False, fontsize=7.5)
    return figure


def draw_heatmap(trace: Trace, layer: int = -1, words: Sequence[str] | None = None) -> Figure:
    """Figures 4 and 11: drift of every position at every forward, what is already committed outlined in red.

    Args:
      words: one per position, written below the map if there is room.
    """
    drift = np.log10(np.maximum(trace.drift[1:, layer], 1e-6))
    figure, axes = _figure(max(6.0, 0.13 * drift.shape[1]), max(2.8, 0.1 * drift.shape[0]))
    image = axes.imshow(drift, aspect="auto", cmap="viridis", interpolation="nearest", vmin=-4)
    step, place = np.nonzero(trace.committed[1:])
    axes.scatter(place, step, marker="s", s=7, color=RED, linewidths=0)
    axes.axvline(trace.prompt_length - 0.5, color="white", lw=0.9, ls=":")
    axes.set(xlabel="position", ylabel="forward")
    if words is not None and len(words) <= 120:
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=5.5)
    figure.colorbar(image, ax=axes, label="log10 drift", shrink=0.9)
    return figure


def draw_drift_by_commits(traces: Sequence[Trace]) -> Figure:
    """Figure 8: drift in the window by how many tokens the forward before committed, and one trajectory of it."""
    groups = drift_study.drift_by_commits(traces)
    figure, (left, right) = _figure(8.4, 3.2, 2)
    total = sum(map(len, groups.values()))
    left.boxplot(
        [np.log10(np.maximum(values, 1e-6)) for values in groups.values()],
        tick_labels=list(groups),
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": SOFT, "edgecolor": INK},
        medianprops={"color": RED},
    )
    for place, values in enumerate(groups.values(), 1):
        left.annotate(
            f"{len(values) / total:.0%}", (place, 1.0), xycoords=("data", "axes fraction"), ha="center", fontsize=8
        )
    left.set(xlabel="tokens committed by the forward before", ylabel="log10 drift in the window")
    trace = traces[0]
    counts = trace.committed.sum(axis=1)
    steps = range(1, len(counts))
    drift = [trace.drift[step, -1, drift_study.window_of(trace, step, 2, 1)].mean() for step in steps]
    right.bar(steps, [counts[step - 1] for step in steps], color=SOFT, label="tokens committed before")
    right.set(xlabel="forward", ylabel="tokens")
    twin = right.twinx()
    twin.plot(steps, drift, color=RED, lw=1.5, marker="o", ms=3)
    twin.set_ylabel("mean drift in the window", color=RED)
    return figure


def draw_policies(accuracy: dict[str, float], errors: dict[str, float] | None = None, title: str = "") -> Figure:
    """Figure 6a: share of the truly most stale positions that each policy selects, Polestar's own starred.

    Args:
      accuracy: by policy, of `drift_study.selection_accuracy`.
      errors: standard errors.
      title: above all.
    """
    figure, axes = _figure(4.6, 3.2)
    own = drift_study.POLICIES[0]
    for place, (name, share) in enumerate(accuracy.items()):
        error = 0.0 if errors is None else 100 * errors[name]
        options = {"yerr": error, "capsize": 2.5, "error_kw": {"elinewidth": 0.9}} if errors else {}
        axes.bar(place, 100 * share, color=INK if name == own else SOFT, width=0.65, **options)
        axes.annotate(
            f"{'★ ' if name == own else ''}{100 * share:.0f}",
            (place, 100 * share + error),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_xticks(range(len(accuracy)), [name.replace(", ", ",\n") for name in accuracy])
    axes.set_ylabel("most stale positions found (%)")
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.margins(y=0.1)
    return figure


def draw_timing(kinds: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> Figure:
    """Figure 12: milliseconds per layer of every kind of forward, and of the parts of Polestar's.

    Args:
      kinds: `method`, `kind`, `ms_per_layer`, of `costs.time_kinds`.
      parts: `forward`, `part`, `ms`, of `parts.time_parts`.
    """
    figure, (left, right) = _figure(10.4, 0.36 * len(kinds) + 1.2, 2)
    names = [f"{row['method']}: {row['kind']}" for row in kinds]
    values = [row["ms_per_layer"] for row in kinds]
    colors = [INK if row["method"].startswith("polestar") else SOFT for row in kinds]
    left.barh(range(len(kinds)), values, color=colors, height=0.66)
    for place, value in enumerate(values):
        left.annotate(f" {value:.3g}", (value, place), va="center", fontsize=8.5)
    left.set_yticks(range(len(kinds)), names)
    left.set_xlabel("ms per layer and forward, LM head included")
    forwards = list(dict.fromkeys(row["forward"] for row in parts))
    labelled: set[str] = set()
    palette = (SOFT, INK, RED, GOLD, WARM, "#7a3b69", "0.5")
    for name, color in zip(dict.fromkeys(row["part"] for row in parts), palette, strict=False):
        for place, forward in enumerate(forwards):
            own = [row["part"] for row in parts if row["forward"] == forward]
            if name in own:
                found = [row["ms"] for row in parts if row["forward"] == forward]
                start, label = sum(found[: own.index(name)]), None if name in labelled else name
                right.barh(place, found[own.index(name)], left=start, color=color, height=0.6, label=label)
                labelled.add(name)
    right.set_yticks(range(len(forwards)), forwards)
    right.set_ylim(len(forwards) - 0.4, -1.4)
    right.set_xlabel("ms per layer, Polestar's parts timed one by one")
    right.legend(frameon=False, fontsize=7.5, ncols=3, loc="upper left")
    left.invert_yaxis()
    return figure


def draw_memory(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Figure 13, from shapes: bytes of every part of the state by method. Rows have `method` and `parts`."""
    figure, axes = _figure(6.8, 3.4)
    parts = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    bottom, names = np.zeros(len(rows)), [row["method"].replace(", ", ",\n") for row in rows]
    for part, color in zip(parts, ("0.8", SOFT, INK, WARM, GOLD, RED), strict=False):
        heights = np.array([row["parts"].get(part, 0) / 1e6 for row in rows])
        axes.bar(names, heights, bottom=bottom, color=color, label=part, width=0.6)
        bottom += heights
    axes.set_ylabel("MB beside the weights")
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_ylim(0, 1.3 * bottom.max())
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return figure


def pareto_front(rows: Sequence[dict[str, Any]], speed: str = "tpf") -> list[dict[str, Any]]:
    """The rows that no other row beats in `speed` without losing accuracy, fastest first."""
    front: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (-row[speed], -row["accuracy"])):
        if not front or row["accuracy"] > front[-1]["accuracy"]:
            front.append(row)
    return front


def draw_front(rows: Sequence[dict[str, Any]], speed: str = "tps", title: str = "", label: str | None = None) -> Figure:
    """Figure 1: accuracy against speed; the line joins what nothing else beats in both.

    Args:
      rows: of `polestar demo --json`: `method`, `accuracy`, `tpf`, `tps`; `accuracy_error` gives a bar.
      speed: "tps", with tokens per forward in brackets, "tpf", or another field that is better when larger.
      title: above all.
      label: what `speed` is, if it is another field.
    """
    figure, axes = _figure(*((6.8, 4.4) if len(rows) < 12 else (8.6, 5.6)))
    axes.margins(0.12)
    front = pareto_front(rows, speed)
    line = [(row[speed], 100 * row["accuracy"]) for row in front]
    axes.plot(*zip(*line, strict=True), color="0.72", lw=1.2, zorder=1)
    points = []
    for row in rows:
        own, best = row["method"].partition(":")[0] == "polestar", any(row is other for other in front)
        x, y, color = row[speed], 100 * row["accuracy"], RED if own else INK if best else "#8a97a5"
        if row.get("accuracy_error") is not None:
            axes.errorbar(x, y, 100 * row["accuracy_error"], color=color, elinewidth=0.7, alpha=0.45, zorder=1)
        axes.scatter(x, y, color=color, marker="*" if own else "o", s=150 if own else 34, zorder=3, linewidths=0)
        points.append((f"{row['method']} ({row['tpf']:.2f})" if speed == "tps" else row["method"], x, y, color))
    names = {"tps": "tokens per second; in brackets: per forward", "tpf": "tokens per forward"}
    label = label or names[speed]
    speeds = [row[speed] for row in rows]
    if max(speeds) > 8 * min(speeds):
        axes.set_xscale("log")
        label += ", log scale"
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if max(row["accuracy"] for row in rows) - min(row["accuracy"] for row in rows) > 0.15:
        # Most methods are near the top: distances from a little above 100 % on a log scale give them room.
        axes.set_yscale("function", functions=(lambda y: -np.log10(np.maximum(101 - y, 0.1)), lambda z: 101 - 10**-z))
        axes.set_yticks([0, 50, 70, 80, 90, 95, 98, 100])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(min(100 * row["accuracy"] for row in rows) - 12, 100.2)
    else:
        axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    axes.set(xlabel=label, ylabel="accuracy (%)")
    axes.set_title(title, fontsize=9.5, loc="left")
    handles = [Line2D([], [], color="0.72", lw=1.2, label="nothing is better in both")]
    axes.legend(handles=handles, frameon=False, fontsize=8)
    place_labels(figure, axes, sorted(points, key=lambda point: point[3] != RED), size=8)
    return figure


FIGURES: dict[str, Callable[..., Figure]] = {
    "3a-error": draw_cumulative_error,
    "3b-progress": draw_progress,
    "3c-trajectories": draw_trajectories,
    "4-heatmap": draw_heatmap,
    "6a-policies": draw_policies,
    "8-commits": draw_drift_by_commits,
    "12-timing": draw_timing,
    "13-memory": draw_memory,
    "1-front": draw_front,
}
