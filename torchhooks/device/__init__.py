"""Values on their way from a device to the host, without making the device or the host wait.

Read ``readback`` first: nothing outside of this package waits for a device. ``snapshot`` has the copies from which a
checkpoint is written while training continues. ``accelerator`` says what is on the host, and brings the rest there.
"""
