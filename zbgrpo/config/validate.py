"""Checks that need more than one setting. Bounds of single settings are the schema's.

Every message begins with the flags that are wrong, shows the numbers and says what to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from zbgrpo.config import fields
from zbgrpo.config.flags import label
from zbgrpo.config.schema import RunConfig
from zbgrpo.config.sizes import max_group_bytes
from zbgrpo.errors import ConfigError

REWARD_TYPES = ("think_answer_tags", "boxed", "code")
"""Reward types that come with the package; any other is the path of a user's function."""

_USER_FUNCTION = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")

MIN_TEMPERATURE = 0.01
"""Below it, logits / temperature of ordinary models leave the range in which log-probs are exact enough to train on."""


MIN_CODE_MEMORY_BYTES = 64 * 1024**2


def validate(config: RunConfig, world_size: int | None) -> list[str]:
    """Checks a resolved configuration and returns warnings, one line each.

    `world_size` None leaves out the check of the world. Raises ConfigError at the first check that fails.
    """
    for check in (
        _check_project,
        _check_reward_type,
        _check_sandbox,
        _check_evaluation,
        _check_mesh,
        _check_batches,
        _check_buffer,
        _check_ring,
        _check_sampling,
        _check_engine,
        _check_filter,
        _check_loss,
        _check_timeouts,
    ):
        check(config)
    if world_size is not None:
        _check_world(config, world_size)
    return list(_warnings(config))


def _check_project(config: RunConfig) -> None:
    name = config.project
    if name.strip() in ("", ".", "..") or any(character in name for character in "/\\\0\n"):
        raise ConfigError(f"{label('project')}: {name!r} cannot name a folder; use one word without slashes")


def _check_evaluation(config: RunConfig) -> None:
    for task in config.evaluation.datasets:
        if task.strip() in ("", ".", "..") or any(character in task for character in "/\\\0\n"):
            raise ConfigError(f"{label('evaluation.datasets')}: task {task!r} cannot name a folder; use one word")


def _check_reward_type(config: RunConfig) -> None:
    kind = config.reward.type
    if kind in REWARD_TYPES or _USER_FUNCTION.fullmatch(kind):
        return
    close = fields.nearest(kind, REWARD_TYPES)
    hint = f"; did you mean {close}?" if close else ""
    raise ConfigError(
        f"{label('reward.type')}: {kind!r} is none of {', '.join(REWARD_TYPES)}, module:function, "
        f"file.py:function{hint}"
    )


def _check_sandbox(config: RunConfig) -> None:
    url, name = config.reward.code_sandbox_url, label("reward.code_sandbox_url")
    if config.reward.code_memory_bytes < MIN_CODE_MEMORY_BYTES:
        raise ConfigError(
            f"reward.code_memory_bytes: {config.reward.code_memory_bytes} bytes are too few for a Python interpreter; "
            f"use {MIN_CODE_MEMORY_BYTES} or more"
        )
    if url is None:
        return
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
        raise ConfigError(f"{name}: {url!r} is no http:// or https:// address")
    if config.reward.type != "code":
        raise ConfigError(
            f"{name}: {label('reward.type')} {config.reward.type} runs no programs; use {label('reward.type')} code, "
            "or leave the address out"
        )


def _check_mesh(config: RunConfig) -> None:
    trainers, trainer = config.cluster.num_trainers, config.trainer
    model_ranks = trainer.tensor_parallel_size * trainer.pipeline_parallel_size
    if trainers is not None and trainers % model_ranks:
        raise ConfigError(
            f"{label('cluster.num_trainers')}: {trainers} cannot be split into groups of {model_ranks} = "
            f"{trainer.tensor_parallel_size} ({label('trainer.tensor_parallel_size')}) x "
            f"{trainer.pipeline_parallel_size} ({label('trainer.pipeline_parallel_size')}); use a multiple of "
            f"{model_ranks}"
        )
    if trainer.liger_kernels and (trainer.tensor_parallel_size > 1 or trainer.backend != "torch"):
        raise ConfigError(
            f"{label('trainer.liger_kernels')}: only with {label('trainer.backend')} torch and without tensor "
            "parallelism; leave it off"
        )


def _check_world(config: RunConfig, world_size: int) -> None:
    cluster = config.cluster
    if config.world_size != world_size:
        trainers, inferencer, ptp = (
            label(f"cluster.{key}") for key in ("num_trainers", "num_inferencer", "producer_tensor_parallel_size")
        )
        raise ConfigError(
            f"{trainers}, {inferencer}: {cluster.num_trainers} trainers + {cluster.num_inferencer} inferencers x "
            f"{cluster.producer_tensor_parallel_size} ranks ({ptp}) = {config.world_size} ranks, but the world has "
            f"{world_size}; start {config.world_size} processes or change the flags"
        )


def _check_batches(config: RunConfig) -> None:
    trainer, inference = config.trainer, config.inference
    tbs, minibatch, microbatch = trainer.train_batch_size, trainer.train_minibatch_size, trainer.train_microbatch_size
    group_size = inference.num_generations
    if group_size < 2:
        raise ConfigError(
            f"{label('inference.num_generations')}: {group_size} response per prompt has nothing to be compared with, "
            f"so that every advantage is 0; use 2 or more"
        )
    if minibatch > tbs or tbs % minibatch:
        raise ConfigError(
            f"{label('trainer.train_minibatch_size')}: {minibatch} does not divide {tbs} "
            f"({label('trainer.train_batch_size')}); use a divisor of {tbs}"
        )
    if minibatch * group_size < microbatch:
        raise ConfigError(
            f"{label('trainer.train_microbatch_size')}: a minibatch has {minibatch} x {group_size} = "
            f"{minibatch * group_size} responses ({label('trainer.train_minibatch_size')} x "
            f"{label('inference.num_generations')}), fewer than one microbatch of {microbatch}; lower it"
        )
    held, decoded = inference.inference_batch_size, inference.inference_microbatch_size
    if held % decoded:
        raise ConfigError(
            f"{label('inference.inference_batch_size')}: {held} is not a multiple of {decoded} "
            f"({label('inference.inference_microbatch_size')}); use a multiple of {decoded}"
        )


def _check_buffer(config: RunConfig) -> None:
    limit, needed = config.ledger.buffer_limit, config.groups_per_minibatch
    if 0 < limit < needed:
        raise ConfigError(
            f"{label('ledger.buffer_limit')}: a buffer of {limit} groups never holds a minibatch of {needed} = "
            f"{config.trainer.train_minibatch_size} ({label('trainer.train_minibatch_size')}) x {config.dp_size} "
            f"(data-parallel size); use {needed} or more, or leave it out"
        )


def _check_ring(config: RunConfig) -> None:
    size, needed = config.transport.ring_bytes, max_group_bytes(config)
    if 0 < size < needed:
        raise ConfigError(
            f"{label('transport.ring_bytes')}: a ring of {size} bytes cannot hold one group of largest size, which "
            f"takes {needed}; use more, or 0 to have it computed"
        )


def _check_sampling(config: RunConfig) -> None:
    for key in ("temperature", "temperature_end"):
        value = getattr(config.inference, key)
        if value is not None and value < MIN_TEMPERATURE:
            raise ConfigError(
                f"{label(f'inference.{key}')}: {value} is too cold to train at; use {MIN_TEMPERATURE} or more "
                f"(evaluation.temperature=0 evaluates greedily)"
            )
    if config.inference.stop is not None and "" in config.inference.stop:
        raise ConfigError(
            f"{label('inference.stop')}: an empty stop string would end every response at once; remove it"
        )


def _check_engine(config: RunConfig) -> None:
    inference, ptp = config.inference, config.cluster.producer_tensor_parallel_size
    if inference.backend != "vllm":
        if ptp > 1:
            raise ConfigError(
                f"{label('cluster.producer_tensor_parallel_size')}: {ptp} ranks per producer need "
                f"{label('inference.backend')} vllm; the transformers engine works on one"
            )
        return
    # vLLM's processed log-probs are of the truncated distribution, its raw ones of temperature 1.
    truncated = [key for key, off in (("top_k", None), ("top_p", 1.0)) if getattr(inference, key) != off]
    heats = {inference.temperature, inference.temperature_end or inference.temperature}
    if truncated and heats != {1.0}:
        names = " and ".join(label(f"inference.{key}") for key in truncated)
        raise ConfigError(
            f"{names}: at another temperature than 1 vLLM has no log-probs of the full distribution; use "
            f"{label('inference.temperature')} 1, leave the truncation out, or use {label('inference.backend')} "
            "transformers"
        )


def _check_filter(config: RunConfig) -> None:
    low, high = config.algorithm.filter_range
    name, size = label("algorithm.filter_range"), config.inference.num_generations
    if not 0 <= low < high <= 1:
        raise ConfigError(f"{name}: [{low}, {high}] is no interval within 0 and 1; use a lower and a higher bound")
    own_function = config.reward.type not in REWARD_TYPES  # may score with fractions
    possible = own_function or any(low < right / size < high for right in range(size + 1))
    if config.algorithm.dynamic_batching and not possible:
        raise ConfigError(
            f"{name}: no group of {size} responses ({label('inference.num_generations')}) has an accuracy strictly "
            f"between {low} and {high}, so that every group would be left out; widen it"
        )


def _check_loss(config: RunConfig) -> None:
    algorithm, longest = config.algorithm, config.inference.max_new_tokens
    if algorithm.clip_low is not None and algorithm.clip_low > 1:
        raise ConfigError(
            f"{label('algorithm.clip_low')}: {algorithm.clip_low} puts the lower clip below a ratio of 0; use at most 1"
        )
    if algorithm.skip_threshold <= 1:
        raise ConfigError(
            f"{label('algorithm.skip_threshold')}: {algorithm.skip_threshold} would leave out responses whose ratio is "
            f"1, the normal case; use more than 1"
        )
    if algorithm.overlong_cache_tokens is not None and algorithm.overlong_cache_tokens > longest:
        raise ConfigError(
            f"{label('algorithm.overlong_cache_tokens')}: {algorithm.overlong_cache_tokens} tokens are more than a "
            f"response may have, {longest} ({label('inference.max_new_tokens')}); lower it"
        )


def _check_timeouts(config: RunConfig) -> None:
    transport = config.transport
    if transport.peer_timeout_seconds < 2 * transport.heartbeat_seconds:
        raise ConfigError(
            f"{label('transport.peer_timeout_seconds')}: {transport.peer_timeout_seconds} s are less than two "
            f"heartbeats of {transport.heartbeat_seconds} s (transport.heartbeat_seconds), so that a living "
            f"peer would count as lost"
        )


def groups_in_flight(config: RunConfig) -> int:
    """Most groups that are leased at the same time: producers x leases that each may hold."""
    return (config.cluster.num_inferencer or 0) * config.inference.inference_batch_size


def staleness_for_no_bubble(config: RunConfig) -> int:
    """Smallest max_staleness at which no consumer waits because generation may not start: groups in flight / S + 1."""
    return math.ceil(groups_in_flight(config) / max(1, config.groups_per_step)) + 1


def staleness_hint(config: RunConfig) -> str | None:
    """What to change so that consumers need not wait for leases; None when nothing (or in the synchronous mode)."""
    staleness, needed = config.ledger.max_staleness, staleness_for_no_bubble(config)
    if staleness == 0 or staleness >= needed:
        return None
    return (
        f"{label('ledger.max_staleness')}: with up to {groups_in_flight(config)} groups in flight and "
        f"{config.groups_per_step} groups per step, consumers may wait at {staleness}; use {needed}, or fewer leases "
        f"per producer ({label('inference.inference_batch_size')})"
    )


def _warnings(config: RunConfig) -> Iterator[str]:
    generated, needed = groups_in_flight(config), config.groups_per_step
    if generated % needed:
        yield (
            f"{label('inference.inference_batch_size')}: {config.inference.inference_batch_size} x "
            f"{config.cluster.num_inferencer} producers = {generated} prompts are no multiple of {needed} = "
            f"{config.trainer.train_batch_size} ({label('trainer.train_batch_size')}) x {config.dp_size} "
            f"(data-parallel size); nothing is lost, but steps will not coincide with rounds of generation"
        )
    hint = staleness_hint(config)
    if hint:
        yield hint
    ledger = config.ledger
    if ledger.max_token_lag < ledger.max_staleness:
        yield (
            f"{label('ledger.max_token_lag')}: {ledger.max_token_lag} is below {ledger.max_staleness} "
            f"({label('ledger.max_staleness')}), so that tokens of groups that arrive in turn are left out of the loss"
        )
    truncated = [key for key, off in (("top_k", None), ("top_p", 1.0)) if getattr(config.inference, key) != off]
    if truncated:
        names = " and ".join(label(f"inference.{key}") for key in truncated)
        yield (
            f"{names}: sampling leaves tokens out while training uses log-probs of the full softmax; the gradient is "
            f"that of another distribution than the one sampled from"
        )
