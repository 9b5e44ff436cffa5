"""Where a NaN came from: the same runs again, watched closely. Read ``examination`` first.

A hook that finds a NaN leaves a request, ``nan.json`` (:mod:`torchhooks.autopsy.request`). The loop that starts next
makes the examination that it asks for. ``operations`` follows values that are not finite through the operators of
torch, ``modules`` keeps figures of what modules received and returned, and ``report`` is what a person reads. Nothing
here is imported while nothing is wrong.
"""
