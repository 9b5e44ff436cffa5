"""Values on their way from a device to the host, without making the device or the host wait.

Read ``readback`` first: nothing outside of this package waits for a device. ``host`` says what is on the host and what
brings the rest there. ``accelerator`` has the copier for devices that need no waiting, and ``snapshot`` the copies from
which a checkpoint is written while training continues.
"""
