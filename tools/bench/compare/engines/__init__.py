"""One module for each engine: `Offline`, its batch interface, and `serve`, the command of its HTTP server.

A module has both or one of the two, as `compare.peers` says.
"""
