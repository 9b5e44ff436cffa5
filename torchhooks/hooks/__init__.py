"""The built-in hooks, grouped by purpose."""
