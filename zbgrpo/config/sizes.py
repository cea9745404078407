"""Bytes that a configuration implies."""

from __future__ import annotations

from zbgrpo.config.schema import RunConfig

_GIB = 1 << 30
_RECORD_OVERHEAD_BYTES = 128  # the header of a ring record, and its padding


def max_group_bytes(config: RunConfig) -> int:
    """Most that one group takes in the ring: ids int32, log-probs float32, per response 20 bytes of scores and one span
    of 12 bytes for each version that it may have been sampled with, and the overhead of a record."""
    responses, tokens = config.inference.num_generations, config.inference.max_new_tokens
    versions = config.ledger.max_staleness + config.ledger.max_token_lag + 1
    payload = 4 * config.data.max_prompt_tokens + responses * (8 * tokens + 20 + 12 * versions)
    return payload + _RECORD_OVERHEAD_BYTES


def ring_bytes(config: RunConfig) -> int:
    """Shared memory of one consumer node: as set, or four minibatches of largest groups, at most 1 GiB or one
    minibatch, whichever is larger."""
    minibatch = config.groups_per_minibatch * max_group_bytes(config)
    return config.transport.ring_bytes or min(4 * minibatch, max(_GIB, minibatch))
