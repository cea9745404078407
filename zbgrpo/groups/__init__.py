"""Process groups: the only package that makes them."""
