"""Tiers beyond the arena, which are cold ones and other nodes; a library's tiers; lists of what tiers hold."""
