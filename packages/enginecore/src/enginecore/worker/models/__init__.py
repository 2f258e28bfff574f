"""Decoders: what one is (`spec`), the one implementation (`decoder`), and the families it covers."""
