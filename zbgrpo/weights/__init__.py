"""New weights on their way from the consumers to the producers, while both go on working."""
