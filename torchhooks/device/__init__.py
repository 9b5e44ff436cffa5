"""Values on their way from a device to the host, without making the device or the host wait.

Read ``readback`` first: nothing else in torchhooks waits for a device. ``cuda`` has the copier of CUDA devices, and
``snapshot`` the copies from which a checkpoint is written while training continues.
"""
