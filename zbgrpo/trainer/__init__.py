"""Training: what a trainer promises (`base`) and the trainers."""
