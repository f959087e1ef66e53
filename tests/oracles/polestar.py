"""Polestar for one prompt in plain NumPy, float64: Algorithm 1 as design.md section 5 reads it (the `paper` preset).

Loops over layers and rows, every cache a plain array that is assigned to. Where a row's logits predict the next
position (`config.shift` 1), the row before the block is one of the block's rows: they are the ones that predict it.
Beside the trace it keeps how close every decision was, so that a comparison with float32 can ask for margins.
"""

import dataclasses
import math

import numpy as np
from oracles import kmeans, quantize, rules
from oracles.llada import Weights


@dataclasses.dataclass
class Settings:
    """Table 5, by the library's names."""

    block_length: int = 32
    tau: float = 0.9
    alpha: float = 10.0
    history: int = 5
    suffix_tau: float = 0.9
    update_threshold: float = 3
    step_threshold: float = math.inf
    window_entry_period: int = 2
    clusters: int = 8
    iterations: int = 5
    selected: int = 4
    selected_last: int = 4
    prefix_blocks: int = 2
    suffix_blocks: int = 1
    format: str = "nvfp4"
    residual: bool = True
    drift_gate: bool = True
    suffix_commit: bool = True


@dataclasses.dataclass
class Forward:
    """What one forward did, by slot.

    Attributes:
      block: its index.
      kind: "full entry", "window entry", "step" or "refresh".
      tokens, reasons: committed slot -> token, reason.
      drift: slot of the block -> drift of its attention; empty at entries.
      computed: slot -> layers that ran it through their feed-forward part.
    """

    block: int
    kind: str
    tokens: dict
    reasons: dict
    drift: dict
    computed: np.ndarray


class Decode:
    """A decode of one prompt; `run` it once.

    Attributes:
      tokens: the canvas.
      forwards: list of `Forward`.
      margins: the smallest distance of every kind of decision from going the other way.
      keys, values: `[L, N, Hkv, A]`, keys without rotary position.
    """

    def __init__(self, params, config, prompt, gen_length, settings):
        self.model, self.config, self.set = Weights(params, config), config, settings
        self.prompt_length, self.length = len(prompt), len(prompt) + gen_length
        self.tokens = np.array([*prompt, *[config.mask_id] * gen_length])
        self.masked = np.arange(self.length) >= len(prompt)
        shape = (config.layers, self.length, config.kv_heads, self.model.head_size)
        self.keys, self.values = np.zeros(shape), np.zeros(shape)
        self.forwards, self.margins = [], {}

    def margin(self, name, value):
        self.margins[name] = min(self.margins.get(name, math.inf), abs(value))

    def run(self):
        size = self.set.block_length
        for index, start in enumerate(range(self.prompt_length, self.length, size)):
            self.block = np.arange(start, start + size)
            self.rows = np.arange(start - self.config.shift, start + size)
            if self.masked[self.block].any():  # else: skipped without a forward, but counted
                self.decode_block(index)
        return self

    def decode_block(self, index):
        self.index = index
        full = rules.entry_is_full(index, self.set.window_entry_period)
        running = last = self.enter(full)  # the entry's commits count
        while self.masked[self.block].any():
            refresh = running > self.set.update_threshold or last > self.set.step_threshold
            last = self.inside(refresh)
            running = last if refresh else running + last

    # Lines 4 to 13: block entry.

    def enter(self, full):
        stop, size = self.block[-1] + 1, self.set.block_length
        reach = self.set.prefix_blocks * size, self.set.suffix_blocks * size
        self.window, self.region = rules.window(self.rows[0], stop, self.length, 0, *reach)
        rows = np.arange(self.length) if full else np.sort(np.concatenate([self.window, self.rows]))
        inputs, block_attention, output = self.forward(rows)
        self.row_token = self.tokens[self.window].copy()
        self.labels, self.anchors, self.centroids, self.counts, self.stored, self.reference = [], [], [], [], [], []
        at_window, at_block = np.searchsorted(rows, self.window), np.searchsorted(rows, self.rows)
        for layer in range(self.config.layers):
            hidden = inputs[layer][at_window]
            labels, centroids, counts = kmeans.kmeans(hidden, self.region, self.set.clusters, self.set.iterations)
            self.labels.append(labels)
            self.anchors.append(centroids.copy())  # what the codes stay relative to
            self.centroids.append(centroids.copy())  # what moves
            self.counts.append(counts)
            self.stored.append(np.array([self.code(layer, i, row) for i, row in enumerate(hidden)]))
            self.reference.append(self.proxy_attention(layer))
        self.attention = block_attention[:, at_block]
        self.past = {slot: [] for slot in self.block}
        computed = np.zeros(self.length, int)
        computed[rows] = self.config.layers
        return self.commit("full entry" if full else "window entry", output[at_block], {}, computed)

    def forward(self, rows):
        """Layer inputs, the last layer's attention `[H, R, N]`, outputs of `rows`; their keys and values are kept."""
        hidden, inputs, attention = self.model.embed(self.tokens[rows]), [], None
        for layer in range(self.config.layers):
            inputs.append(hidden)
            query, self.keys[layer, rows], self.values[layer, rows] = self.model.project(layer, hidden)
            attention, hidden = self.attend(layer, query, rows, hidden)
        return inputs, attention, hidden

    def attend(self, layer, query, rows, hidden):
        """Attention of `rows` to everything that is cached, and the layer's outputs."""
        rotated = self.model.rotate(self.keys[layer], np.arange(self.length))
        attention = self.model.attention(self.model.rotate(query, rows), rotated)
        return attention, self.model.finish(layer, hidden, self.model.weigh(attention, self.values[layer]))

    def proxy_attention(self, layer):
        """Centroids have no position: no rotation on either side, all keys."""
        query, _, _ = self.model.project(layer, self.centroids[layer])
        return self.model.attention(query, self.keys[layer])

    def code(self, layer, i, row):
        """What remains of a window row after it was stored."""
        if self.set.format == "none":
            return row
        base = self.anchors[layer][self.labels[layer][i]] if self.set.residual else 0.0
        return base + getattr(quantize, self.set.format)(row - base)[-1]

    # Lines 14 to 41: inside the block.

    def inside(self, refresh):
        hidden, selected = self.model.embed(self.tokens[self.rows]), []
        computed = np.zeros(self.length, int)
        computed[self.rows] = self.config.layers
        # Layer 0's packet: window positions whose token is not the one their row was made of.
        packet = {}
        if refresh:
            now = self.tokens[self.window]
            packet = {i: self.model.embed(now[i]) for i in range(len(now)) if now[i] != self.row_token[i]}
            self.row_token = now.copy()
        for layer in range(self.config.layers):
            if refresh:
                rows = self.patch(layer, packet)
            query, self.keys[layer, self.rows], self.values[layer, self.rows] = self.model.project(layer, hidden)
            attention, hidden = self.attend(layer, query, self.rows, hidden)
            if refresh:
                selected = self.select(layer)
                for i in packet:
                    self.stored[layer][i] = self.code(layer, i, rows[i])
                packet = self.packet(layer, selected, rows)
                computed[self.window[selected]] += 1
        # A position's drift is that of the row that predicts it.
        drifts = [rules.drift(attention[:, r], self.attention[:, r]) for r in range(len(self.rows))]
        drift = dict(zip(self.rows + self.config.shift, drifts, strict=True))
        self.attention = attention
        return self.commit("refresh" if refresh else "step", hidden, drift, computed, packet if refresh else None)

    def patch(self, layer, packet):
        """The window's rows at this layer, those of the packet below replaced: keys, values and centroids follow."""
        rows = self.stored[layer].copy()
        for i, row in packet.items():
            cluster = self.labels[layer][i]
            self.centroids[layer][cluster] += (row - rows[i]) / self.counts[layer][cluster]
            rows[i] = row
            slot = self.window[i]
            _, key, value = self.model.project(layer, row[None])
            self.keys[layer, slot], self.values[layer, slot] = key[0], value[0]
        return rows

    def select(self, layer):
        """Window rows of the clusters whose attention drifted most since the last refresh or the entry."""
        now, before = self.proxy_attention(layer), self.reference[layer]
        drifts = [rules.drift(now[:, c], before[:, c]) for c in range(self.set.clusters)]
        self.reference[layer] = now
        last = layer == self.config.layers - 1
        if last and not self.set.suffix_commit:
            return []  # nobody reads this packet
        k = self.set.selected_last if last else self.set.selected
        chosen = rules.top_clusters(drifts, self.counts[layer], k)
        ranked = rules.top_clusters(drifts, self.counts[layer], self.set.clusters)
        if 0 < len(chosen) < len(ranked):
            self.margin("cluster", drifts[chosen[-1]] - drifts[ranked[len(chosen)]])
        return [i for i in range(len(self.window)) if self.labels[layer][i] in chosen]

    def packet(self, layer, selected, rows):
        """Outputs of the selected rows; those not in the packet below bring their cached inputs, and no new keys."""
        if not selected:
            return {}
        inputs = rows[selected]
        query, _, _ = self.model.project(layer, inputs)
        _, output = self.attend(layer, query, self.window[selected], inputs)
        return dict(zip(selected, output, strict=True))

    # Section 4.2.

    def commit(self, kind, hidden, drift, computed, packet=None):
        """Commits from the block's last-layer outputs and the last packet; counts what the update schedule counts."""
        size, shift = len(self.block), self.config.shift
        token, confidence = self.predict(hidden[:size])
        eligible = self.masked[self.block]
        deltas = [rules.delta(drift[s], self.past[s], self.set.history) if drift else 0.0 for s in self.block]
        entering = not drift
        reason = rules.polestar(
            confidence, eligible, deltas, self.set.tau, self.set.alpha, entering, self.set.drift_gate
        )
        for slot in self.block if drift else []:
            self.past[slot].append(drift[slot])
        self.note_margins(confidence, eligible, deltas, entering)
        picked = [(s, t, r) for s, t, r in zip(self.block, token, reason, strict=True) if r]
        counted = sum(t != self.config.eos_id for _, t, _ in picked)
        # The suffix window's positions: from the packet's rows, the first one from the block's last row if shifted.
        ahead = {} if packet is None else dict(zip([self.block[-1] + 1], hidden[size:], strict=False))
        ahead |= {self.window[i] + shift: row for i, row in (packet or {}).items() if self.region[i] == 1}
        ahead = {slot: row for slot, row in ahead.items() if slot in self.window}
        if self.set.suffix_commit and ahead:
            token, confidence = self.predict(np.array([*ahead.values()]))
            eligible = self.masked[[*ahead]]
            reason = rules.suffix(confidence, eligible, self.set.suffix_tau)
            for c, ok in zip(confidence, eligible, strict=True):
                if ok:
                    self.margin("suffix", c - self.set.suffix_tau)
            picked += [(slot, t, r) for slot, t, r in zip(ahead, token, reason, strict=True) if r]
        for slot, t, _ in picked:
            self.tokens[slot], self.masked[slot] = t, False
        tokens, reasons = {s: t for s, t, _ in picked}, {s: r for s, _, r in picked}
        self.forwards.append(Forward(self.index, kind, tokens, reasons, drift, computed))
        return counted

    def predict(self, hidden):
        """Token and confidence of every row."""
        found = []
        for logits in self.model.logits(hidden):
            found.append(rules.predict(logits, self.config.mask_id))
            others = sorted(logit for v, logit in enumerate(logits) if v not in (self.config.mask_id, found[-1][0]))
            self.margin("token", logits[found[-1][0]] - others[-1])
        return [t for t, _ in found], [c for _, c in found]

    def note_margins(self, confidence, eligible, deltas, entering):
        able = sorted((c for c, ok in zip(confidence, eligible, strict=True) if ok), reverse=True)
        if len(able) > 1 and able[0] < self.set.tau:
            self.margin("forced", able[0] - able[1])
        for c, ok, sharp in zip(confidence, eligible, deltas, strict=True):
            if ok:
                self.margin("confidence", c - self.set.tau)
                if not entering and self.set.drift_gate and c < self.set.tau:
                    self.margin("gate", sharp - self.set.alpha * (self.set.tau - c) ** 2)
