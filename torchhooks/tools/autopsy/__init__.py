"""Where a NaN came from: the same runs again, watched closely. Nothing here is imported while nothing is wrong.

Read ``request`` first, then the others in the order of the flow. ``request`` is what a hook that finds a NaN leaves:
``nan.json``. ``examination`` is what the loop that starts next does about it. ``watching`` looks at one run, and
``operations`` at each operator in it, to find the origin of what is not finite. ``report`` is what a person reads.
``figures`` has the numbers of one tensor.
"""
