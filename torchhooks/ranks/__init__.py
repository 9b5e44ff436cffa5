"""The processes that train one model together.

Read ``ranks`` first: the public ``Ranks`` and the transport below it. ``agreement`` has the rules by which ranks agree
on their last run, as pure functions. ``dtensors`` knows the tensors of which each rank has a part.
"""
