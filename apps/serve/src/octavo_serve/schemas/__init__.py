"""Types that only the OpenAPI document names: answers, and parts of bodies that handlers read as plain dicts.

Handlers make their answers as dicts, so tests compare these with what is really answered. A field that is
UNSET is there for some requests only.
"""
