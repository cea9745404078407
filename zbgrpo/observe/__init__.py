"""What a run shows and leaves behind: time ledger, event logs, metrics, rollout samples, progress, summary.

Torch, rich, tensorboard and wandb are imported only where a run asks for what needs them.
"""
