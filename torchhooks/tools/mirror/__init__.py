"""A training run as others see it: its status, and its copy in a store such as S3.

Read ``layout`` first, which says what a copy consists of, and then ``copy``, which opens it, restores from it and
uploads, in this order. ``hook`` calls it in one thread. The loop does not know this package.
"""
