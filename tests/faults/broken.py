"""A plug-in under which every engine fails in its fourth step."""

from faulty import faulty

faulty("model").start()
