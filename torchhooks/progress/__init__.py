"""What a loop is doing, which all packages above know: its phase and its step, and what stops it.

Read ``loop_state`` first, which every step reads. ``signals`` are those that stop a loop.
"""
