"""`zbgrpo report LOG_DIR`: everything that a run has left behind, as one HTML page that needs nothing else."""
