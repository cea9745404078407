"""zbgrpo: GRPO and DAPO on verifiable rewards, without Ray and without a bubble."""

__version__ = "0.1.0"
