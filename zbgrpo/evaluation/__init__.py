"""What an evaluation's rows amount to."""
