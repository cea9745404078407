"""Programs that benchmarks are compared with. Each runs in an environment of its own."""
