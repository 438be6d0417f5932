"""Processes of the operating system: references, records and logs."""
