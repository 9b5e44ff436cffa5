"""The standard hooks, one file for each theme.

Read ``stopping`` first, which has the smallest. Hooks know the session, and never the loop.
"""
