"""Generation: what an engine promises (`base`) and the engines."""
