"""The programs: each a short door to the library."""
