"""Where workers run, as the core sees it."""
