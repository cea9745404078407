"""Every setting of a run, by section. A component receives its own section, never the root.

The comment under a field is its documentation; the flag that sets it is named there. Fields that a preset or another
field decides are None until `zbgrpo.config.load.resolve` has filled them in.
"""

from __future__ import annotations

from typing import Annotated, Literal, Optional

from msgspec import Meta, Struct, field

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, by keyword, strict about unknown keys."""


class ModelConfig(Section, frozen=True, kw_only=True):
    path: str = "Qwen/Qwen2.5-7B"
    """Folder or hub name of the model that is trained (-m)."""
    tokenizer_path: Optional[str] = None
    """Folder or hub name of the tokenizer (--tokenizer-path); the model's when left out."""


class DataConfig(Section, frozen=True, kw_only=True):
    path: str = "data.jsonl"
    """Training file (-d): JSON Lines (.gz too), parquet, or a Hugging Face data set name."""
    num_episodes: Positive = 1
    """Passes over the data (-e)."""
    max_prompt_tokens: Positive = 512
    """Prompts longer than this, counted on the templated ids, are dropped and counted (-mpt)."""
    system_prompt: Optional[str] = None
    """System message (-s); by reward type when left out; an empty string means none."""
    skip_bad_rows: bool = False
    """Count and skip rows that cannot be used instead of stopping at the first (--skip-bad-rows)."""


class ClusterConfig(Section, frozen=True, kw_only=True):
    num_trainers: Optional[Positive] = None
    """Consumer ranks (-t); 2, or half of the world when -t and -i are both left out."""
    num_inferencer: Optional[Positive] = None
    """Producers (-i); 2, or half of the world when -t and -i are both left out."""
    producer_tensor_parallel_size: Positive = 1
    """Ranks that make up one producer (-ptp)."""
    consumer_python: Optional[str] = None
    """Interpreter that consumers run under (--consumer-python)."""
    memory_gib: Optional[PositiveFloat] = None
    """Memory of a rank's device, in GiB; --dry-run says what does not fit into it."""
    threads_per_rank: Optional[Positive] = None
    """CPU threads of each rank; the cores of the node shared among its ranks when left out."""
    timeout_seconds: PositiveFloat = 600.0
    """How long one rank waits for another at start-up and in a collective before the run ends with an error."""
    progress_timeout_seconds: PositiveFloat = 1800.0
    """How long the main loop of a rank may take for one turn (a minibatch, a save) before the run ends."""
    exit_timeout_seconds: PositiveFloat = 5.0
    """How long a rank may take to end by itself once its run has failed; then it is ended, wherever it is stuck."""


class InferenceConfig(Section, frozen=True, kw_only=True):
    backend: Literal["transformers", "vllm"] = "transformers"
    """Engine that generates (-b)."""
    num_generations: Positive = 8
    """Responses per prompt, G (-g)."""
    inference_batch_size: Positive = 64
    """Most leases, in prompts, that one producer holds (-ibs)."""
    inference_microbatch_size: Positive = 8
    """Prompts decoded together by one producer (-imbs): it has imbs x G decode slots."""
    max_new_tokens: Positive = 3584
    """Most tokens of a response (-mnt)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature (-temp)."""
    temperature_end: Optional[PositiveFloat] = None
    """When set, the temperature goes linearly from `temperature` to this over the first episode."""
    top_k: Optional[Positive] = None
    """Sample among the k most likely tokens only (-topk); none means no truncation."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample within this probability mass only (-topp)."""
    stop: Optional[list[str]] = None
    """Strings that end a response and stay in its text; by reward type when left out."""


class VllmConfig(Section, frozen=True, kw_only=True):
    """With inference.backend vllm only."""

    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.7
    """Part of a GPU's memory that vLLM may take; not used on a CPU."""
    kv_cache_bytes: Optional[Positive] = None
    """Memory of each worker for keys and values; when left out, what gpu_memory_utilization leaves, and on a CPU what
    all slots can use at once, at most 4 GiB."""
    enable_chunked_prefill: bool = True
    """Prompts may be computed in parts; never on a CPU."""
    enforce_eager: Optional[bool] = None
    """Without compilation and graphs; when left out, on a CPU only."""
    running_cache: Literal["keep", "recompute"] = "keep"
    """Keys and values of responses being decoded when weights change: keep them, or compute them again."""
    compare_digests: bool = False
    """Workers check the weights that they have read after every update; with several workers they always do."""
    start_timeout_seconds: PositiveFloat = 900.0
    """Longest time that an engine may take to start."""
    update_timeout_seconds: PositiveFloat = 300.0
    """Longest time that one update of the weights may take."""
    max_restarts: NonNegative = 3
    """How often in a row, without a response in between, an engine that died is made again."""


class RewardConfig(Section, frozen=True, kw_only=True):
    type: str = "think_answer_tags"
    """think_answer_tags, boxed, code or module:function (-rt)."""
    num_workers: Positive = 2
    """Scoring processes of each producer."""
    time_limit_seconds: PositiveFloat = 10.0
    """Most time that scoring one response may take; after it the response scores 0 and the worker is replaced."""
    min_isolation: Annotated[int, Meta(ge=0, le=2)] = 1
    """Least isolation under which programs are run (code): 0 limits only, 1 kernel filters too, 2 namespaces too."""
    allow_unsafe_code: bool = False
    """Run programs below min_isolation all the same, with a warning."""
    code_memory_bytes: Positive = 1024**3
    """Memory of one program and everything that it starts (code)."""
    code_sandbox_url: Optional[str] = None
    """Run programs in a remote sandbox instead (--code-sandbox-url): the address of its run_code endpoint."""


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    name: Literal["GRPO", "DAPO"] = "GRPO"
    """Preset (-a). Every field below that is None takes the preset's value."""
    clip_low: Optional[NonNegativeFloat] = None
    """Lower clip distance of the ratio: 0.2 in both presets."""
    clip_high: Optional[NonNegativeFloat] = None
    """Upper clip distance of the ratio: 0.2 (GRPO), 0.28 (DAPO)."""
    loss: Optional[Literal["response_mean", "token_mean"]] = None
    """Mean over tokens of a response, then over responses (GRPO); or sum over tokens by number of tokens (DAPO)."""
    kl_coeff: Optional[NonNegativeFloat] = None
    """Weight of the k3 KL to the reference model (-kl): 0.01 (GRPO), 0 (DAPO); 0 loads no reference model."""
    dynamic_batching: Optional[bool] = None
    """Leave out groups whose mean ans_acc is not strictly inside filter_range: off (GRPO), on (DAPO)."""
    filter_range: tuple[float, float] = (0.01, 0.99)
    """Open interval of the mean answer accuracy of a group that is kept when dynamic_batching is on."""
    mask_truncated: Optional[bool] = None
    """Leave truncated responses out of numerator and denominator: off (GRPO), on (DAPO)."""
    overlong_penalty: Optional[bool] = None
    """Soft penalty for responses near max_new_tokens: off (GRPO), on (DAPO)."""
    overlong_cache_tokens: Optional[Positive] = None
    """Length of the ramp of that penalty: min(1024, max_new_tokens // 4)."""
    skip_threshold: PositiveFloat = 20.0
    """A response with a token ratio above this is left out of the loss and counted."""


class LedgerConfig(Section, frozen=True, kw_only=True):
    max_staleness: NonNegative = 2
    """How many versions ahead of the trained one generation may start (--max-staleness); 0 is synchronous."""
    max_token_lag: NonNegative = 8
    """A token older than this, in versions, when it is trained is left out of the loss (--max-token-lag)."""
    stale: Literal["mask", "wait"] = "mask"
    """mask: nobody waits for slow responses; wait: no group trains with a lag above max_staleness (--stale)."""
    buffer_limit: int = -1
    """Groups in the hub's buffer (-cbsl); not positive = 2 x tMbs x dp_size."""
    max_steps: Optional[Positive] = None
    """Optimizer steps after which the run ends (--max-steps), if the data lasts."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    backend: Literal["torch", "colossalai"] = "torch"
    """Library that trains (--trainer)."""
    train_batch_size: Positive = 32
    """Prompts per optimizer step and dp group, tbs (-tbs)."""
    train_minibatch_size: Positive = 8
    """Prompts per minibatch and dp group, tMbs (-tMbs)."""
    train_microbatch_size: Positive = 2
    """Responses per forward and backward pass, tmbs (-tmbs)."""
    tensor_parallel_size: Positive = 1
    """-tp"""
    pipeline_parallel_size: Positive = 1
    """-pp"""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 0
    """-zero"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 with float32 master weights, or fp32 throughout (--precision). Both roles use it."""
    learning_rate: NonNegativeFloat = 1e-6
    """-lr"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """cosine: down to 0.1 of the learning rate over min(episodes, 4) x rows // S steps, then constant."""
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload_optimizer: bool = False
    """Keep master weights and optimizer state in the memory of the host, where the update is made too."""
    offload_reference: bool = False
    """Keep the reference model in the memory of the host between its forward passes."""
    attention: Literal["auto", "sdpa", "flash", "flex"] = "auto"
    """Kernels of the torch trainer's attention: flash (flash-attn), flex (FlexAttention), sdpa; auto is flash where it
    can be used, else sdpa."""
    liger_kernels: bool = False
    """Norms, rotary embedding and activation by Liger's kernels (torch trainer, GPU, no tensor parallelism)."""
    logprob_chunk_tokens: Positive = 256
    """Tokens whose logits exist at the same time."""


class TransportConfig(Section, frozen=True, kw_only=True):
    ring_bytes: NonNegative = 0
    """Size of a node's shared-memory ring; 0 = what four minibatches of largest groups need, at most 1 GiB or one
    minibatch, whichever is larger."""
    heartbeat_seconds: PositiveFloat = 2.0
    """Interval of the heartbeats between a rank and the hub."""
    peer_timeout_seconds: PositiveFloat = 45.0
    """Silence after which a peer counts as lost and the run ends."""
    resend_seconds: PositiveFloat = 5.0
    """A message without an acknowledgement is sent again after this time."""
    security: Literal["auto", "none", "curve"] = "auto"
    """auto: CURVE as soon as more than one node takes part."""


class WeightsConfig(Section, frozen=True, kw_only=True):
    transport: Literal["auto", "nccl", "ipc", "gloo"] = "auto"
    """How weights travel (--weight-transport)."""
    staging: Literal["device", "cpu"] = "device"
    """Where the snapshot of a version waits for its broadcast (--weight-staging)."""
    bucket_bytes: Positive = 32 * 1024 * 1024
    """Size of one broadcast."""
    timeout_seconds: PositiveFloat = 300.0
    """Longest time one broadcast of a version may take."""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    save_interval: Positive = 100
    """Optimizer steps between two saves (-si); the last step is always saved."""
    save_dir: str = "./model"
    """-sd; the project's name is added."""
    resume: str = "auto"
    """auto: from the newest complete state, else from the start; never; or a state folder (--resume)."""
    keep_states: Positive = 2
    """Newest states that are kept; older ones are removed once a newer one is complete. Model folders all stay."""


class EvaluationConfig(Section, frozen=True, kw_only=True):
    datasets: dict[str, str] = field(default_factory=dict)
    """Evaluation sets, name to path (-ed)."""
    interval: Positive = 100
    """Optimizer steps between two evaluations (-ei); one before the first step and one after the last always."""
    save_dir: str = "./eval"
    """-esd; the project's name is added."""
    temperature: NonNegativeFloat = 0.6
    """Sampling temperature of evaluation; 0 is greedy."""
    num_generations: Positive = 1
    """Responses per evaluation prompt."""


class ObserveConfig(Section, frozen=True, kw_only=True):
    log_dir: str = "./logs"
    """--log-dir; the project's name is added."""
    rollout_save_dir: str = "./rollouts"
    """-rsd; the project's name is added."""
    rollout_interval: Positive = 20
    """Optimizer steps between two samples of rollouts."""
    rollout_tokens: bool = False
    """Sampled rollouts hold token ids and recorded log-probs too."""
    trace: bool = True
    """Write down what every process does when, for `zbgrpo report` and Perfetto."""
    trace_limit: Positive = 200_000
    """Most records of it that a process keeps; older ones are thrown away and counted."""
    record_steps: bool = False
    """Consumers write down what every optimizer step is made of, for `zbgrpo replay`."""
    enable_profiling: bool = False
    """Write a profile of every rank with torch's profiler (--enable_profiling)."""
    profiling_steps: Positive = 3
    """Optimizer steps that it covers, after the first one."""
    tensorboard: bool = True
    wandb: bool = False
    """Log to Weights & Biases too, where it is installed."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """What rank 0 shows: a bar on a terminal, else a line per step."""


class RunConfig(Section, frozen=True, kw_only=True):
    """The whole configuration of a run."""

    project: str = "GRPO"
    """Name of the run and of its folders (-p)."""
    seed: NonNegative = 42
    """--seed"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    @property
    def dp_size(self) -> int:
        """Data-parallel groups of the trainer: consumer ranks / (tp x pp)."""
        return (self.cluster.num_trainers or 1) // (
            self.trainer.tensor_parallel_size * self.trainer.pipeline_parallel_size
        )

    @property
    def groups_per_step(self) -> int:
        """S: effective groups of one optimizer step, tbs x dp_size."""
        return self.trainer.train_batch_size * self.dp_size

    @property
    def groups_per_minibatch(self) -> int:
        """tMbs x dp_size."""
        return self.trainer.train_minibatch_size * self.dp_size

    @property
    def buffer_limit(self) -> int:
        """Groups that may wait in the hub: -cbsl, or 2 x tMbs x dp_size."""
        limit = self.ledger.buffer_limit
        return limit if limit > 0 else 2 * self.groups_per_minibatch

    @property
    def num_slots(self) -> int:
        """Decode slots of one producer: imbs x G."""
        return self.inference.inference_microbatch_size * self.inference.num_generations

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        cluster = self.cluster
        return (cluster.num_trainers or 0) + (cluster.num_inferencer or 0) * cluster.producer_tensor_parallel_size
