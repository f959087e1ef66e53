"""Commit rules of the compared parallel decoders in plain Python, written from their papers and reference notes.

Arrays are one row of the batch, over one block; rules return a reason per position, and those that take tokens back the
positions too.
"""

import numpy as np
from oracles.rules import CONFIDENCE, FORCED, NONE, best


def most(confidence, eligible, count):
    """The `count` most confident eligible places, the first among equals."""
    places = [i for i in range(len(confidence)) if eligible[i]]
    return sorted(places, key=lambda i: (-confidence[i], i))[: max(count, 0)]


def runs(open_places):
    """Maximal runs of neighbouring true places, as lists."""
    found, current = [], []
    for i, inside in enumerate(open_places):
        if inside:
            current.append(i)
        elif current:
            found.append(current)
            current = []
    return [*found, current] if current else found


def hierarchy(confidence, masked, threshold, low, remask=None, tied=False):
    """Reasons and what is taken back. Committed places below `remask` are open again, and one more is written."""
    doubted = [remask is not None and not m and c < remask for c, m in zip(confidence, masked, strict=True)]
    open_places = [m or d for m, d in zip(masked, doubted, strict=True)]
    chosen = {i for i, c in enumerate(confidence) if open_places[i] and c > threshold}
    for run in runs(open_places):
        top = max(confidence[i] for i in run)
        winners = [i for i in run if confidence[i] == top]
        chosen |= {i for i in (winners if tied else winners[:1]) if confidence[i] > low}
    rest = [o and i not in chosen for i, o in enumerate(open_places)]
    forced = most(confidence, rest, sum(doubted) + 1 - len(chosen))
    reason = [CONFIDENCE if i in chosen else FORCED if i in forced else NONE for i in range(len(masked))]
    return reason, doubted


def localleap(confidence, masked, threshold, relaxed, radius):
    anchors = [i for i, c in enumerate(confidence) if masked[i] and c >= threshold]
    reason = [NONE] * len(masked)
    for i, c in enumerate(confidence):
        near = any(abs(i - anchor) <= radius for anchor in anchors)
        if masked[i] and (i in anchors or (near and c >= relaxed)):
            reason[i] = CONFIDENCE
    first = best(confidence, masked)
    if first is not None and reason[first] == NONE:
        reason[first] = FORCED
    return reason


def dimple(confidence, masked, gamma, at_entry, phase, steps, end=1e-3):
    """Times in float32, as everywhere; the last forward takes everything."""
    confident = [m and c > gamma for c, m in zip(confidence, masked, strict=True)]
    left = sum(masked)
    if phase == steps - 1:
        return [CONFIDENCE if ok else FORCED if m else NONE for ok, m in zip(confident, masked, strict=True)]
    if any(confident) or not left:
        return [CONFIDENCE if ok else NONE for ok in confident]
    share, count = np.float32(left) / np.float32(at_entry), left
    for step in range(phase + 1, steps):
        time = np.float32(1) + np.float32(end - 1) * np.float32(step) / np.float32(steps)
        if time < share and int(np.float32(left) * (1 - time / share)) >= 1:
            count = int(np.float32(left) * (1 - time / share))
            break
    return [FORCED if i in most(confidence, masked, count) else NONE for i in range(len(masked))]


def wino(confidence, shadow, masked, threshold, back, last, bound):
    """Reasons, what is taken back, and how many were committed."""
    cap = min(max(int(np.float32(0.7) * sum(masked)), 5), 20)
    wide = most(confidence, [m and c > threshold for c, m in zip(confidence, masked, strict=True)], cap)
    reason = [CONFIDENCE if i in wide else NONE for i in range(len(masked))]
    first = best(confidence, masked)
    if first is not None and not wide:
        reason[first] = FORCED
    count = sum(r != NONE for r in reason)
    doubted = [not m and s < back for s, m in zip(shadow, masked, strict=True)]
    limit = last - 1 if bound == "last" else count - 1
    taken = most([-s for s in shadow], doubted, limit if count > 1 else 0)
    return reason, [i in taken for i in range(len(masked))], count


def slowfast(forwards, size, explore, window, deviation, floor, leave_early):
    """The stretch after each forward of a block that is new at the first one.

    Args:
      forwards: per forward, confidences and masks before it, and masks after it, `[S]`.

    Returns:
      per forward: whether it was fast, the first place a rule may commit, and one beyond the last.
    """
    start, fast, step, estimates, agreed, end = 0, False, 0, [], False, size
    seen = []
    for confidence, before, after in forwards:
        seen.append((fast, start, end if fast else size))
        if not fast and not agreed:
            able = [i for i in range(start, size) if before[i] and confidence[i] >= floor]
            estimates = [*estimates, max(able) + 1 if able else min(start + 1, size)][-window:]
            agreed = len(estimates) == window and bool(np.std(estimates) < deviation)
            end = estimates[-1] if agreed else int(np.mean(estimates))
        over = step + 1 >= explore or (leave_early and (agreed or not any(after[start:])))
        if not fast and not over:
            step += 1
        elif any(after[start:end]):
            step = step + 1 if fast else 0
            fast = True
        else:
            start, fast, step, estimates, agreed, end = end, False, 0, [], False, size
    return seen
