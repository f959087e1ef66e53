"""KLASS, DAWN, AdaBlock's blocks and the entropy-bounded sampler in plain Python, written from the papers.

Arrays are one row of the batch; rules return a reason per prediction.
"""

import math

from oracles.rules import CONFIDENCE, FORCED, NONE, best, quota_of

DEPENDENCY = 5


def divergence(now, before):
    """KL(now || before), both with 1e-12 under the logarithm."""
    return sum(p * (math.log(p + 1e-12) - math.log(q + 1e-12)) for p, q in zip(now, before, strict=True))


def surest(confidence, eligible, count):
    """The `count` most confident eligible predictions, the first of equals first."""
    order = sorted((i for i in range(len(confidence)) if eligible[i]), key=lambda i: (-confidence[i], i))
    return order[:count]


def klass(confidence, eligible, divergences, tau, epsilon, *, strict, gate, phase, masks, forwards, strategy="all"):
    """Algorithm 1. `divergences[i]` are the last H of prediction i, the newest last; `masks` those at the entry."""
    history = len(divergences[0])
    stable = [all(value < epsilon for value in each) and (not gate or phase >= history - 1) for each in divergences]
    sure = [c > tau if strict else c >= tau for c in confidence]
    ready = [i for i in range(len(confidence)) if eligible[i] and stable[i] and sure[i]]
    if ready and strategy == "max_conf":
        ready = [min(ready, key=lambda i: (-confidence[i], i))]
    if ready and strategy == "min_kl":
        ready = [min(ready, key=lambda i: (divergences[i][-1], i))]
    if ready:
        return [CONFIDENCE if i in ready else NONE for i in range(len(confidence))]
    forced = surest(confidence, eligible, max(1, quota_of(masks, forwards, phase)))
    return [FORCED if i in forced else NONE for i in range(len(confidence))]


def dawn(confidence, eligible, slots, attention, received, anchors, high, induce, sink, edge, low, exclusion):
    """Section 4. `attention[i]` is the row of prediction i over all slots; `anchors` are slots."""
    size = len(slots)
    depends = lambda i, j: j != slots[i] and received[j] <= sink and attention[i][j] >= edge
    linked = lambda i, j: depends(i, slots[j]) or depends(j, slots[i])
    sure = [i for i in range(size) if eligible[i] and confidence[i] >= high]
    induced = [
        i for i in range(size) if eligible[i] and confidence[i] >= induce and any(depends(i, a) for a in anchors)
    ]
    if exclusion == "neighbours":
        excluded = [i for i in range(size) if any(linked(i, j) for j in {*sure, *induced})]
    else:
        excluded = [i for i in range(size) if any(depends(i, slots[j]) for j in {*sure} & {*induced})]
    left = [i for i in range(size) if eligible[i] and confidence[i] >= low and i not in {*sure, *induced, *excluded}]
    independent = []
    while left:
        first = min(left, key=lambda i: (-confidence[i], i))
        independent.append(first)
        left = [i for i in left if i != first and not linked(first, i)]
    reason = [CONFIDENCE if i in sure else DEPENDENCY if i in {*induced, *independent} else NONE for i in range(size)]
    if not any(reason) and (forced := best(confidence, eligible)) is not None:
        reason[forced] = FORCED
    return reason


def entropy_bound(confidence, eligible, entropy, gamma, release):
    """Algorithm 1 of the EB-Sampler with confidence as its order; the release leaves out the last one's entropy."""
    reason, taken = [NONE] * len(confidence), []
    for i in surest(confidence, eligible, len(confidence)):
        taken.append(entropy[i])
        if sum(taken) - (taken[-1] if release else max(taken)) > gamma:
            break
        reason[i] = CONFIDENCE
    first = best(confidence, eligible)
    if first is not None and not any(reason):
        reason[first] = FORCED
    return reason


def block_length(tokens, confidence, left, delimiters, threshold, base, window):
    """AdaBlock: predictions from the block's first position on, `left` of which belong to the generation."""
    found = [i for i in range(min(window, left)) if tokens[i] in delimiters]
    if found:
        surest_one = min(found, key=lambda i: (-confidence[i], i))
        if confidence[surest_one] >= threshold:
            return surest_one + 1
    return min(base, left)
