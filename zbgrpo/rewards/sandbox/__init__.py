"""Runs programs that nobody trusts: limits, kernel filters, namespaces, or a remote service."""
