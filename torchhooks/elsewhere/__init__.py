"""A training run as others see it: its status, and its copy in a store such as S3.

Read ``status`` first, which needs the files of a run and nothing else. The loop does not know this package.
"""
