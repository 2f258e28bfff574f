"""The engine core: its loop, its process, and the client that a front-end talks to it with."""
