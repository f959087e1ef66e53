"""Methods put together from the parts of two: the cache policy of one under the commit rule of the other."""

import dataclasses

from polestar_jax.block_cache import BlockCache
from polestar_jax.commit import FirstTokenAtEntry
from polestar_jax.decode import lacking_signals
from polestar_jax.no_cache import NoCache
from polestar_jax.types import Method


def combine(cache_from: Method, rule_from: Method) -> Method:
    """The cache policy of `cache_from` with the commit rule, the block schedule and the sampler of `rule_from`.

    Schedule and sampler go with the rule: they say what a forward may commit (SlowFast and AdaBlock are schedules).
    Fast-dLLM's habit for a block's first token goes with the cache, whose forwards it makes up for.

    Raises:
      ValueError: if the rule reads signals that the cache policy does not give, or the two disagree on guidance, or the
        cache policy is one that guidance was not made for.
    """
    name = f"{cache_from.name}+{rule_from.name}"
    rule = rule_from.rule.rule if isinstance(rule_from.rule, FirstTokenAtEntry) else rule_from.rule
    if isinstance(cache_from.cache, BlockCache) and cache_from.cache.first_token == "entry":
        rule = FirstTokenAtEntry(rule)
    scales = [method.guidance for method in (cache_from, rule_from) if method.guidance is not None]
    if len(scales) == 2 and scales[0] != scales[1]:
        raise ValueError(f"{name}: guidance={scales[0]} and guidance={scales[1]} disagree; give one")
    if scales and not isinstance(cache_from.cache, (NoCache, BlockCache)):
        raise ValueError(
            f"{name}: guidance={scales[0]} runs without a cache or with Fast-dLLM's, not with"
            f" {type(cache_from.cache).__name__}"
        )
    combined = dataclasses.replace(
        rule_from, name=name, cache=cache_from.cache, rule=rule, guidance=scales[0] if scales else None
    )
    if lacking := lacking_signals(combined):
        raise ValueError(
            f"{name}: the commit rule of {rule_from.name} needs {', '.join(sorted(lacking))}, which the cache policy of"
            f" {cache_from.name} does not give"
        )
    return combined
