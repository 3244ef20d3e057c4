"""How fast each worker is, learned from what came of its requests. Pure; times in seconds.

Three linear models a worker, each fitted online by a robust recursive least squares (`Fit`):

    prefill    base + tokens x per_token + pairs x per_pair     queue included: tokens and pairs of all that is ahead
    decode     base + requests x per_request + blocks x per_block            one step: the inter-token time
    transfer   base + tokens x per_token        from the end of a remote prefill to decode's first token

A *pair* is a prompt token with one before it that it attends to: what makes the second half of a long prompt slower.
A worker that has not been measured is taken to be the median of those of its kind that have; where none has, to be a
GPU of today (the `_UNMEASURED` constants). All workers are then equally fast, and only their queues differ.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import median

from kvcache.events import Tier

__all__ = ["Fit", "Timing", "Timings", "pairs_of"]

_FORGET = 0.98
"""Weight of a sample against the one after it: about the last fifty count."""
_CLIP = 3.0
"""Residuals beyond this many usual ones are cut: one stalled request must not make a worker slow."""
_CHANGED_AFTER = 6
"""So many residuals in a row, all large and on one side, are no outliers: the worker has changed."""
_LEAST_S = 0.002
"""Times are fitted relative to their size, those below this absolutely."""
_MEDIAN_EVERY = 16
"""Samples of one kind of worker between two medians of them."""

_UNMEASURED_PREFILL = (0.01, 5e-5, 0.0)
_UNMEASURED_DECODE = (0.01, 5e-5, 0.0)
_UNMEASURED_TRANSFER = (0.01, 3e-6)
_PREFILL_UNITS = (1.0, 1e4, 1e8)
_DECODE_UNITS = (1.0, 1e2, 1e4)
_TRANSFER_UNITS = (1.0, 1e4)
"""What the inputs are divided by, so that all are about one."""

_UNMEASURED_TIERS = {Tier.DEVICE: 0.0, Tier.HOST: 0.1, Tier.PEER: 0.3, Tier.DISK: 0.4}
"""Load time of a block over the time to compute it, until it is measured: PCIe, a 100 Gbit/s network, NVMe against a
dense 8B model."""


def pairs_of(uncached_tokens: int, prompt_tokens: int) -> float:
    """Pairs to compute for the last so many tokens of a prompt."""
    return uncached_tokens * (prompt_tokens - 0.5 * uncached_tokens)


class Fit:
    """Robust recursive least squares of y on a few inputs, with forgetting, no coefficient below 0.

    A sample is divided by the predicted y, so residuals are relative; those beyond `_CLIP` usual ones are cut (Huber).
    A run of large ones on one side says that the truth has moved: then what was learned loses its weight.
    """

    __slots__ = ("_covariance", "_run", "_units", "samples", "spread", "weights")

    def __init__(self, units: Sequence[float], prior: Sequence[float]) -> None:
        self._units = units
        self.weights = [value * unit for value, unit in zip(prior, units, strict=True)]
        self.samples = 0
        self.spread = 0.3
        """The usual relative residual."""
        self._run = 0
        """Large residuals in a row; negative: on the low side."""
        self._covariance = self._initial()

    def _initial(self) -> list[list[float]]:
        """What is known is believed within its own size, and what is not to be up to a tenth of a second."""
        size = len(self.weights)
        return [
            [max(self.weights[row], 0.1) ** 2 if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]

    @property
    def coefficients(self) -> list[float]:
        """In the inputs' own units."""
        return [weight / unit for weight, unit in zip(self.weights, self._units, strict=True)]

    def learn(self, inputs: Sequence[float], y: float) -> None:
        """One sample. What is not a positive number is ignored."""
        if not (math.isfinite(y) and y > 0 and all(map(math.isfinite, inputs))):
            return
        x = [value / unit for value, unit in zip(inputs, self._units, strict=True)]
        predicted = sum(weight * value for weight, value in zip(self.weights, x, strict=True))
        scale = max(predicted, _LEAST_S, 0.1 * y)
        x = [value / scale for value in x]
        residual = (y - predicted) / scale
        self._watch(residual)
        limit = _CLIP * self.spread
        clipped = min(max(residual, -limit), limit)
        self.spread += 0.05 * (min(abs(residual), 2 * limit) - self.spread)
        self.spread = max(self.spread, 0.01)
        self._update(x, clipped)
        self.samples += 1

    def _watch(self, residual: float) -> None:
        side = 1 if residual > 2 * self.spread else -1 if residual < -2 * self.spread else 0
        self._run = self._run + side if side and side * self._run >= 0 else side
        if abs(self._run) >= _CHANGED_AFTER:
            self._run = 0
            self.spread = max(self.spread, abs(residual) / _CLIP)
            self._covariance = self._initial()

    def _update(self, x: list[float], residual: float) -> None:
        covariance = self._covariance
        gains = [sum(map(float.__mul__, row, x)) for row in covariance]
        total = _FORGET + sum(map(float.__mul__, gains, x))
        for at, gain in enumerate(gains):
            self.weights[at] = max(0.0, self.weights[at] + gain / total * residual)
        # Without new directions in the samples, forgetting alone would let the covariance grow without bound.
        forget = _FORGET if max(covariance[at][at] for at in range(len(x))) < 10.0 else 1.0
        for row, gain in zip(covariance, gains, strict=True):
            for column, other in enumerate(gains):
                row[column] = (row[column] - gain * other / total) / forget


class Timing:
    """One worker's speed. The public numbers are always valid, and change as it learns."""

    __slots__ = (
        "_decode", "_kind", "_prefill", "_transfer", "base", "per_pair", "per_token",
        "step_base", "step_per_block", "step_per_request", "transfer_base", "transfer_per_token",
    )  # fmt: skip

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self._prefill: Fit | None = None
        self._decode: Fit | None = None
        self._transfer: Fit | None = None
        self.take_prior()

    def take_prior(self) -> None:
        """Takes the median of its kind for what was not measured here."""
        kind = self._kind
        self.base, self.per_token, self.per_pair = self._prefill.coefficients if self._prefill else kind.prefill
        self.step_base, self.step_per_request, self.step_per_block = (
            self._decode.coefficients if self._decode else kind.decode
        )
        self.transfer_base, self.transfer_per_token = self._transfer.coefficients if self._transfer else kind.transfer

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Time to compute so much, one after the other."""
        return self.base + tokens * self.per_token + pairs * self.per_pair

    def step_s(self, requests: float, blocks: float) -> float:
        """Time between two tokens of an answer."""
        return self.step_base + requests * self.step_per_request + blocks * self.step_per_block

    def transfer_s(self, tokens: float) -> float:
        """Time for so many tokens' KV to come, and decode's first step."""
        return self.transfer_base + tokens * self.transfer_per_token

    @property
    def is_measured(self) -> bool:
        """Whether this worker's prefill time, or that of one of its kind, has been seen."""
        return self._prefill is not None or self._kind.is_measured

    def learn_prefill(self, tokens: float, pairs: float, seconds: float) -> None:
        """From its arrival to its end, with `tokens` and `pairs` those of the queue ahead and its own."""
        if self._prefill is None:
            self._prefill = Fit(_PREFILL_UNITS, self._kind.prefill)
        self._prefill.learn((1.0, tokens, pairs), seconds)
        self.base, self.per_token, self.per_pair = self._prefill.coefficients
        self._kind.sampled()

    def learn_step(self, requests: float, blocks: float, seconds: float) -> None:
        """A step in which nothing but decoding was done."""
        if self._decode is None:
            self._decode = Fit(_DECODE_UNITS, self._kind.decode)
        self._decode.learn((1.0, requests, blocks), seconds)
        self.step_base, self.step_per_request, self.step_per_block = self._decode.coefficients
        self._kind.sampled()

    def learn_transfer(self, tokens: float, seconds: float) -> None:
        """From the end of a remote prefill to this worker's first token."""
        if self._transfer is None:
            self._transfer = Fit(_TRANSFER_UNITS, self._kind.transfer)
        self._transfer.learn((1.0, tokens), seconds)
        self.transfer_base, self.transfer_per_token = self._transfer.coefficients
        self._kind.sampled()

    def learn_load(self, tier: Tier, tokens: int, seconds: float) -> None:
        """So many tokens' KV came from a slower tier in this time."""
        self._kind.learn_load(tier, seconds / max(tokens, 1))

    def tier_weight(self, tier: Tier) -> float:
        """What a block in this tier is worth against one in the engine's own memory: 1 - load time / compute time."""
        return self._kind.tier_weight(tier, self.per_token)


class _Kind:
    """Workers of one model."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self.prefill: Sequence[float] = _UNMEASURED_PREFILL
        self.decode: Sequence[float] = _UNMEASURED_DECODE
        self.transfer: Sequence[float] = _UNMEASURED_TRANSFER
        self._loads: dict[Tier, float] = {}
        self._since_median = 0

    @property
    def is_measured(self) -> bool:
        return self.prefill is not _UNMEASURED_PREFILL

    def sampled(self) -> None:
        """Now and then, and after the very first sample, those without any follow the others."""
        self._since_median += 1
        if self.is_measured and self._since_median < _MEDIAN_EVERY:
            return
        self._since_median = 0
        self.prefill = _median([one._prefill for one in self.timings], self.prefill)
        self.decode = _median([one._decode for one in self.timings], self.decode)
        self.transfer = _median([one._transfer for one in self.timings], self.transfer)
        for one in self.timings:
            one.take_prior()

    def learn_load(self, tier: Tier, per_token: float) -> None:
        if math.isfinite(per_token) and per_token >= 0:
            known = self._loads.get(tier, per_token)
            self._loads[tier] = known + 0.1 * (min(per_token, 3 * known) - known)

    def tier_weight(self, tier: Tier, compute_per_token: float) -> float:
        measured = self._loads.get(tier)
        if measured is None or tier is Tier.DEVICE or not compute_per_token:
            return 1.0 - _UNMEASURED_TIERS[tier]
        return min(max(1.0 - measured / compute_per_token, 0.0), 1.0)


class Timings:
    """Every worker's timing. One that has gone is forgotten, its kind is not."""

    def __init__(self) -> None:
        self._timings: dict[str, Timing] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        self.generation = 0
        """Grows when a worker's timing becomes another object."""

    def of(self, instance_id: str, kind: Hashable) -> Timing:
        """Of this worker, made when asked for first. Workers of one kind are expected to be equally fast."""
        timing = self._timings.get(instance_id)
        if timing is None:
            fellows = self._kinds.setdefault(kind, _Kind())
            timing = self._timings[instance_id] = Timing(fellows)
            fellows.timings.append(timing)
        return timing

    def known(self, instance_id: str) -> Timing | None:
        """Of a worker that was asked for before."""
        return self._timings.get(instance_id)

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or has begun anew: perhaps on other hardware."""
        timing = self._timings.pop(instance_id, None)
        if timing is not None:
            timing._kind.timings.remove(timing)
            self.generation += 1


def _median(fits: Sequence[Fit | None], otherwise: Sequence[float]) -> Sequence[float]:
    known = [fit.coefficients for fit in fits if fit is not None]
    return [median(column) for column in zip(*known, strict=True)] if known else otherwise
