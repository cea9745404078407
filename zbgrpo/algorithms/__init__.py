"""The mathematics of GRPO and DAPO: pure functions on tensors, without state, processes or configuration sections.

    rewards of a group ──> advantages.group_advantages ──┐
    answers of a group ──> filters.is_effective          ├──> losses.policy_loss ──> sums ──> divided once per step
    hidden states ───────> logprobs.token_logprobs ──────┘

Everything a loss returns is a sum, so that microbatches and data-parallel ranks add up to the same figure however the
responses were split among them.
"""
