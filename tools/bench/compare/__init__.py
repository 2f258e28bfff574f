"""Octavo beside other engines: the same weights, the same requests, the same number of threads, in turns.

`__main__` is the command line. `setup` makes a virtual environment for each other engine, and random weights
in the formats that they read. `run` starts a process for each record (`record`, in the engine's own
environment, so it and what it imports need no more than Python's library) and watches it from outside
(`watch`). `report` turns the records into a table and a chart.
"""
