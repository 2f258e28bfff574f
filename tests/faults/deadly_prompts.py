"""Token ids that the plug-in `deadly` acts upon; importing these, unlike that, changes nothing."""

KILLS, FAILS = 300, 301
FILE = "OCTAVO_TEST_FAILS_ONCE"
"""Environment variable that names the file of prompts with FAILS."""
