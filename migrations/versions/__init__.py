"""One file per schema revision, numbered in order."""
