"""Tiers beyond the arena: cold ones and their writer, the tiers of a library, lists of what tiers hold."""
