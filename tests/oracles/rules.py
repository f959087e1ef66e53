"""The equations of the commit rules and of Polestar's choices in plain Python, written from the paper and design.md.

Arrays are one row of the batch; rules return a reason per prediction.
"""

import math

import numpy as np

NONE, CONFIDENCE, DRIFT, FORCED, SUFFIX = range(5)


def predict(logits, mask_id):
    """Eq. 1: the most likely token but [MASK], and its probability among all tokens."""
    token = max((v for v in range(len(logits)) if v != mask_id), key=lambda v: (logits[v], -v))
    return token, 1 / sum(math.exp(min(other - logits[token], 700)) for other in logits)


def best(confidence, eligible):
    """The most confident eligible prediction, the first of equals, or None."""
    places = [i for i in range(len(confidence)) if eligible[i]]
    return min(places, key=lambda i: (-confidence[i], i), default=None)


def threshold(confidence, eligible, tau):
    """Fast-dLLM: everything at or above tau; the best in any case."""
    reason = [CONFIDENCE if ok and c >= tau else NONE for c, ok in zip(confidence, eligible, strict=True)]
    first = best(confidence, eligible)
    if first is not None and reason[first] == NONE:
        reason[first] = FORCED
    return reason


def factor(confidence, eligible, factor, release):
    """Fast-dLLM: rank r is taken while its confidence is at least 1 - factor / (r + 1); rank 1 always.

    The released code takes all where the first failure is the last rank.
    """
    order = sorted((i for i in range(len(confidence)) if eligible[i]), key=lambda i: (-confidence[i], i))
    taken = 0
    for rank, i in enumerate(order, start=1):
        if rank > 1 and confidence[i] < 1 - factor / (rank + 1):
            break
        taken = rank
    if release and taken == len(order) - 1:
        taken = len(order)
    reason = [NONE] * len(confidence)
    for rank, i in enumerate(order[:taken], start=1):
        reason[i] = CONFIDENCE if confidence[i] >= 1 - factor / (rank + 1) else FORCED
    return reason


def quota_of(masks, forwards, phase):
    """LLaDA: `masks` at a block's entry over its `forwards`, the remainder in the first ones."""
    share = [masks // forwards] * forwards
    for i in range(masks % forwards):
        share[i] += 1
    return share[phase]


def quota(score, eligible, masks, forwards, phase):
    """The so many best by `score`: the confidence, or a random number."""
    order = sorted((i for i in range(len(score)) if eligible[i]), key=lambda i: (-score[i], i))
    chosen = order[: quota_of(masks, forwards, phase)]
    return [FORCED if i in chosen else NONE for i in range(len(score))]


def drift(now, before):
    """Eq. 4 of one row: KL(now || before) per head, negative rounding cut off, mean over heads; `[H, N]` each."""
    divergence = lambda a, b: sum(p * math.log(p / q) for p, q in zip(a, b, strict=True) if p > 0)
    return sum(max(divergence(a, b), 0.0) for a, b in zip(now, before, strict=True)) / len(now)


def delta(now, past, history):
    """Section 4.2: drift minus the mean of the last `history` ones of the position in this block."""
    recent = past[len(past) - history :] if 0 < history < len(past) else past
    return now - sum(recent) / len(recent) if recent and history else now


def polestar(confidence, eligible, deltas, tau, alpha, entering, gate=True, floor=-math.inf, ceiling=math.inf):
    """Section 4.2, the current block: threshold, drift gate, and the best in any case."""
    reason = threshold(confidence, eligible, tau)
    for i, c in enumerate(confidence):
        open_gate = gate and not entering and eligible[i] and c > floor and deltas[i] < ceiling
        if open_gate and reason[i] in (NONE, FORCED) and deltas[i] >= alpha * (tau - c) ** 2:
            reason[i] = DRIFT
    return reason


def suffix(confidence, eligible, tau):
    """Section 4.2, the suffix: nothing is forced."""
    return [SUFFIX if ok and c >= tau else NONE for c, ok in zip(confidence, eligible, strict=True)]


def entry_is_full(index, period):
    """Every alternate block (period 2) with all rows, the others with the window's and their own."""
    return period == 0 or index == 0 or index % period != period - 1


def window(start, stop, length, first, prefix, suffix):
    """Slots and regions (0 before, 1 after the block) of the local window; `first` is the first valid slot."""
    before = [slot for slot in range(start - prefix, start) if slot >= first]
    after = [slot for slot in range(stop, stop + suffix) if slot < length]
    return np.array(before + after, int), np.array([0] * len(before) + [1] * len(after), int)


def top_clusters(drifts, counts, k):
    """The k most drifted clusters that have members, the lowest number first among equals."""
    able = [i for i in range(len(drifts)) if counts[i] > 0]
    return sorted(able, key=lambda i: (-drifts[i], i))[: int(k)]
