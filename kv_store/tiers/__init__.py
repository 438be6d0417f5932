"""Tiers beyond the arena: cold tiers and their writer, the tiers of a library, lists of tiers' blocks."""
