"""Ranks that share the requests of one model: where a request goes, who is alive, and when experts run.

A rank is a whole engine: a core with its workers. The coordinator is a process of its own, which no request
passes through: ranks report their loads to it, front-ends get them from it. Needs no torch.
"""
