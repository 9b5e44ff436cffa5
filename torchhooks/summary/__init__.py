"""Curves and other summaries: the operations that hooks write, and the writers that they write to.

The functions are public: ``from torchhooks import summary``, then ``summary.histogram("weights", "fc1.weight")``. Read
``operations`` first. ``writers`` is how a hook finds its writers; ``tensorboard``, ``json_lines`` and ``trackers`` have
writers.
"""

from torchhooks.summary.operations import figure, histogram, image, scalar, text

__all__ = ["figure", "histogram", "image", "scalar", "text"]
